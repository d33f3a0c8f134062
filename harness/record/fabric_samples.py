"""Which samples circuits that follow the work give, and what they did in one loop. Pure.

Arms of one policy are compared step by step: the same step of the same repeat had the same requests
over each network, so that what a step does to all of them cancels out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from harness.clock import NS_PER_S
from harness.model.documents import Event, LoopSummary
from harness.model.fabric_rules import CIRCUITS
from harness.record.loops import Loop, Rows, loops_of, summaries

Sampled = tuple[str, dict[str, object], list[float | None]]
"""Base and labels of a metric, and its samples."""
Row = Mapping[str, Any]
ByStep = dict[tuple[int, int], float]
"""A time of one arm, by repeat and index of the training step."""

OVERS = ("electrical", "ideal")
"""What arms are compared with: their own policy over these."""
PHASES = ("train", "gather", "sync", "load", "step")
"""In the order of a training step; the last is all of it."""
PURE = ("gather", "sync")
"""Kinds of traffic in whose time nothing is computed."""
ALONE = 0.25
"""A decision whose bytes are so near to those of the kind that it names was about no other kind."""
END = "end"
"""Kind of the change that takes circuits down when an arm is over: nobody waits for it."""


class CircuitDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about circuits, made `count` times in one loop; figures are those of the last.

    `circuits` by pair of ToRs that they join. Times are predicted, of what the decision was about:
    over the circuits that are up, over those planned with their change, and without any.
    """

    at_s: float
    """Of the first, since the loop's first step began."""
    kind: str
    action: str
    circuits: dict[str, int]
    count: int
    bytes: int
    keep_ms: float
    change_ms: float
    electrical_ms: float
    reason: str


class PartEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the fabric broke, or is used again."""

    at_s: float
    part: str
    state: str
    reason: str


class FabricLoop(LoopSummary, frozen=True, kw_only=True):
    """A loop over a network of its own: with what was decided about circuits, and what broke."""

    circuits: tuple[CircuitDecision, ...] = ()
    parts: tuple[PartEvent, ...] = ()


class Way(NamedTuple):
    """An arm's name taken apart: a policy, and over which network; "" where circuits are left."""

    policy: str
    network: str


def way_of(arm: str) -> Way:
    """Take ``orchestrl@rfabric`` apart."""
    policy, at, network = arm.rpartition("@")
    return Way(policy, network) if at else Way(arm, "")


def fabric_samples(loops: Sequence[Loop]) -> Iterator[Sampled]:
    """Yield all samples of the arms that ran over a network of their own."""
    arms = [loop for loop in loops if way_of(loop.policy).network]
    for loop in arms:
        labels: dict[str, object] = {"step": loop.step, "policy": loop.policy}
        if way_of(loop.policy).network in CIRCUITS:
            yield from ((base, labels, values) for base, values in _counts(loop))
        yield from _traffic(loop, labels)
    for step in dict.fromkeys(loop.step for loop in arms):
        yield from _phases(step, [loop for loop in arms if loop.step == step])


# -- decisions and changes -------------------------------------------------------------------------


def _counts(loop: Loop) -> Iterator[tuple[str, list[float | None]]]:
    """Yield what was decided, changed and broken; 0 where nothing was."""
    changes = [row for row in loop.of("fabric_change") if row["kind"] != END]
    made = [row for row in changes if row["outcome"] != "failed"]
    yield "fabric.changes", [len(made)]
    yield "fabric.change_ms", [row["total_ms"] for row in made]
    yield "fabric.device_ms", [row["device_ms"] for row in made]
    for outcome in ("degraded", "failed"):
        yield f"fabric.{outcome}", [sum(row["outcome"] == outcome for row in changes)]
    decisions = loop.of("fabric")
    for name, action in (("kept", "keep"), ("dropped", "dropped")):
        yield f"fabric.{name}", [sum(row["action"] == action for row in decisions)]
    yield "fabric.solve_ms", [row["solve_ms"] for row in decisions]
    yield "fabric.broken", [sum(row["state"] != "back" for row in loop.of("fabric_part"))]


# -- traffic ---------------------------------------------------------------------------------------


def _traffic(loop: Loop, labels: Mapping[str, object]) -> Iterator[Sampled]:
    """Yield how long each kind of traffic took, and what crossed beside what was announced."""
    told = loop.rows["fabric"]
    stamps = [t_ns for t_ns, _ in told]
    for t_ns, row in loop.rows["fabric_traffic"]:
        of = {**labels, "kind": row["kind"]}
        announced, measured = row["announced_bytes"], row["measured_bytes"]
        yield "fabric.took_ms", of, [row["took_ms"]]
        yield "fabric.announced_bytes", of, [announced]
        if announced and measured is not None:
            yield "fabric.measured_over_announced", of, [measured / announced]
        if announced and measured:  # else it is beacons, and what nobody waits for
            yield "fabric.circuits_share_pct", of, [100 * row["circuits_bytes"] / measured]
        before = [one for _, one in told[: bisect_left(stamps, t_ns)] if one["kind"] == row["kind"]]
        if before and row["kind"] in PURE and _alone(before[-1], row):
            yield "fabric.predicted_error_pct", of, [_off_pct(before[-1], row)]


