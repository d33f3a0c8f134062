"""What a scenario generates with is refused with its key and what would be right, or fits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import BadFile, UsageError
from harness.model.bench import Bench, Node, Tor
from harness.model.load import (
    check_together,
    load_generation,
    load_scenario,
    with_engine,
)
from harness.model.placement import gpus_of
from harness.model.scenario import Scenario

PROFILE = Path(__file__).parents[2] / "scenarios/profiles/qwen2.5-14b-h800.toml"
TEXT = f"""
question = "?"
[generation]
engine = "paced"
layout = "4xTP1"
workload = "work.toml"
profile = "{PROFILE}"
pool = ["4xTP1", "2xTP2"]
nodes = ["g0", "g1"]
bytes_scale = 0.001
vllm_options = {{ enforce_eager = true }}
[[steps]]
do = "generate"
layouts = ["2xTP2", "4xTP1"]
count = 4
strategy = "rebuild"
migrations = 3
rest_s = 1.0
"""
WORK = """
question = "?"
kind = "generator"
steps = 2
prompts = 3
cap_tokens = 100
prompt_tokens = { p50 = 20 }
response_tokens = { p50 = 50 }
"""


def bench(gpus: int = 0) -> Bench:
    node = Node(tor="t0", pod="generate", gpus=gpus, emulated_gpus=0 if gpus else 2)
    nodes = {"g0": node, "g1": node}
    return Bench(
        name="two", world="emulated", nodes=nodes | {"n0": Node(tor="t0")}, tors={"t0": Tor()}
    )


def written(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    (tmp_path / "work.toml").write_text(WORK)
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return path


def told(path: Path, on: Bench, engine: str = "") -> str:
    """Return all problems of the scenario on this bench, whoever finds them."""
    try:
        scenario = load_scenario(path)
        if engine:
            scenario = with_engine(scenario, engine, path)  # type: ignore[arg-type]
        assert scenario.generation
        files = load_generation(scenario.generation, nodes_are_here=True)
        check_together(scenario, on, path, files)
    except BadFile as error:
        return str(error)
    return ""


def test_a_scenario_that_generates_finds_its_files_beside_itself(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path))
    assert scenario.generation
    assert scenario.generation.workload == str(tmp_path / "work.toml")
    assert scenario.generation.profile == str(PROFILE)
    assert scenario.generation.model == ""
    files = load_generation(scenario.generation, nodes_are_here=True)
    assert len(files.replay.step(1)) == 3
    assert files.shape
    assert told(written(tmp_path), bench()) == ""
    assert told(written(tmp_path), bench(), "vllm") == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('engine = "paced"', 'engine = "pased"', "generation.engine: 'pased' is not one of"),
        ('layout = "4xTP1"', 'layout = "4TP1"', "generation.layout: '4TP1' is not a layout such"),
        ('layout = "4xTP1"', "", "generation.layout: missing"),
        ('["4xTP1", "2xTP2"]', '["x"]', "generation.pool[0]: 'x' is not a layout such as"),
        ('["4xTP1", "2xTP2"]', '["4xTP1", "4xTP1"]', "generation.pool: '4xTP1' is listed 2 times"),
        ('["g0", "g1"]', '["g0", "g0"]', "generation.nodes: 'g0' is listed 2 times"),
        (f'profile = "{PROFILE}"', "", "generation.profile: missing; the paced engine takes its"),
        (f'profile = "{PROFILE}"', 'profile = "none.toml"', "none.toml: no such file"),
        (f'profile = "{PROFILE}"', 'profile = "~x/p"', "generation.profile: only your own home"),
        ('"work.toml"', '" "', "generation.workload: empty; name a workload file"),
        ('"work.toml"', '"scenario.toml"', "this is a scenario; a workload is expected here"),
        ("bytes_scale = 0.001", "bytes_scale = 0", "generation.bytes_scale: expected more than 0"),
        ("bytes_scale = 0.001", "step_max_tokens = 10", "generation.step_max_tokens: 10 must exce"),
        ("bytes_scale = 0.001", "sequences_max = 0", "generation.sequences_max: expected 1 to"),
        ("bytes_scale = 0.001", "kv_max_tokens = -1", "generation.kv_max_tokens: expected 0 to"),
        ("enforce_eager = true", "seed = 1", "generation.vllm_options.seed: leave it out; the sce"),
        ("enforce_eager = true", "a = [1]", "generation.vllm_options.a: expected"),
        ('layouts = ["2xTP2", "4xTP1"]', 'layouts = ["2TP2"]', "steps[0].layouts[0]: '2TP2' is no"),
        ('layouts = ["2xTP2", "4xTP1"]', "", "steps[0].layouts: empty; name the layouts to switch"),
        ("count = 4", "count = -1", "steps[0].count: expected 0 to"),
        ("rest_s = 1.0", "rest_s = -1.0", "steps[0].rest_s: expected 0 or more"),
        ("rest_s = 1.0", "stall_s = 0", "steps[0].stall_s: expected more than 0"),
        ("rest_s = 1.0", "workload_step = 2", "steps[0].workload_step: the workload has steps 0 t"),
        ("rest_s = 1.0", 'requests = "migrate"', 'steps[0].requests: with "migrate" requests move'),
        ('strategy = "rebuild"', 'strategy = "sleep"', "steps[0].strategy: 'sleep' is not one of"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_would_be_right(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in told(written(tmp_path, (old, new)), bench())


def test_a_generate_step_needs_the_table(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('question = "?"\n[[steps]]\ndo = "generate"\n')
    with pytest.raises(BadFile, match=r"steps\[0\]\.do: generate needs a table \[generation\]"):
        load_scenario(path)


def test_a_pool_wakes_what_was_built(tmp_path: Path) -> None:
    path = written(
        tmp_path, ('"rebuild"', '"pool"'), ('["2xTP2", "4xTP1"]\ncount', '["1xTP2"]\ncount')
    )
    assert "steps[0].layouts[0]: '1xTP2' is not in generation.pool" in told(path, bench())


def test_requests_need_another_instance_to_move_to(tmp_path: Path) -> None:
    path = written(
        tmp_path, ('layout = "4xTP1"', 'layout = "1xTP2"'), ('["2xTP2", "4xTP1"]', '["1xTP1"]')
    )
    assert "steps[0].migrations: no layout has two instances" in told(path, bench())


def test_requests_that_are_to_migrate_need_another_node(tmp_path: Path) -> None:
    rolling = ("rest_s = 1.0", 'requests = "migrate"\norder = "rolling"')
    one = ('["g0", "g1"]', '["g0"]'), ('layout = "4xTP1"', 'layout = "2xTP1"')
    assert told(written(tmp_path, rolling), bench()) == ""
    assert 'so no request can "migrate"' in told(written(tmp_path, rolling, *one), bench())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("8xTP1", "8xTP1 needs 8 GPUs; there are 4"),
        ("1xTP4", "TP 4 would span nodes of 2 GPUs"),
        ("2xEP2TP2", "EP 2: the model has no experts"),
        ("1xTP1PP64", "PP 64 exceeds the 48 layers"),
    ],
)
def test_a_layout_that_can_never_be_is_refused_with_every_reason(
    tmp_path: Path, layout: str, said: str
) -> None:
    path = written(tmp_path, ('["2xTP2", "4xTP1"]', f'["{layout}", "4xTP1"]'))
    found = told(path, bench())
    assert f"steps[0].layouts[0]: '{layout}' cannot be on bench 'two': " in found
    assert said in found


def test_a_layout_that_the_memory_does_not_hold_is_refused(tmp_path: Path) -> None:
    big = PROFILE.with_name("qwen3-235b-a22b-h800.toml")
    found = told(written(tmp_path, (str(PROFILE), str(big))), bench())
    assert "leave no room for KV in the 85.5 GB of H800" in found


def test_a_layout_of_which_the_profile_knows_nothing_is_refused(tmp_path: Path) -> None:
    text = PROFILE.read_text().replace('2 = { value = 8.5, source = "fit" }\n', "")
    (tmp_path / "profile.toml").write_text(text)
    found = told(written(tmp_path, (str(PROFILE), "profile.toml")), bench())
    assert "has no roofline.all_reduce_us for a group of 2 GPUs" in found


def test_nodes_must_be_there_and_have_gpus(tmp_path: Path) -> None:
    path = written(tmp_path, ('["g0", "g1"]', '["g0", "g7"]'))
    assert "generation.nodes[1]: bench 'two' has no node 'g7'; there are" in told(path, bench())
    path = written(tmp_path, ('["g0", "g1"]', '["n0"]'))
    assert "node 'n0' of bench 'two' has no GPU; give it gpus, or emulated_" in told(path, bench())
    path = written(tmp_path, ('nodes = ["g0", "g1"]\n', ""))
    assert told(path, bench()) == ""
    train_only = msgspec.structs.replace(bench(), nodes={"n0": Node(tor="t0", gpus=8)})
    assert """bench 'two' has no node with pod = "generate\"""" in told(path, train_only)


