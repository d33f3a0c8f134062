"""A paced training step beforehand: every communication in order, and what is computed before it.

Pure: the same list announces the step and is then gone through, by every rank, which takes part in
those phases whose groups it is in. One micro batch after the other, forward and then backward (the
order of GPipe, as torch's `ScheduleGPipe` has it; its bubble is that of 1F1B). Parameters are
gathered before the first micro batch comes by, gradients scattered after the last has gone
(FSDP2 with ``reshard_after_forward=False``, and ``set_requires_gradient_sync`` for the last micro
batch only). Nothing overlaps: a rank computes or communicates.

So that a step has a few hundred phases at most, layers stand together in blocks where there are
many: within a block, what goes along one axis comes on end, then the next. The blocks are the
smallest that keep to `PHASES_MAX` for a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from typing import NamedTuple

from harness.model.busbw import counts, smallest_bytes
from harness.model.degrees import Degrees
from harness.model.scenario import Dtype, Op
from harness.model.shape import GRADIENT_BYTES
from harness.model.training.axes import Axis, Members, expert_copies, groups_along, place_of
from harness.model.training.phase import Phase
from harness.model.training.traffic import Lengths, Traffic

PHASES_MAX = 200
"""Of one rank; more only where micro batches alone are more."""
DTYPE: Dtype = "int32"
_BACKWARD = 2
"""How many times the operations of the forward pass."""

Where = tuple[int, int]
"""(pp, dp): ranks that compute alike."""


class Move(NamedTuple):
    """A phase; and by (pp, dp) the operations before it, in all of its times together."""

    phase: Phase
    flops: Mapping[Where, float]


class Block(NamedTuple):
    """Layers that stand together."""

    stage: int
    first: int
    layers: int

    def __str__(self) -> str:
        last = self.first + self.layers - 1
        return f"layer {last}" if self.layers == 1 else f"layers {self.first}-{last}"


class Schedule(NamedTuple):
    """A whole step: its moves, and what is computed after the last one."""

    moves: tuple[Move, ...]
    after: Mapping[Where, float]


def schedule(
    traffic: Traffic,
    batches: Sequence[Sequence[Lengths]],
    bytes_scale: float,
    flops_per_s: float,
) -> Schedule:
    """Return the step of these micro batches, given by rank of DP, as many for each.

    `flops_per_s`: of one rank. Micro batch m of all ranks is sent at the size of the longest.
    """
    widest = -(-traffic.shape.layers // traffic.degrees.pp)
    for layers in range(1, widest + 1):
        step = _Step(traffic, batches, bytes_scale, flops_per_s, layers)
        limit = PHASES_MAX * traffic.degrees.pp
        moves = tuple(islice(step.moves(), limit + 1 if layers < widest else None))
        if len(moves) <= limit or layers == widest:
            break
    return Schedule(moves, dict(step.owed))


def stages(layers: int, pp: int) -> list[range]:
    """Return the layers of each pipeline stage; the first ones have one more where need be."""
    size, extra = divmod(layers, pp)
    starts = [stage * size + min(stage, extra) for stage in range(pp + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


@dataclass
class _Step:
    """One step as it is laid out with `block_layers` in a block."""

    traffic: Traffic
    batches: Sequence[Sequence[Lengths]]
    bytes_scale: float
    flops_per_s: float
    block_layers: int

    def __post_init__(self) -> None:
        degrees = self.traffic.degrees
        self.owed: dict[Where, float] = {}
        self._last = degrees.pp - 1
        self._blocks = [
            [
                Block(stage, first, min(self.block_layers, layers.stop - first))
                for first in range(layers.start, layers.stop, self.block_layers)
            ]
            for stage, layers in enumerate(stages(self.traffic.shape.layers, degrees.pp))
        ]
        self._along = {
            axis: _by_stage(groups_along(axis, degrees), degrees) for axis in ("tp", "ep", "dp")
        }
        self._copies = _by_stage(expert_copies(degrees), degrees)

    def moves(self) -> Iterator[Move]:
        """Yield all of it in order."""
        numbers = range(len(self.batches[0]))
        for number in numbers:
            for stage in range(self._last + 1):
                yield from self._forward(number, stage)
        for number in numbers:
            for stage in reversed(range(self._last + 1)):
                yield from self._backward(number, stage)
        yield from self._norm()

    # -- what a stage does with a micro batch --------------------------------------------------

    def _forward(self, number: int, stage: int) -> Iterator[Move]:
        if number == 0 and stage == 0:
            yield from self._tables(stage, "embedding")
        for block in self._blocks[stage]:
            if number == 0:
                yield from self._shards(block, "parameters")
            yield from self._layers(number, block, "forward", 1)
        if stage == self._last:
            if number == 0:
                yield from self._tables(stage, "head")
            self._head(number, 1)
        else:
            yield from self._send(number, stage, stage + 1, "forward")

    def _backward(self, number: int, stage: int) -> Iterator[Move]:
        is_last = number == len(self.batches[0]) - 1
        if stage == self._last:
            self._head(number, _BACKWARD)
            if is_last:
                yield from self._tables(stage, "head", "gradients")
        for block in reversed(self._blocks[stage]):
            yield from self._layers(number, block, "backward", _BACKWARD)
            if is_last:
                yield from self._shards(block, "gradients")
        if stage:
            yield from self._send(number, stage, stage - 1, "backward")
        elif is_last:
            yield from self._tables(stage, "embedding", "gradients")

    def _layers(self, number: int, block: Block, way: str, cost: int) -> Iterator[Move]:
        """Two exchanges a layer along TP, two along EP; computing is shared out among them."""
        traffic, tokens = self.traffic, self._longest(number)
        kinds: list[tuple[Axis, Op, int]] = []
        if traffic.degrees.tp > 1:
            kinds.append(("tp", "all_reduce", traffic.activation_bytes(tokens)))
        if traffic.degrees.ep > 1:
            kinds.append(("ep", "all_to_all", traffic.exchange_bytes(tokens)))
        for axis, op, size_bytes in kinds:
            self._compute(number, block, cost / len(kinds))
            name = f"{block} {way}, micro batch {number}"
            groups = self._along[axis][block.stage]
            times = 2 * block.layers
            yield from self._phase(name, op, axis, groups, size_bytes=size_bytes, times=times)
        if not kinds:
            self._compute(number, block, cost)

    def _shards(self, block: Block, what: str) -> Iterator[Move]:
        """Gather a block's parameters, or scatter its gradients, layer by layer."""
        op, item_bytes = self._sharded(what)
        dense_bytes = self.traffic.layer_bytes(item_bytes)
        experts_bytes = self.traffic.experts_bytes(item_bytes)
        for groups, size_bytes, name in (
            (self._along["dp"], dense_bytes, f"{block} {what}"),
            (self._copies, experts_bytes, f"{block} {what} of experts"),
        ):
            if size_bytes:
                yield from self._phase(
                    name,
                    op,
                    "dp",
                    groups[block.stage],
                    size_bytes=size_bytes,
                    times=block.layers,
                )

    def _tables(self, stage: int, name: str, what: str = "parameters") -> Iterator[Move]:
        op, item_bytes = self._sharded(what)
        size_bytes = self.traffic.table_bytes(item_bytes)
        groups = self._along["dp"][stage]
        if name == "head" and self.traffic.shape.tied_embeddings and not stage:
            return  # it is the embedding
        yield from self._phase(f"{name} {what}", op, "dp", groups, size_bytes=size_bytes)

    def _sharded(self, what: str) -> tuple[Op, int]:
        if what == "parameters":
            return "all_gather", self.traffic.shape.dtype_bytes
        return "reduce_scatter", GRADIENT_BYTES

    def _send(self, number: int, stage: int, to: int, way: str) -> Iterator[Move]:
        """Hand a micro batch on; every group is a pair, the sender first."""
        pairs = _pairs(stage, to, self.traffic.degrees)
        size_bytes = self.traffic.activation_bytes(self._longest(number))
        name = f"stage {stage} to {to} {way}, micro batch {number}"
        yield from self._phase(name, "send_recv", "pp", pairs, size_bytes=size_bytes)

    def _norm(self) -> Iterator[Move]:
        """Add up the gradients' norm along each axis: one number in 32 bits."""
        degrees = self.traffic.degrees
        axes: tuple[Axis, ...] = ("tp", "pp", "dp")
        for axis in axes:
            groups = groups_along(axis, degrees)
            yield from self._phase("gradient norm", "all_reduce", axis, groups, size_bytes=0)

    # -- bookkeeping ---------------------------------------------------------------------------

    def _longest(self, number: int) -> int:
        return max(rank[number].tokens for rank in self.batches)

    def _compute(self, number: int, block: Block, cost: float) -> None:
        for dp, rank in enumerate(self.batches):
            flops = cost * block.layers * self.traffic.layer_flops(rank[number])
            self._owe((block.stage, dp), flops)

    def _head(self, number: int, cost: int) -> None:
        for dp, rank in enumerate(self.batches):
            self._owe((self._last, dp), cost * self.traffic.head_flops(rank[number]))

    def _owe(self, where: Where, flops: float) -> None:
        self.owed[where] = self.owed.get(where, 0.0) + flops

    def _phase(
        self, name: str, op: Op, axis: Axis, groups: Members, *, size_bytes: int, times: int = 1
    ) -> Iterator[Move]:
        """One phase, unless its groups are of one rank; it takes all that is owed before it."""
        ranks = len(groups[0])
        if ranks == 1:
            return
        asked = max(round(size_bytes * self.bytes_scale), smallest_bytes(op, ranks, DTYPE))
        before = dict.fromkeys(_wheres(groups, self.traffic.degrees), 0.0)
        before |= {where: self.owed.pop(where) for where in before if where in self.owed}
        gap_ns = round(max(before.values()) / times / self.flops_per_s * 1e9)
        phase = Phase(
            name=name,
            op=op,
            axis=axis,
            groups=groups,
            bytes=counts(op, asked, ranks, DTYPE).size_bytes,
            gap_ns=gap_ns,
            times=times,
        )
        yield Move(phase, before)


@cache
def _by_stage(groups: Members, degrees: Degrees) -> tuple[Members, ...]:
    """Return the groups of each pipeline stage."""
    return tuple(
        tuple(ranks for ranks in groups if place_of(ranks[0], degrees).pp == stage)
        for stage in range(degrees.pp)
    )


@cache
def _pairs(stage: int, to: int, degrees: Degrees) -> Members:
    """Return who sends to whom from a stage to another: as many pairs as ranks in a stage."""
    return tuple((ranks[stage], ranks[to]) for ranks in groups_along("pp", degrees))


@cache
def _wheres(groups: Members, degrees: Degrees) -> tuple[Where, ...]:
    """Return where the ranks of these groups are."""
    places = (place_of(rank, degrees) for group in groups for rank in group)
    return tuple(dict.fromkeys((place.pp, place.dp) for place in places))
