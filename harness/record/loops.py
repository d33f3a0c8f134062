"""The events of the RL loop, sorted by rl step, policy and repeat; and what a reader sees of each.

Rows name their step by its number in the run, which counts through repeats; here it is the step's
place in the scenario, so that repeats are side by side. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harness.clock import NS_PER_S
from harness.model.documents import Decision, Event, LoopStep, LoopSummary

STREAMS = (
    *("rl", "rl_step", "pool", "planned", "forecast", "sync"),
    *("fabric", "fabric_change", "fabric_part", "fabric_traffic"),
)
"""Those whose rows name a policy."""
PARTS = 24
"""Of the time of a batch, in which requests are counted."""
LISTED = ("taken", "refused", "failed")
"""Outcomes of a look at the plan that a reader wants to see one by one."""

Rows = list[tuple[int, Mapping[str, Any]]]


@dataclass
class Loop:
    """One policy's run of the loop: by stream its rows, each with its stamp in ns."""

    step: int
    policy: str
    repeat: int
    rows: dict[str, Rows] = field(default_factory=lambda: defaultdict(list))

    def of(self, stream: str) -> list[Mapping[str, Any]]:
        """Return the rows of a stream, in order."""
        return [row for _, row in self.rows[stream]]


def places_of(events: Iterable[Event]) -> dict[int, tuple[int, int]]:
    """Return, by each step's number in the run, its place in the scenario and its repeat."""
    first: dict[int, int] = {}
    places = {}
    for event in events:
        if event.stream == "step":
            number, repeat = event.data["index"], event.data["repeat"]
            places[number] = number - first.setdefault(repeat, number), repeat
    return places


def loops_of(events: Sequence[Event]) -> list[Loop]:
    """Return all runs of the loop, in the order they began."""
    places = places_of(events)
    loops: dict[tuple[int, str], Loop] = {}
    for event in events:
        if event.stream in STREAMS:
            key = number, policy = event.data["step"], event.data["policy"]
            if key not in loops:
                place, repeat = places.get(number, (number, 0))
                loops[key] = Loop(place, policy, repeat)
            loops[key].rows[event.stream].append((event.t_ns, event.data))
    return list(loops.values())


def summaries(loops: Iterable[Loop]) -> tuple[LoopSummary, ...]:
    """Return what the last repeat of each rl step and policy did, as far as it came."""
    last: dict[tuple[int, str], Loop] = {}
    for loop in loops:
        if loop.rows["rl_step"]:
            last[loop.step, loop.policy] = loop
    return tuple(map(_summary, last.values()))


def _summary(loop: Loop) -> LoopSummary:
    zero_ns: int = min(row["begin_ns"] for row in loop.of("rl_step"))

    def since_s(t_ns: int) -> float:
        return (t_ns - zero_ns) / NS_PER_S

    return LoopSummary(
        step=loop.step,
        policy=loop.policy,
        repeat=loop.repeat,
        steps=tuple(_step(row, loop.rows["pool"], since_s) for row in loop.of("rl_step")),
        decisions=tuple(_decisions(loop.rows["planned"], since_s)),
        stayed=sum(row["outcome"] == "stayed" for row in loop.of("planned")),
    )


def _step(row: Mapping[str, Any], pool: Rows, since_s: Callable[[int], float]) -> LoopStep:
    seen = _held(pool, row["begin_ns"], row["batch_end_ns"])
    tail_begin_ns = row.get("tail_begin_ns")
    return LoopStep(
        index=row["index"],
        begin_s=since_s(row["begin_ns"]),
        tail_begin_s=None if tail_begin_ns is None else since_s(tail_begin_ns),
        batch_end_s=since_s(row["batch_end_ns"]),
        train_begin_s=since_s(row["train_begin_ns"]),
        train_end_s=since_s(row["train_end_ns"]),
        sync_end_s=since_s(row["sync_end_ns"]),
        step_s=row["step_s"],
        layouts=_in_turn(pool, row["begin_ns"], row["batch_end_ns"]),
        running=tuple(there["running"] for there in seen),
        queued=tuple(there["waiting"] + there["queued"] for there in seen),
        staleness=tuple(row["staleness"]),
        reward=row["reward"],
    )


def _held(pool: Rows, begin_ns: int, end_ns: int) -> Sequence[Mapping[str, Any]]:
    """Return the pool in the middle of each of `PARTS` equal times: as it was last seen by then."""
    stamps = [t_ns for t_ns, _ in pool]
    if not stamps:
        return ()
    width = (end_ns - begin_ns) / PARTS
    middles = (begin_ns + width * (part + 0.5) for part in range(PARTS))
    return [pool[max(0, bisect_right(stamps, middle) - 1)][1] for middle in middles]


def _in_turn(pool: Rows, begin_ns: int, end_ns: int) -> tuple[str, ...]:
    """Return the layouts that were up between two stamps, the one in force at the first too."""
    found: list[str] = []
    for t_ns, row in pool:
        if t_ns <= begin_ns:
            found = []
        if t_ns <= end_ns and row["layout"] and found[-1:] != [row["layout"]]:
            found.append(row["layout"])
    return tuple(found)


def _decisions(planned: Rows, since_s: Callable[[int], float]) -> list[Decision]:
    """Return what was taken and refused; what was decided again and again is one."""
    found: list[Decision] = []
    for t_ns, row in planned:
        if row["outcome"] not in LISTED:
            continue
        told = Decision(
            at_s=since_s(t_ns),
            layout=row["layout"],
            best=row["best"],
            outcome=row["outcome"],
            reason=row["reason"],
            count=1,
            stay_s=row["stay_s"],
            change_s=row["change_s"],
            cost_s=row["cost_s"],
        )
        if found and _same(found[-1], told):
            told = _again(found.pop(), told)
        found.append(told)
    return found


def _same(one: Decision, other: Decision) -> bool:
    return (one.layout, one.best, one.outcome) == (other.layout, other.best, other.outcome)


def _again(before: Decision, now: Decision) -> Decision:
    """Return two decisions that are alike as one: begun with the first, figures of the last."""
    return msgspec.structs.replace(now, at_s=before.at_s, count=before.count + 1)
