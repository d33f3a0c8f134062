"""A scenario file is read whole, or refused with everything that is wrong with it."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BadFile, ExitCode
from harness.fabric.circuits import plan_shape
from harness.fabric.topology import topology_of
from harness.model.load import bench_path, check_together, load_bench, load_map, load_scenario
from harness.model.scenario import Collectives, Reconfigure, Shape

SHIPPED = Path(__file__).parents[2] / "scenarios/quickstart.toml"
TEXT = SHIPPED.read_text()
BENCH = load_bench(SHIPPED.parent / "benches/emulated-4.toml")


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_scenario(path)
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value.problems


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def test_the_shipped_scenario_fits_the_bench_it_names() -> None:
    scenario = load_scenario(SHIPPED)
    bench = load_bench(bench_path(scenario, SHIPPED))
    check_together(scenario, bench, SHIPPED)
    topology = topology_of(bench)
    ring = plan_shape(topology, "ring", scenario.shapes["ring"])
    turned = plan_shape(topology, "turned", scenario.shapes["turned"])
    assert len(ring.links) == len(turned.links) == 4
    assert not ring.unserved
    assert not ring.links & turned.links  # every circuit moves


def test_the_question_is_the_first_line() -> None:
    for path in SHIPPED.parent.glob("*.toml"):
        assert path.read_text().startswith("question = "), path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("question = ", "questoin = ", "questoin: unknown key; did you mean 'question'?"),
        ('shape = "ring"', 'shape = "rign"', "steps[1].shape: no shape 'rign'; did you mean 'ring"),
        ('["turned", "ring"]', '["turned", "rin"]', "steps[3].shapes[1]: no shape 'rin'"),
        ('["turned", "ring"]', '["turned"]', "steps[3].shapes: the same shape again changes noth"),
        ('["turned", "ring"]', "[]", "steps[3].shapes: empty"),
        ("count = 10", "count = 0", "steps[3].count: expected 1 to"),
        ('do = "shape"', 'do = "shpe"', "steps[1].do: 'shpe' is not one of"),
        ('do = "shape"\n', "", "steps[1].do: missing; expected one of"),
        ('do = "shape"', "do = []", "steps[1].do: expected one of"),
        (
            '"1MiB", "4MiB"',
            '"1mib", "4MiB"',
            "steps[0].sizes[0]: '1mib': unknown unit 'mib'; write",
        ),
        ('"1MiB", "4MiB"', '"1M", "4MiB"', "one of B, KB, MB, GB (1000) or KiB, MiB, GiB (1024)"),
        ('"1MiB", "4MiB"', '"-1MiB", "4MiB"', "'-1MiB' is not a size such as"),
        ('"1MiB", "4MiB"', '"0", "4MiB"', "a size lies between 1 byte and"),
        ('"1MiB", "4MiB"', '"0.3KiB", "4MiB"', "'0.3KiB' is not a whole number of bytes"),
        ('"1MiB", "4MiB"', '"4MiB", "4MiB"', "steps[0].sizes: '4MiB' is listed twice"),
        ('"1MiB", "4MiB"', "1048576", "steps[0].sizes[0]: expected text in quotes"),
        (
            'ops = ["all_reduce", "all',
            'ops = ["allreduce", "all',
            "steps[0].ops[0]: 'allreduce' is",
        ),
        ("iterations = 5", "iterations = 0", "steps[0].iterations: expected 1 to"),
        ('template = "dark"', "", "shapes.dark: list its circuits"),
        ('template = "dark"', 'circuits = ["tor0-tor1"]', "shapes.dark.circuits[0]: a circuit is"),
        ('template = "dark"', 'circuits = ["a-a@b"]', "a cannot be joined to itself"),
        (
            'template = "dark"',
            'template = "ring"\ncircuits = ["a-b@c"]',
            "keep one of the two keys",
        ),
        ("[shapes.dark]", "[shapes.electrical]", "this name means that no circuit is used"),
        ("at_least = 2.0", "", "checks[0]: no limit; set at_least or at_most"),
        ("at_least = 2.0", "at_least = 2.0\nat_most = 1.0", "checks[0].at_least: above at_most"),
        ("collective.wrong", "collective.wrnog", "did you mean 'collective.wrong'?"),
        ("reconfigure.overhead_ms", "reconfigure.overhead_us", "did you mean 'reconfigure.overhea"),
        ("[path=ring,size=4MiB]", "[path=rng,size=4MiB]", "checks[0].metric: no path 'rng'"),
        ("[path=ring,size=4MiB]", "[path=ring,sise=4MiB]", "has no label 'sise'; did you mean 's"),
        ("[path=ring,size=4MiB]", "[path=ring,size=4mb]", "unknown unit 'mb'; write \"4MB\""),
        ("[path=ring,size=4MiB]", "[path]", "labels are written [name=value,...]"),
        ("seed = 1", 'seed = 1\nnccl_env = {NCCL_IB_TIMEOT = "22"}', "did you mean 'NCCL_IB_TIMEO"),
        ("seed = 1", 'seed = 1\nnccl_env = {LD_PRELOAD = "x.so"}', "LD_PRELOAD: may not be set"),
        ("seed = 1", "seed = 1\nsteps = []", "not TOML"),
        ("timeout_s = 300.0", "timeout_s = 0", "timeout_s: expected more than 0"),
        ("timeout_s = 300.0", "timeout_s = 1e10", "timeout_s: expected 1e+09 at most"),
        ("seed = 1", "seed = -1", "seed: expected 0 or more"),
    ],
)
def test_a_problem_is_named_with_its_key_and_what_would_be_right(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in "\n".join(problems(tmp_path, changed(TEXT, old, new)))


def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    bench = SHIPPED.parent / "benches/emulated-4.toml"
    circuits = tmp_path / "map.toml"
    circuits.write_text('[circuits]\n"1" = 17\n')
    for load, path, said in (
        (load_scenario, bench, "this is a bench file; a scenario is expected here"),
        (load_bench, SHIPPED, "this is a scenario; a bench file is expected here"),
        (load_bench, circuits, "this is a map; a bench file is expected here"),
        (load_map, bench, "this is a bench file; a map is expected here"),
    ):
        with pytest.raises(BadFile) as caught:
            load(path)  # type: ignore[operator]
        assert caught.value.problems == [said]


def test_a_scenario_without_steps_is_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, 'question = ""\nsteps = []\n')
    assert [line.partition(":")[0] for line in found] == ["question", "steps"]


def test_a_scenario_without_a_bench_says_how_to_give_one() -> None:
    scenario = msgspec.structs.replace(load_scenario(SHIPPED), bench="")
    with pytest.raises(BadFile, match="--bench FILE"):
        bench_path(scenario, SHIPPED)


@pytest.mark.parametrize(
    ("circuits", "said"),
    [
        (("tor0-tor9@agg0",), "shapes.mine.circuits[0]: bench 'emulated-4' has no ToR 'tor9'"),
        (("tor0-tor1@agg7",), "has no switch 'agg7'; did you mean 'agg"),
        (("tor0-tor1@agg0", "tor1-tor2@agg0"), "circuits[1]: no uplink of tor1 on agg0 is left"),
    ],
)
def test_listed_circuits_must_be_on_the_bench(circuits: tuple[str, ...], said: str) -> None:
    scenario = msgspec.structs.replace(
        load_scenario(SHIPPED), shapes={"mine": Shape(circuits=circuits)}
    )
    with pytest.raises(BadFile) as caught:
        check_together(scenario, BENCH, "s.toml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("s.toml: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            'ops = ["all_gather"]\nsizes = ["4MiB", "63"]',
            "steps[0].sizes[1]: '63' leaves nothing to all_gather among 4 ranks; float32 takes 64B",
        ),
        (
            'ops = ["all_gather"]\nsizes = ["31"]\ngroup = "pairs"',
            "steps[0].sizes[0]: '31' leaves nothing to all_gather among 2 ranks; float32 takes 32B",
        ),
        (
            'sizes = ["1B"]\ndtype = "float16"',
            "steps[0].sizes[0]: '1B' leaves nothing to all_reduce among 4 ranks; float16 takes 2B",
        ),
    ],
)
def test_a_size_of_which_nothing_is_left_for_a_rank_is_refused(
    change: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(f'question = "?"\n[[steps]]\ndo = "collectives"\n{change}\n')
    with pytest.raises(BadFile) as caught:
        check_together(load_scenario(path), BENCH, path)
    assert [problem[: len(said)] for problem in caught.value.problems] == [said]


def test_a_bench_that_cannot_do_what_is_asked_is_named() -> None:
    one = msgspec.structs.replace(
        BENCH, nodes={"n0": BENCH.nodes["n0"]}, cables={}, switches={}, name="alone"
    )
    scenario = msgspec.structs.replace(
        load_scenario(SHIPPED), steps=(Collectives(), Reconfigure(shapes=("ring", "dark")))
    )
    with pytest.raises(BadFile) as caught:
        check_together(scenario, one)
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "shapes.ring",
        "steps[0]",
        "steps[1]",
    ]


SCRAPS = st.one_of(
    st.sampled_from(["[", "]", '"', "=", "\n", ".", "-", "9", "nan", "[[", "#", "''", "@", ","]),
    st.text(alphabet=string.printable, max_size=4),
)
EDITS = st.lists(
    st.tuples(st.integers(0, len(TEXT)), st.integers(0, 12), SCRAPS), min_size=1, max_size=6
)


@settings(max_examples=150)
@given(edits=EDITS)
def test_no_edit_of_the_text_gives_a_traceback(tmp_path: Path, edits: list[Any]) -> None:
    text = TEXT
    for place, cut, scrap in edits:
        text = text[:place] + scrap + text[place + cut :]
    path = tmp_path / "edited.toml"
    path.write_text(text)
    with contextlib.suppress(BadFile):
        scenario = load_scenario(path)
        check_together(scenario, BENCH, path)
        for name, shape in scenario.shapes.items():
            plan_shape(topology_of(BENCH), name, shape)