def test_without_gpus_vllm_splits_by_tp_and_wakes_no_pool(tmp_path: Path) -> None:
    path = written(tmp_path, ('["2xTP2", "4xTP1"]', '["1xPP2TP1"]'))
    assert "without GPUs vLLM splits a model by TP only" in told(path, bench(), "vllm")
    assert told(path, bench()) == ""
    pool = written(tmp_path, ('strategy = "rebuild"', 'strategy = "pool"'))
    assert told(pool, bench()) == ""
    assert "steps[0].strategy: vLLM's sleep frees nothing" in told(pool, bench(), "vllm")
    assert told(pool, bench(gpus=2), "vllm") == ""


def test_another_engine_is_checked_as_if_the_file_named_it(tmp_path: Path) -> None:
    path = written(
        tmp_path, ('engine = "paced"', 'engine = "vllm"'), (f'profile = "{PROFILE}"', "")
    )
    assert told(path, bench()) == ""
    assert "generation.profile: missing" in told(path, bench(), "paced")
    with pytest.raises(UsageError, match=r"has no table \[generation\]"):
        with_engine(Scenario(question="?", steps=()), "vllm", path)


def test_a_simulated_bench_computes_no_token(tmp_path: Path) -> None:
    simulated = msgspec.structs.replace(bench(), world="simulated")
    assert told(written(tmp_path), simulated) == ""
    said = told(written(tmp_path), simulated, "vllm")
    assert 'generation.engine: "vllm" computes tokens, and a simulated bench only times' in said


