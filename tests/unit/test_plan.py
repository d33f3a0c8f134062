"""`harness check`: what would be done, in words, with the device's own commands."""

from __future__ import annotations

from pathlib import Path

from harness.entry import plan_text

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SCENARIO = SCENARIOS / "quickstart.toml"


def test_the_plan_shows_shapes_commands_and_checks_in_order() -> None:
    text = plan_text(SCENARIO, None)
    lines = text.splitlines()
    assert lines[0].startswith("question")
    assert any("tor0-tor1@agg0" in line for line in lines)
    assert "      :OXC:SWIT:CONN:ADD (@1,2,3,4),(@18,17,20,19);STAT?" in lines
    assert "      ENT-PATCH::1&2&3&4,20&19&18&17:<ctag>:;" in lines
    assert lines[-1] == "nothing was opened and nothing was sent"
    order = [text.index(word) for word in ("custody", "step 0", "step 3", "restore", "check")]
    assert order == sorted(order)


def test_the_plan_says_who_is_steered_and_how() -> None:
    lines = plan_text(SCENARIO, None).splitlines()
    assert "  tor0  steered by netlink, emulated" in lines
    live = plan_text(SCENARIO, SCENARIOS / "benches/lab.toml").splitlines()
    assert "  tor2  steered by frr-ssh at ssh://root@10.0.0.22" in live
    assert any(line.startswith("restore   every ToR to no route of ours") for line in live)


def test_what_does_not_change_is_not_sent() -> None:
    text = plan_text(SCENARIO, None)
    assert ":OXC:SWIT:CONN:ONLY" not in text
    assert "DISC" not in text


def test_the_plan_of_generation_shows_engine_requests_layouts_and_switches() -> None:
    scenario = SCENARIO.with_name("parallelism-switch.toml")
    text = plan_text(scenario, None)
    assert "paced by the latency profile of Qwen2.5-14B on H800 (emulated accelerator)" in text
    assert "workload step 0: 64 requests, prompts of" in text
    assert "digest of all requests: " in text
    assert "4xTP1, up first: g0 GPUs 0 | 1; g1 GPUs 0 | 1" in text
    assert "2xTP2: g0 GPUs 0-1; g1 GPUs 0-1" in text
    assert "14.8 GB of weights a GPU; KV of 32,768 tokens an instance" in text
    assert "4 switches through 2xTP2, 4xTP1, by rebuild, all nodes at once" in text
    order = [text.index(word) for word in ("generate  ", "4xTP1, up first", "\nstep 0", "\nstep 1")]
    assert order == sorted(order)
    on_cpu = plan_text(scenario, None, "vllm")
    assert "by vLLM, with a tiny random model, on the CPU of g0, g1" in on_cpu
    assert "GB of weights" not in on_cpu


def test_requests_that_are_too_long_for_a_layout_are_told(tmp_path: Path) -> None:
    text = plan_text(generating(tmp_path, kv_max_tokens=256), None)
    longer = "52 of 128 requests cannot run: up to 667 tokens with their responses, "
    assert text.count(f"{longer}and an instance takes 257") == 2
    assert "cannot run" not in plan_text(generating(tmp_path, kv_max_tokens=700), None)