def _alone(decision: Row, traffic: Row) -> bool:
    """Return whether a decision was about this kind of traffic only."""
    announced = traffic["announced_bytes"]
    return bool(announced) and abs(decision["bytes"] / announced - 1) <= ALONE


def _off_pct(decision: Row, traffic: Row) -> float | None:
    """Return how far the predicted time was off, as a share of what it took."""
    name = {"change": "change_ms", "electrical": "electrical_ms"}.get(decision["action"], "keep_ms")
    took_ms = traffic["took_ms"]
    return 100 * abs(decision[name] - took_ms) / took_ms if took_ms else None


# -- phases of a step, and one arm over another ----------------------------------------------------


def _phases(step: int, loops: Iterable[Loop]) -> Iterator[Sampled]:
    """Yield each arm's phases, and how many times faster than over `OVERS` they are."""
    took_ms: dict[str, dict[str, ByStep]] = defaultdict(lambda: defaultdict(dict))
    for loop in loops:
        for index, phase, ms in _times_ms(loop):
            took_ms[loop.policy][phase][loop.repeat, index] = ms
    for arm, phases in took_ms.items():
        labels: dict[str, object] = {"step": step, "policy": arm}
        for phase, own in phases.items():
            yield "fabric.phase_ms", {**labels, "phase": phase}, [*own.values()]
            for network in OVERS:
                over = f"{way_of(arm).policy}@{network}"
                if arm != over and over in took_ms and phase != "load":
                    of = {**labels, "phase": phase, "over": over}
                    yield "fabric.gain", of, _ratios(took_ms[over][phase], own)


def _times_ms(loop: Loop) -> Iterator[tuple[int, str, float]]:
    """Yield the times of a loop by index of the training step and phase, null ones left out."""
    steps = loop.rows["rl_step"]
    stamps = [t_ns for t_ns, _ in steps]
    for t_ns, row in loop.rows["sync"]:
        place = bisect_left(stamps, t_ns)  # its step is told when it is over
        if row["outcome"] == "failed" or place == len(steps):
            continue
        for phase, name in (("gather", "gather_s"), ("sync", "wire_s"), ("load", "load_s")):
            if row[name] is not None:
                yield steps[place][1]["index"], phase, row[name] * 1e3
    for _, row in steps:
        yield row["index"], "train", row["train_s"] * 1e3
        yield row["index"], "step", row["step_s"] * 1e3


def _ratios(over: ByStep, own: ByStep) -> list[float | None]:
    """Return how many times faster, for each step that both have."""
    return [over[at] / own[at] for at in sorted(over.keys() & own.keys()) if over[at] > 0 < own[at]]


# -- what one loop did -----------------------------------------------------------------------------


def summaries_of(events: Sequence[Event]) -> tuple[LoopSummary, ...]:
    """Return what loops did; of those over a network of their own, what that did too."""
    loops = loops_of(events)
    loop_of = {(loop.step, loop.policy, loop.repeat): loop for loop in loops}
    return tuple(
        _told(summary, loop_of[summary.step, summary.policy, summary.repeat])
        if way_of(summary.policy).network
        else summary
        for summary in summaries(loops)
    )


def _told(summary: LoopSummary, loop: Loop) -> FabricLoop:
    zero_ns = min(row["begin_ns"] for row in loop.of("rl_step"))
    return FabricLoop(
        **{name: getattr(summary, name) for name in summary.__struct_fields__},
        circuits=tuple(_decisions(loop.rows["fabric"], zero_ns)),
        parts=tuple(
            PartEvent(
                at_s=(t_ns - zero_ns) / NS_PER_S,
                part=row["part"],
                state=row["state"],
                reason=row["reason"],
            )
            for t_ns, row in loop.rows["fabric_part"]
        ),
    )


def _decisions(rows: Rows, zero_ns: int) -> Iterator[CircuitDecision]:
    """Yield decisions in the order they were first made; those that are alike are one."""
    alike: dict[object, Rows] = defaultdict(list)
    for t_ns, row in rows:
        joined = tuple(sorted(_pairs(row["circuits"]).items()))
        alike[row["kind"], row["action"], joined].append((t_ns, row))
    for same in alike.values():
        (first_ns, _), (_, last) = same[0], same[-1]
        yield CircuitDecision(
            at_s=(first_ns - zero_ns) / NS_PER_S,
            kind=last["kind"],
            action=last["action"],
            circuits=_pairs(last["circuits"]),
            count=len(same),
            bytes=last["bytes"],
            keep_ms=last["keep_ms"],
            change_ms=last["change_ms"],
            electrical_ms=last["electrical_ms"],
            reason=last["reason"],
        )


def _pairs(circuits: Iterable[str]) -> dict[str, int]:
    """Return how many circuits join each pair of ToRs: ``train0-train1@agg0`` is one of them."""
    return dict(Counter(circuit.partition("@")[0] for circuit in circuits))
