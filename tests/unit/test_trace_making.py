"""Traces of our own trainer: what they say is what the trainer does."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from trace_bench import MS, SCENARIOS, figures, ground, run

from harness.cli import main
from harness.model.bench import Bench, Links, Node, Tor
from harness.model.degrees import parse_degrees
from harness.model.load import load_profile
from harness.model.shape import ModelShape
from harness.model.training.axes import place_of
from harness.model.training.schedule import Where
from harness.model.training.step import step_of
from harness.model.training.trainer import TrainerSpec, flops_per_s
from harness.rlsim.collectives import gloo, time_ns
from harness.rlsim.traces.checks import checked
from harness.rlsim.traces.json_trace import dump, parse
from harness.rlsim.traces.making import made
from harness.rlsim.traces.reading import read

PROFILE_FILE = SCENARIOS / "profiles" / "qwen2.5-14b-h800.toml"
SMALL = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=1000, intermediate=128,
    experts=4, experts_per_token=2, expert_intermediate=64,
)  # fmt: skip
PROFILE = replace(load_profile(PROFILE_FILE), shape=SMALL)
TOKENS = (900, 700, 650, 300, 1200, 80, 640, 333)


def spec(layout: str) -> TrainerSpec:
    return TrainerSpec(
        mode="paced", degrees=parse_degrees(layout), profile=PROFILE, bytes_scale=1.0,
        micro_batch_tokens=1000, flops_share=1e-5,
    )  # fmt: skip


def reckoned_ns(asked: TrainerSpec) -> float:
    """The time of a step, one phase after the other, with a node and a NIC for every rank."""
    plan, per_ns = step_of(asked, PROFILE, TOKENS).schedule, flops_per_s(asked, PROFILE) / 1e9
    joined = gloo(figures(step_us=30.0).collectives, nics=1, nic_gb_per_s=1.0)
    free: dict[Where, float] = {}
    for phase, flops in plan.moves:
        for group in phase.groups:
            stands = [place_of(rank, asked.degrees) for rank in group]
            squads = [(place.pp, place.dp) for place in stands]
            places = [(f"n{rank}", 0) for rank in group]
            one_way = phase.op == "send_recv"
            alone_ns = time_ns(phase.op, phase.bytes, places, joined, one_way=one_way)
            for _ in range(phase.times):
                ready = [free.get(s, 0.0) + flops[s] / phase.times / per_ns for s in squads]
                free |= dict.fromkeys(squads, max(ready) + alone_ns)
    ends = [free.get(squad, 0.0) + flops / per_ns for squad, flops in plan.after.items()]
    return max([*free.values(), *ends])


@pytest.mark.parametrize("layout", ["DP1", "DP4", "PP2", "PP4", "DP2PP2", "DP4EP2"])
def test_a_step_takes_what_its_phases_take_one_after_the_other(layout: str) -> None:
    asked = spec(layout)
    nodes = {f"n{i}": Node(tor="t0") for i in range(asked.degrees.ranks)}
    one_tor = Bench(
        name="t", world="simulated", tors={"t0": Tor(uplinks=0)}, nodes=nodes,
        links=Links(link_mbit_per_s=8000.0),
    )  # fmt: skip
    _, outcome = run(made(asked, PROFILE, TOKENS), ground(one_tor, figures(step_us=30.0)))
    assert outcome.end == "finished"
    assert outcome.makespan_ms * MS == pytest.approx(reckoned_ns(asked), rel=1e-6)


@pytest.mark.parametrize("layout", ["DP2TP2", "TP2PP2", "DP4TP2EP2", "DP4TP2PP2EP4"])
def test_a_step_is_sound_and_says_all_of_its_bytes(layout: str) -> None:
    asked = spec(layout)
    of = made(asked, PROFILE, TOKENS)
    laid = checked(of)
    plan = step_of(asked, PROFILE, TOKENS).schedule
    sent = sum(move.phase.times * len(move.phase.groups) * move.phase.bytes for move in plan.moves)
    assert sum(meeting.bytes for meeting in laid.meetings.all) == sent
    again = parse(dump(of).encode(), of.where)
    assert (again.programs, again.groups) == (of.programs, of.groups)


def test_the_command_writes_what_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.json"
    args = ["trace", "make", str(out), "--profile", str(PROFILE_FILE), "--samples", "4"]
    assert main([*args, "--layout", "DP4"]) == 0
    assert "is sound: " in capsys.readouterr().out
    assert checked(read(out)).trace.gpu.kind == "H800"
    bench = str(SCENARIOS / "benches" / "sim-64.toml")
    assert main(["trace", "run", str(out), "--bench", bench]) == 0
    assert "Qwen2.5-14B on DP4" in capsys.readouterr().out
    assert main([*args, "--layout", "DP4"]) == 2, "a file that is there is not written over"
    for layout, told in (("XP4", "no layout"), ("TP3", "TP 3 does not divide the 40 heads")):
        assert main([*args, "--layout", layout, "--force"]) == 2
        assert told in capsys.readouterr().err