def test_rows_of_a_trace_that_are_left_out_are_told(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("in,out\n100,50\nmany,50\n100,-5\n")
    (tmp_path / "trace.toml").write_text(
        'question = "?"\nkind = "trace"\npath = "trace.csv"\nformat = "csv"\non_bad_row = "skip"\n'
        'columns = {prompt_tokens = "in", response_tokens = "out"}\n'
    )
    text = plan_text(generating(tmp_path, workload="trace.toml"), None)
    assert "workload step 0: 1 requests" in text
    assert "2 bad rows of the trace left out, the first: line 3, column 'in': expected" in text


def generating(folder: Path, *, kv_max_tokens: int = 0, workload: str = "") -> Path:
    workload = workload or str(SCENARIOS / "workloads/short.toml")
    path = folder / "scenario.toml"
    path.write_text(
        f'''question = "?"
bench = "{SCENARIOS / "benches/generation-2.toml"}"
[generation]
layout = "4xTP1"
workload = "{workload}"
profile = "{SCENARIOS / "profiles/qwen2.5-14b-h800.toml"}"
kv_max_tokens = {kv_max_tokens}
[[steps]]
do = "generate"
layouts = ["2xTP2"]
'''
    )
    return path


def training(folder: Path, *changes: tuple[str, str]) -> Path:
    """A scenario that trains on a bench of its own, both written with these changes."""
    (folder / "bench.toml").write_text(
        'name = "pods"\nworld = "emulated"\nlauncher = "namespaces"\n[tors.r0]\nuplinks = 0\n'
        '[nodes.t0]\ntor = "r0"\nemulated_gpus = 2\n[nodes.t1]\ntor = "r0"\nemulated_gpus = 4\n'
        + "".join(
            f'[nodes.g{i}]\ntor = "r0"\npod = "generate"\nemulated_gpus = 2\n' for i in range(4)
        )
    )
    text = f'''question = "?"
bench = "bench.toml"
[generation]
layout = "8xTP1"
workload = "{SCENARIOS / "workloads/short.toml"}"
profile = "{SCENARIOS / "profiles/qwen2.5-14b-h800.toml"}"
speed = 20.0
[training]
layout = "DP2TP2"
[[steps]]
do = "rl"
policies = ["static:4xTP1+2xTP2", "orchestrl"]
sync_faults = ["", "noop"]
'''
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


def test_the_plan_of_a_loop_shows_who_trains_under_which_policies(tmp_path: Path) -> None:
    lines = plan_text(training(tmp_path), None).splitlines()
    (trainer,) = (line for line in lines if line.startswith("train"))
    assert "takes what Qwen2.5-14B takes on H800 at 40 % of its peak, 20 times as fast" in trainer
    assert "collectives are real, with 0.1 % of the bytes" in trainer
    assert "  DP2TP2: t0 ranks 0-1; t1 ranks 2-3" in lines
    step = next(i for i, line in enumerate(lines) if line.startswith("step 0"))
    said = "4 steps of all prompts, samples up to 1 version old, under each of 2 policies"
    assert lines[step] == f"step 0    rl: {said}"
    told = {line.split(":")[0].strip(): line for line in lines[step + 1 : step + 8]}
    placed = "4xTP1+2xTP2: g0 GPUs 0-1; g1 GPUs 0-1; g2 GPUs 0 | 1; g3 GPUs 0 | 1; requests get an"
    assert placed in told["static"]
    assert told["orchestrl"].endswith("where there is room; layouts are planned; requests move")
    assert "t0 > g0 > g1 > g2 > g3, in buckets of 4MiB, up to 3 attempts" in told["weights"]
    assert "looks every 2 s; switches by rebuild where that saves 5 %" in told["planner"]
    assert told["balancer"].endswith("looks every 250 ms; moves up to 2 requests a second")
    assert told["fault"].endswith("the sync after step 1 is made to be a noop")


def test_the_plan_of_a_loop_leaves_out_what_no_policy_does(tmp_path: Path) -> None:
    path = training(tmp_path, (', "orchestrl"]', ', "oracle"]\nsync = "tree"'))
    text = plan_text(path, None)
    assert "weights: t0 > g0; g0 > g1, g2; g1 > g3, in" in text
    assert "; it is told how long responses will be" in text
    alone = plan_text(training(tmp_path, (', "orchestrl"]', "]")), None)
    assert "under 1 policy" in alone
    assert "planner" not in alone
    assert "balancer" not in alone


def test_the_plan_tells_which_node_serves_which(tmp_path: Path) -> None:
    pairs = (', "orchestrl"]', ', "oracle"]\nsync = "pairs"')
    text = plan_text(training(tmp_path, pairs), None)
    assert "weights: t0 > g0; g0 > g2; t1 > g1; g1 > g3, in" in text


def test_the_plan_of_real_training_says_so(tmp_path: Path) -> None:
    real = (
        ("[training]\n", '[training]\nmode = "real"\n'),
        ("[generation]\n", '[generation]\nengine = "vllm"\n'),
        ("speed = 20.0", "temperature = 1.0"),
    )
    text = plan_text(training(tmp_path, *real), None)
    assert "train     real, of the tiny model that vLLM makes: its rewards are real" in text