def test_more_prompts_by_gpu_than_can_be_held_are_refused(tmp_path: Path) -> None:
    generation = load_scenario(written(tmp_path)).generation
    assert generation
    asked = msgspec.structs.replace(generation, prompts_per_gpu=1e9)
    with pytest.raises(
        BadFile, match=r"with generation.prompts_per_gpu = 1e\+09: prompts: expected"
    ):
        load_generation(asked, nodes_are_here=True, bench=bench())


def test_another_engine_takes_stars_as_the_file_does(tmp_path: Path) -> None:
    path = written(tmp_path, ('layout = "4xTP1"', 'layout = "*xTP1"'))
    changed = with_engine(load_scenario(path), "vllm", path).generation
    assert changed
    assert (changed.engine, changed.layout) == ("vllm", "*xTP1")


def test_a_model_folder_must_be_here_only_where_the_nodes_are(tmp_path: Path) -> None:
    path = written(tmp_path, ('engine = "paced"', 'engine = "vllm"\nmodel = "weights"'))
    generation = load_scenario(path).generation
    assert generation
    assert load_generation(generation, nodes_are_here=False).shape is None
    with pytest.raises(BadFile, match="weights: no such model folder"):
        load_generation(generation, nodes_are_here=True)
    (tmp_path / "weights").mkdir()
    with pytest.raises(BadFile, match=r"config\.json"):
        load_generation(generation, nodes_are_here=False)


def test_the_nodes_that_generate_are_those_of_their_pod_or_those_named(tmp_path: Path) -> None:
    generation = load_scenario(written(tmp_path)).generation
    assert generation
    assert gpus_of(generation, bench()) == {"g0": 2, "g1": 2}
    one = msgspec.structs.replace(generation, nodes=("g1",))
    assert gpus_of(one, bench(gpus=8)) == {"g1": 8}
    whole_pod = msgspec.structs.replace(generation, nodes=())
    assert gpus_of(whole_pod, bench()) == {"g0": 2, "g1": 2}
