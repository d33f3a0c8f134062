"""What a scenario trains, and under which policies, is refused with its key, or fits its bench."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import BadFile
from harness.model.bench import Bench, Node, Tor
from harness.model.degrees import Degrees, parse_degrees
from harness.model.layout import parse_mix
from harness.model.load import check_together, load_generation, load_scenario, with_engine
from harness.model.policies import PolicyName, parse_policy_name

PROFILES = Path(__file__).parents[2] / "scenarios/profiles"
PROFILE = PROFILES / "qwen2.5-14b-h800.toml"
TEXT = f"""
question = "?"
[generation]
layout = "4xTP1"
workload = "work.toml"
profile = "{PROFILE}"
pool = ["4xTP1"]
temperature = 0.0
[training]
mode = "paced"
layout = "DP2TP2"
flops_share = 0.4
bytes_scale = 0.001
micro_batch_tokens = 16384
learning_rate = 0.003
clip = 0.2
[[steps]]
do = "rl"
steps = 4
policies = ["static:4xTP1", "orchestrl"]
staleness_max = 1
bucket = "4MiB"
strategy = "rebuild"
[[checks]]
metric = "rl.gain[policy=orchestrl,over=static:4xTP1]"
at_least = 1.0
"""
WORK = """
question = "?"
kind = "generator"
steps = 2
prompts = 3
samples = 2
cap_tokens = 100
prompt_tokens = { p50 = 20 }
response_tokens = { p50 = 50 }
turn_weights = [1.0]
"""
REAL = (
    ('mode = "paced"', 'mode = "real"'),
    ('layout = "4xTP1"', 'layout = "4xTP1"\nengine = "vllm"'),
)
HOT = (*REAL, ("temperature = 0.0", "temperature = 1.0"))


def bench(**nodes: Node) -> Bench:
    there = {
        "t0": Node(tor="r0", emulated_gpus=2),
        "t1": Node(tor="r0", emulated_gpus=2),
        "g0": Node(tor="r0", pod="generate", emulated_gpus=2),
        "g1": Node(tor="r0", pod="generate", emulated_gpus=2),
    }
    return Bench(name="four", world="emulated", nodes=there | nodes, tors={"r0": Tor()})


def told(
    folder: Path,
    *changes: tuple[str, str],
    work: tuple[str, str] = ("", ""),
    on: Bench | None = None,
    engine: str = "",
) -> str:
    """Return all problems of the scenario, so changed, on this bench, whoever finds them."""
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    (folder / "work.toml").write_text(WORK.replace(*work))
    path = folder / "scenario.toml"
    path.write_text(text)
    try:
        scenario = load_scenario(path)
        if engine:
            scenario = with_engine(scenario, engine, path)  # type: ignore[arg-type]
        assert scenario.generation
        files = load_generation(scenario.generation, nodes_are_here=True)
        check_together(scenario, on or bench(), path, files)
    except BadFile as error:
        return str(error)
    return ""


def test_sound_scenarios_have_no_problem(tmp_path: Path) -> None:
    assert told(tmp_path) == ""
    assert told(tmp_path, *HOT) == ""
    oracle = ('"orchestrl"]', '"orchestrl", "oracle", "best_static"]')
    assert told(tmp_path, *HOT, oracle) == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"DP2TP2"', '"2xTP2"', "training.layout: '2xTP2' is no layout of training such as"),
        ('"DP2TP2"', '"DP2EP4"', "training.layout: 'DP2EP4': EP 4 does not divide DP 2"),
        ('"DP2TP2"', '"DP2EP2"', "training.layout: 'DP2EP2': EP 2: the model has no experts"),
        ('"DP2TP2"', '"TP3"', "training.layout: 'TP3': TP 3 does not divide the 40 attention"),
        ('"DP2TP2"', '"PP64"', "training.layout: 'PP64': PP 64 exceeds the 48 layers"),
        ('"DP2TP2"', '"DP8"', "takes 8 ranks, and bench 'four' has 4 that train: t0 has 2, t1"),
        ("flops_share = 0.4", "flops_share = 1.5", "training.flops_share: expected more than 0, a"),
        ("scale = 0.001", "scale = 0", "training.bytes_scale: expected more than 0, and 1 at most"),
        ("tokens = 16384", "tokens = 0", "training.micro_batch_tokens: expected 1 to"),
        ("learning_rate = 0.003", "learning_rate = -1.0", "training.learning_rate: expected more"),
        ("clip = 0.2", "clip = 1.0", "training.clip: expected more than 0 and less than 1"),
        ("clip = 0.2", "clipp = 0.2", "training.clipp: unknown key; did you mean 'clip'?"),
        ("clip = 0.2", 'nodes = ["t0", "t0"]', "training.nodes: 't0' is listed 2 times"),
        ("clip = 0.2", 'nodes = ["t7"]', "training.nodes[0]: bench 'four' has no node 't7'; there"),
        ("clip = 0.2", 'nodes = ["g0", "t0"]', "training: node 'g0' of bench 'four' generates; na"),
        ("clip = 0.2", 'profile = "~x/p"', "training.profile: only your own home folder"),
        ("steps = 4", "steps = 0", "steps[0].steps: expected 1 to"),
        ("steps = 4", 'sync_faults = ["", "", "", "", "noop"]', "sync_faults: 5 faults for 4 st"),
        ("staleness_max = 1", "staleness_max = -1", "steps[0].staleness_max: expected 0 to"),
        ("staleness_max = 1", "stalenes_max = 1", "unknown key; did you mean 'staleness_max'?"),
        ("staleness_max = 1", "prompts_per_step = 4", "a batch of 4 is asked for, and step 0"),
        ("staleness_max = 1", "sync_retries = -1", "steps[0].sync_retries: expected 0 to"),
        ("staleness_max = 1", "replan_s = 0", "steps[0].replan_s: expected more than 0"),
        ("staleness_max = 1", "balance_ms = 0", "steps[0].balance_ms: expected more than 0"),
        ("staleness_max = 1", "gain_min_pct = 100.0", "steps[0].gain_min_pct: expected 0 or more,"),
        ("staleness_max = 1", "moves_per_s_max = -1.0", "moves_per_s_max: expected 0 or more"),
        ("staleness_max = 1", "switch_s = -1.0", "steps[0].switch_s: expected 0 or more"),
        ("staleness_max = 1", "train_timeout_s = 0", "train_timeout_s: expected more than 0"),
        (
            '"4MiB"',
            '"4MiB"\nsync = "pair"',
            'sync: \'pair\' is not one of "chain", "pairs", "tree"',
        ),
        ('"4MiB"', '"4"', "steps[0].bucket: '4' is very little; use 4KiB or more"),
        ('"4MiB"', '"4M"', "steps[0].bucket: '4M': unknown unit 'M'; write one of"),
        ('["static:4xTP1", "orchestrl"]', "[]", "steps[0].policies: empty; name at least one"),
        ('"orchestrl"]', '"static:4xTP1"]', "steps[0].policies: 'static:4xTP1' is listed 2 times"),
        ('"orchestrl"]', '"orchestra"]', "policies[1]: no policy 'orchestra'; did you mean 'orche"),
        ('"orchestrl"]', '"static:4TP1"]', "steps[0].policies[1]: '4TP1' is not a layout such as"),
        ('"orchestrl"]', '"static:4xTP1/lazy"]', 'stands "/least_loaded", or nothing'),
        (
            '"orchestrl"]',
            '"orchestrl", "static:8xTP1"]',
            "policies[2]: '8xTP1' cannot be on bench 'fo",
        ),
        (
            '"orchestrl"]',
            '"orchestrl", "static:2xTP1+2xTP2"]',
            "'2xTP1+2xTP2' cannot be on bench 'four'",
        ),
        ('"rebuild"', '"pool"\nswitch_s = 1.0', ""),
        ("policy=orchestrl,", "policy=oracle,", "no policy 'oracle'; there are"),
        ("over=static:4xTP1", "over=best_static", "checks[0].metric: no over 'best_static'"),
        ("temperature = 0.0", "temperature = -1.0", "generation.temperature: expected 0 or more"),
        ("temperature = 0.0", "speed = 0", "generation.speed: expected more than 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_would_be_right(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    found = told(tmp_path, (old, new))
    assert said in found
    assert bool(found) == bool(said)


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    found = told(tmp_path, ("clip = 0.2", "clip = 7.0"), ("steps = 4", "steps = 0"))
    assert "training.clip" in found
    assert "steps[0].steps" in found


@pytest.mark.parametrize("table", ["generation", "training"])
def test_a_loop_needs_both_tables(tmp_path: Path, table: str) -> None:
    begin = TEXT.index(f"[{table}]")
    end = TEXT.index("[", TEXT.index('layout = "', begin) if table == "training" else begin + 1)
    end = TEXT.index("[training]") if table == "generation" else TEXT.index("[[steps]]")
    path = tmp_path / "scenario.toml"
    path.write_text(TEXT[:begin] + TEXT[end:])
    with pytest.raises(BadFile, match=rf"steps\[0\]\.do: rl needs a table \[{table}\]"):
        load_scenario(path)


def test_what_trains_fits_what_generates(tmp_path: Path) -> None:
    assert 'training.mode: "real" learns from tokens' in told(tmp_path, REAL[0])
    assert "training.mode: vLLM cannot load" in told(tmp_path, REAL[1])
    assert "generation.temperature: with 0 all responses" in told(tmp_path, *REAL)
    found = told(tmp_path, engine="vllm")
    assert 'use "real", or generation.engine = "paced" (--engine vllm)' in found


def test_real_training_needs_samples_to_compare_of_one_turn(tmp_path: Path) -> None:
    alone, turns = ("samples = 2", "samples = 1"), ("[1.0]", "[0, 1]\ntool_tokens = { p50 = 9 }")
    assert "one for each; give it samples = 2 or more" in told(tmp_path, *HOT, work=alone)
    assert "has requests of several" in told(tmp_path, *HOT, work=turns)
    assert told(tmp_path, work=alone) == told(tmp_path, work=turns) == ""


def test_somebody_must_train(tmp_path: Path) -> None:
    nobody = {name: Node(tor="r0", pod="generate", emulated_gpus=2) for name in ("t0", "t1")}
    found = told(tmp_path, on=bench(**nobody))
    assert """training: bench 'four' has no node with pod = "train\"""" in found
    without_gpus = bench(t0=Node(tor="r0"), t1=Node(tor="r0"))
    assert "has 2 that train: t0 has 1, t1 has 1" in told(tmp_path, on=without_gpus)
    assert told(tmp_path, ('"DP2TP2"', '"DP2"'), on=without_gpus) == ""


