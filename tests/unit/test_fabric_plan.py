"""What `harness check` tells of circuits: bytes as the trainer would announce them, and why."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
from fabric_bench import bench
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cli import main
from harness.entry import plan_text
from harness.errors import ExitCode
from harness.fabric.demand import Comm, of_moves, of_training, total
from harness.fabric.links import Plan
from harness.fabric.planner import plan_demand
from harness.fabric.topology import Topology
from harness.model.degrees import Degrees, parse_degrees
from harness.model.scenario import Fabric, Rl
from harness.model.shape import ModelShape
from harness.model.training.schedule import schedule
from harness.model.training.traffic import Lengths, Traffic
from harness.run.asked import Asked, load
from harness.run.fabric.plan import (
    foresee,
    outlook_of,
    panels,
    parts_of,
    phases_without_samples,
    tell_fabrics,
    weights_bytes,
)
from harness.run.fabric.traffic import Part

SCENARIO = Path(__file__).parents[2] / "scenarios" / "rfabric-phases.toml"
ANNOUNCED = {"train": 221_546_892, "gather": 59_080_128, "sync": 118_160_256}
"""Bytes across ToRs, from the journal of a run of this scenario."""
DENSE = ModelShape(
    layers=5, hidden=512, heads=8, kv_heads=2, head_dim=64, vocab=4096, intermediate=1536
)
EXPERTS = msgspec.structs.replace(
    DENSE, intermediate=0, experts=8, experts_per_token=2, expert_intermediate=256
)


def asked() -> Asked:
    return load(SCENARIO, None)


def rl_of(found: Asked) -> Rl:
    step = found.scenario.steps[0]
    assert isinstance(step, Rl)
    return step


# -- bytes -------------------------------------------------------------------------------------


def test_a_step_sends_what_a_run_of_the_same_scenario_announced() -> None:
    found = asked()
    assert found.generation is not None
    assert found.training is not None
    parts = parts_of(found.topology, rl_of(found), found.generation, found.training)
    sent = {p.kind: sum(comm.whole.total_bytes for comm in p.comms) for p in parts}
    assert sent == {
        "train": pytest.approx(ANNOUNCED["train"], rel=1e-3),
        "gather": ANNOUNCED["gather"],
        "sync": ANNOUNCED["sync"],
    }


@given(
    degrees=st.sampled_from(
        ["DP4", "DP2TP2", "DP2PP2", "DP2TP2PP2", "DP4EP2", "DP4EP4", "DP2PP3", "TP4", "DP1"]
    ),
    shape=st.sampled_from([DENSE, EXPERTS]),
    tied=st.booleans(),
)
@settings(deadline=None)
def test_the_estimate_is_what_the_trainer_sends_along_dp(
    degrees: str, shape: ModelShape, *, tied: bool
) -> None:
    """Whatever the samples; only the gradients' norm is left out."""
    shape = msgspec.structs.replace(shape, tied_embeddings=tied)
    own = parse_degrees(degrees)
    batches = [[Lengths(900 + dp, 9000)] for dp in range(own.dp)]
    trainer = schedule(Traffic(shape, own), batches, 1.0, 1e12).moves
    phases = [
        move.phase
        for move in trainer
        if move.phase.axis == "dp" and move.phase.name != "gradient norm"
    ]
    topology = bench(own.ranks, nodes=1)
    node_of = {rank: f"t{rank}.0" for rank in range(own.ranks)}

    def sent(comms: tuple[Comm, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return total(topology, (comm.whole for comm in comms), "train").sent_bytes

    estimated = sent(of_training(topology, phases_without_samples(shape, own, 1.0), node_of))
    np.testing.assert_allclose(
        estimated, sent(of_training(topology, phases, node_of)), rtol=1e-3, atol=200
    )


def test_parameters_come_before_gradients_and_one_rank_sends_nothing() -> None:
    phases = phases_without_samples(DENSE, parse_degrees("DP2PP2"), 1.0)
    assert [phase.op for phase in phases] == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert phases[0].groups == phases[-1].groups == ((0, 1),)  # the first stage is the last back
    assert phases_without_samples(DENSE, Degrees(tp=4), 1.0) == ()


def test_weights_are_written_in_whole_words() -> None:
    assert weights_bytes(DENSE, 1e-3) % 8 == 0
    assert 0 <= DENSE.parameter_bytes * 1e-3 - weights_bytes(DENSE, 1e-3) < 9


def test_of_a_real_trainer_nothing_is_foretold() -> None:
    found = asked()
    assert found.generation is not None
    assert found.training is not None
    spec = msgspec.structs.replace(found.training.spec, mode="real", profile=None)
    real = type(found.training)(spec=spec, ranks_of=found.training.ranks_of)
    assert parts_of(found.topology, rl_of(found), found.generation, real) == ()


# -- what would be decided -----------------------------------------------------------------------


def part(topology: Topology, kind: str, *moves: tuple[str, str, float]) -> Part:
    return Part(kind, (Comm(kind, "dp", of_moves(topology, moves, kind), 0.0),))


def two_phases(topology: Topology, size_bytes: float) -> tuple[Part, Part]:
    """Training between the first two ToRs, then the weights' way to the others."""
    return (
        part(topology, "train", ("t0.0", "t1.0", size_bytes), ("t1.0", "t0.0", size_bytes)),
        part(topology, "sync", ("t0.0", "t2.0", size_bytes), ("t1.0", "t3.0", size_bytes)),
    )


def test_circuits_follow_the_phases_where_that_pays() -> None:
    topology = bench(4)
    outlook = foresee(topology, two_phases(topology, 400e6), Fabric())
    assert [leg.kinds for leg in outlook.first] == [("train",), ("sync",)]
    assert [leg.decision.action for leg in outlook.first] == ["change", "change"]
    joined = [{(link.a.tor, link.b.tor) for link in leg.links} for leg in outlook.first]
    assert ("t0", "t1") in joined[0]
    assert {("t0", "t2"), ("t1", "t3")} <= joined[1]
    again = outlook.later[0].decision
    assert again.lit == outlook.first[-1].links  # it begins with what the step before left
    for kind in outlook.kinds:
        ideal, rfabric = outlook.ns("ideal", kind), outlook.ns("rfabric", kind)
        assert ideal <= rfabric < outlook.ns("electrical", kind) / 2


def test_what_does_not_pay_stays_as_it_is() -> None:
    topology = bench(4, switching_ms=(5000.0, 5000.0))
    outlook = foresee(topology, two_phases(topology, 40e6), Fabric())
    (leg,) = outlook.later  # one plan for the whole step
    assert leg.decision.action != "change"
    assert leg.links == outlook.first[-1].links
    assert outlook.ns("rfabric", "sync") == outlook.ns("electrical", "sync")
    late = foresee(topology, two_phases(topology, 400e6), Fabric(rule="window"))
    assert all(not leg.decision.numbers.overhang_ns for leg in late.later)


@given(st.integers(1, 2000), st.sampled_from(["gain", "window"]))
@settings(deadline=None, max_examples=25)
def test_times_are_never_below_ideal_nor_above_electrical_in_all(size_mb: int, rule: str) -> None:
    topology = bench(4)
    fabric = msgspec.convert({"rule": rule}, Fabric)
    outlook = foresee(topology, two_phases(topology, size_mb * 1e6), fabric)

    def whole(fabric: str) -> float:
        return sum(outlook.ns(fabric, kind) for kind in outlook.kinds)

    for name in ("static", "rfabric"):
        assert whole("ideal") <= whole(name) * (1 + 1e-9)
        assert whole(name) <= whole("electrical") * (1 + 1e-9)


def test_a_change_that_no_window_hides_counts_in_the_time_of_what_it_is_for() -> None:
    topology = bench(4)
    outlook = foresee(topology, two_phases(topology, 400e6), Fabric())
    sync = outlook.first[1]
    bare_ns = sync.decision.numbers.change_ns
    assert bare_ns < sync.kind_ns["sync"] == pytest.approx(sync.decision.numbers.total_ns)
    assert sync.kind_ns["sync"] < bare_ns + sync.decision.numbers.needed_ns


def test_the_static_circuits_are_those_given_or_planned_for_all_traffic() -> None:
    topology = bench(4)
    parts = two_phases(topology, 400e6)
    whole = total(topology, (comm.whole for one in parts for comm in one.comms), "step")
    planned = foresee(topology, parts, Fabric()).static
    assert planned.links == plan_demand(topology, whole.sent_bytes).links
    given_links = foresee(topology, parts, Fabric()).first[0].links
    assert foresee(topology, parts, Fabric(), Plan(given_links)).static.links == given_links


def test_without_switches_all_stays_electrical() -> None:
    topology = bench(4, planes=0, switching_ms=())
    outlook = foresee(topology, two_phases(topology, 400e6), Fabric())
    assert not outlook.first[0].links
    assert outlook.ns("rfabric", "sync") == outlook.ns("electrical", "sync")


# -- in words, and as a picture --------------------------------------------------------------------


def test_the_plan_shows_bytes_times_circuits_reasons_and_what_stays() -> None:
    lines = [line.strip() for line in plan_text(SCENARIO, None).splitlines()]
    assert any(line.split() == ["sent", *rl_of(asked()).fabrics] for line in lines)
    train = next(line for line in lines if line.startswith("train   221."))
    assert train.count("s") == 4  # a time over each
    assert any(line.startswith("train is an estimate: ") for line in lines)
    assert any(line.startswith("rfabric, train and gather: changed: saves ") for line in lines)
    assert any(line.endswith("; + goes over a core switch") for line in lines)
    sync = next(i for i, line in enumerate(lines) if line.startswith("rfabric, sync: changed: "))
    assert lines[sync + 2].split() == ["train0", "-", ".", "2+", "."]
    assert any(line.startswith("rfabric, train and gather again: changed") for line in lines)
    assert "stays electrical: train0>gen0 59.1 MB, train1>gen1 59.1 MB" in lines
    assert lines[-1] == "nothing was opened and nothing was sent"


@pytest.mark.parametrize(("tors", "rows"), [(24, 2 * 24), (25, 0)])
def test_circuits_are_a_matrix_where_that_fits_and_else_are_counted(tors: int, rows: int) -> None:
    topology = bench(tors)
    outlook = foresee(topology, two_phases(topology, 400e6), Fabric())
    told = list(tell_fabrics(topology, Rl(fabrics=("rfabric",)), outlook, Degrees()))
    assert sum(line.split()[1:].count(".") > tors // 2 for line in told) == rows
    assert any("pairs of ToRs; --picture" in line for line in told) == (not rows)
    assert any(line.startswith("  matrices: how many circuits") for line in told) == bool(rows)


def test_what_the_samples_decide_is_said_to_be_left_out(tmp_path: Path) -> None:
    text = SCENARIO.read_text().replace('layout = "DP4"', 'layout = "DP2PP2"')
    text = text.replace('"benches/', f'"{SCENARIO.parent}/benches/')
    text = text.replace('"workloads/', f'"{SCENARIO.parent}/workloads/')
    text = text.replace('"profiles/', f'"{SCENARIO.parent}/profiles/')
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    assert "without activations along PP, which samples decide, and the gradients' norm" in (
        plan_text(path, None)
    )


def test_circuits_of_each_phase_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "circuits.svg"
    for _ in range(2):  # the second is written over the first
        assert main(["check", str(SCENARIO), "--picture", str(path)]) == ExitCode.PASSED
    assert "nothing was opened" in capsys.readouterr().out
    words = "".join(ET.parse(path).getroot().itertext())
    for panel in panels(asked()):
        assert panel in words
    assert main(["check", str(SCENARIO), "--picture", str(tmp_path / "x.png")]) == ExitCode.USAGE
    assert "ends in .svg" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_panels_are_shapes_then_the_phases_of_each_step() -> None:
    found = asked()
    assert [*panels(found)] == [
        "step 0, static",
        "step 0, rfabric, train and gather",
        "step 0, rfabric, sync",
    ]
    quick = load(SCENARIO.with_name("quickstart.toml"), None)
    assert [*panels(quick)] == [*quick.scenario.shapes]
    outlook = outlook_of(
        found.topology, found.scenario, rl_of(found), {}, generation=None, training=None
    )
    assert outlook is None
