"""A trace of our own paced trainer: one step, as `harness.model.training` lays it out.

Ranks compute, communicate, and compute on, as they do on the bench: nothing overlaps. Kernels state
operations, and the trace the rate at which the trainer does them, so that both can be changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.model.degrees import Degrees
from harness.model.profile import Profile
from harness.model.training.axes import place_of
from harness.model.training.phase import Phase
from harness.model.training.schedule import Schedule, Where
from harness.model.training.step import step_of
from harness.model.training.trainer import TrainerSpec, flops_per_s
from harness.rlsim.traces.model import (
    Collective,
    Compute,
    Gpu,
    Node,
    Program,
    Ranks,
    Recv,
    Send,
    Trace,
)


def made(spec: TrainerSpec, profile: Profile, tokens: Sequence[int]) -> Trace:
    """Return the trace of a step on samples of these lengths. Raises `UsageError`."""
    schedule, degrees = step_of(spec, profile, tokens).schedule, spec.degrees
    groups = _Groups()
    names = [groups.name(move.phase) for move in schedule.moves]
    same: dict[tuple[Node, ...], list[int]] = {}
    for rank in range(degrees.ranks):
        place = place_of(rank, degrees)
        same.setdefault(tuple(_nodes(schedule, names, rank, (place.pp, place.dp))), []).append(rank)
    return Trace(
        where=f"{profile.model}, {degrees}",
        programs=tuple(Program(tuple(ranks), nodes) for nodes, ranks in same.items()),
        groups={name: tuple(sorted(lists)) for name, lists in groups.lists.items()},
        question=_question(profile, degrees, tokens),
        gpu=Gpu(profile.gpu.name, flops_per_s(spec, profile)),
    )


def _question(profile: Profile, degrees: Degrees, tokens: Sequence[int]) -> str:
    return (
        f"What does a training step of {profile.model} on {degrees} take"
        f" with {len(tokens)} samples of {sum(tokens)} tokens?"
    )


@dataclass
class _Groups:
    """Groups by name: lists of ranks along one axis, no rank in two lists of one name."""

    lists: dict[str, list[Ranks]] = field(default_factory=dict)

    def name(self, phase: Phase) -> str:
        """Return the name of the group of that phase's lists; "" where one sends to another."""
        if phase.op == "send_recv":
            return ""
        number = 1
        while True:
            name = phase.axis if number == 1 else f"{phase.axis}{number}"
            known = self.lists.setdefault(name, [])
            taken = {rank for ranks in known if ranks not in phase.groups for rank in ranks}
            if not any(rank in taken for ranks in phase.groups for rank in ranks):
                known += [ranks for ranks in phase.groups if ranks not in known]
                return name
            number += 1


def _nodes(schedule: Schedule, names: Sequence[str], rank: int, squad: Where) -> Iterator[Node]:
    """Yield what a rank does, each node after the one before it."""
    id_ = 0
    after: tuple[int, ...] = ()
    for (phase, flops), name in zip(schedule.moves, names, strict=True):
        ranks = next((ranks for ranks in phase.groups if rank in ranks), ())
        for _ in range(phase.times if ranks else 0):
            if share := flops[squad] / phase.times:
                yield Compute(id=id_, name=f"before {phase.name}", data_deps=after, flops=share)
                id_, after = id_ + 1, (id_,)
            own = {"id": id_, "name": f"{phase.name} {phase.axis}", "data_deps": after}
            yield _communication(phase, name, rank, ranks, own)
            id_, after = id_ + 1, (id_,)
    if rest := schedule.after.get(squad, 0.0):
        yield Compute(id=id_, name="after all", data_deps=after, flops=rest)


def _communication(
    phase: Phase, name: str, rank: int, ranks: Ranks, own: Mapping[str, Any]
) -> Node:
    if phase.op != "send_recv":
        return Collective(**own, op=phase.op, bytes=phase.bytes, group=name)
    source, target = ranks
    if rank == source:
        return Send(**own, peer=target, bytes=phase.bytes)
    return Recv(**own, peer=source, bytes=phase.bytes)