def test_pairs_need_several_nodes_that_train(tmp_path: Path) -> None:
    pairs = ('"4MiB"', '"4MiB"\nsync = "pairs"')
    assert told(tmp_path, pairs) == ""
    alone = told(tmp_path, pairs, ("DP2TP2", "TP2"))
    assert "steps[0].sync: \"pairs\" needs two nodes that train, and all ranks of 'TP2'" in alone
    assert 'are on t0; use "chain", or more ranks' in alone


def test_nodes_that_cannot_generate_are_told_once(tmp_path: Path) -> None:
    found = told(tmp_path, on=bench(g0=Node(tor="r0", pod="generate")))
    assert "node 'g0' of bench 'four' has no GPU" in found
    assert "cannot be on bench" not in found


def test_a_pool_holds_what_policies_wake(tmp_path: Path) -> None:
    pool = ('"rebuild"', '"pool"')
    other = ('"static:4xTP1", ', '"static:2xTP2", '), ("over=static:4xTP1", "over=static:2xTP2")
    assert "policies[0]: '2xTP2' is not in generation.pool" in told(tmp_path, pool, *other)
    assert "has nothing to wake" in told(tmp_path, pool, ('pool = ["4xTP1"]\n', ""))
    assert "vLLM's sleep frees nothing without GPUs" in told(tmp_path, *HOT, pool)


def test_experts_are_split_over_their_number(tmp_path: Path) -> None:
    big = PROFILES / "qwen3-235b-a22b-h800.toml"
    nodes = {name: Node(tor="r0", pod="generate", emulated_gpus=8) for name in ("g0", "g1")}
    of = {"t0": Node(tor="r0", emulated_gpus=8), "t1": Node(tor="r0", emulated_gpus=8)}
    changes = (str(PROFILE), str(big)), ('layout = "4xTP1"', 'layout = "2xTP8EP8"')
    held = ('"static:4xTP1"', '"static:2xTP8EP8"'), ("over=static:4xTP1", "over=static:2xTP8EP8")
    on = bench(**nodes, **of)
    assert told(tmp_path, *changes, *held, ('"DP2TP2"', '"DP8EP8"'), ("pool", "#"), on=on) == ""
    found = told(tmp_path, *changes, *held, ('"DP2TP2"', '"DP12EP12"'), ("pool", "#"), on=on)
    assert "EP 12 does not divide the 128 experts" in found


def test_paths_of_training_lie_beside_the_scenario(tmp_path: Path) -> None:
    told(tmp_path, ("clip = 0.2", 'profile = "p.toml"'))
    training = load_scenario(tmp_path / "scenario.toml").training
    assert training
    assert training.profile == str(tmp_path / "p.toml")
    assert training.model == ""


def test_degrees_are_written_as_they_are_read() -> None:
    assert parse_degrees("DP2 TP2") == Degrees(dp=2, tp=2)
    for text in ("DP1", "DP2TP2", "TP4", "DP4PP2EP2"):
        assert str(parse_degrees(text)) == text
    assert parse_degrees("DP4TP2PP2EP4").ranks == 16
    for text in ("", "DP0", "DP2DP2", "dp2", "DP2X", "1xTP2"):
        with pytest.raises(ValueError, match="is no layout of training"):
            parse_degrees(text)
    assert msgspec.json.decode(msgspec.json.encode(Degrees(pp=3)), type=Degrees).pp == 3


def test_names_of_policies_are_taken_apart() -> None:
    assert parse_policy_name("oracle") == PolicyName("oracle")
    mixed = PolicyName("static", parse_mix("4xTP1+1xTP4"), "least_loaded")
    assert parse_policy_name("static:4xTP1+1xTP4/least_loaded") == mixed
    assert parse_policy_name("static:8xTP1").routing == "assigned"
    for text in ("", "best-static", "Oracle", "oracle:8xTP1"):
        with pytest.raises(ValueError, match="no policy"):
            parse_policy_name(text)
