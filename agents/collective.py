"""The six collective operations on torch tensors, timed and verified as nccl-tests does.

Sizes follow `harness.model.busbw.counts`. Each iteration works on the next of several buffers that
together span `SPAN_BYTES`, so that small messages do not sit in a cache. After the timing one more
launch runs on known data, and wrong elements are counted.

`all_reduce` and `broadcast` are in place, as torch has them; the others are out of place.
`send_recv` is nccl-tests' ring shift: every rank sends to the next and gets from the one before.
torch is handed in as a module, because importing it takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.model.busbw import Counts
from harness.model.scenario import Dtype, Op

SPAN_BYTES = 32 * 2**20
"""What the buffers of all iterations span: nccl-tests' default largest size."""

SLOTS_MAX = 64

_REDUCING: frozenset[Op] = frozenset({"all_reduce", "reduce_scatter"})
_IN_PLACE: frozenset[Op] = frozenset({"all_reduce", "broadcast"})

EXACT_BELOW: dict[Dtype, int] = {
    "float32": 2**24,
    "float16": 2**11,
    "bfloat16": 2**8,
    "int32": 2**31,
}
"""Integers up to this are exact, and so are their sums up to it."""
EPSILON: dict[Dtype, float] = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7, "int32": 0}


@dataclass(frozen=True)
class Member:
    """This rank's place in a group. `ranks` are global; `index` is this rank's among them."""

    group: Any
    ranks: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class Place:
    """Where tensors live: the torch module and the device."""

    torch: Any
    device: Any


def modulus(op: Op, dtype: Dtype) -> int:
    """Return how many different values verification uses: primes, so no block repeats another."""
    return 7 if op in _REDUCING and EXACT_BELOW[dtype] < 2**24 else 251


def pattern(place: Place, index: int, elements: range, period: int) -> Any:
    """Return those `elements` of what the member `index` contributes: (len(elements),) int32."""
    torch = place.torch
    at = torch.arange(elements.start, elements.stop, dtype=torch.int32, device=place.device)
    return (at + 83 * index) % period


class Operation:
    """One operation at one size on one member, with its buffers. `launch(i)` runs iteration i."""

    def __init__(self, place: Place, member: Member, op: Op, dtype: Dtype, row: Counts) -> None:
        self.op, self.dtype, self.row = op, dtype, row
        self.place = place
        self.torch, self.dist, self.device = place.torch, place.torch.distributed, place.device
        self.slots = min(SLOTS_MAX, max(1, SPAN_BYTES // max(1, row.size_bytes)))
        kind = getattr(self.torch, dtype)
        self._received = self._rows(kind, self.row.received)
        self._sent = self._received if op in _IN_PLACE else self._rows(kind, self.row.sent)
        self.bind(member)

    def _rows(self, kind: Any, length: int) -> list[Any]:
        """Return one (length,) tensor per slot, cut from one allocation that has been touched."""
        whole = self.torch.ones(self.slots * length, dtype=kind, device=self.device)
        return [whole[i * length : (i + 1) * length] for i in range(self.slots)]

    def bind(self, member: Member) -> None:
        """Use this member's group from now on: communicators may be made anew under a traffic."""
        self.member = member
        self._start = self._starter()

    def unbind(self) -> None:
        """Let go of the group: torch ends a communicator only when nobody refers to it any more."""
        self.member = replace(self.member, group=None)
        self._start = _unbound

    def launch(self, iteration: int) -> None:
        """Run one iteration to its end, on the host's clock too."""
        slot = iteration % self.slots
        self._start(self._sent[slot], self._received[slot])
        if self.device.type == "cuda":
            self.torch.cuda.current_stream().synchronize()

    def _starter(self) -> Callable[[Any, Any], None]:
        """Return what starts the operation on (sent, received) and waits for it."""
        dist, group, ranks = self.dist, self.member.group, self.member.ranks
        match self.op:
            case "all_reduce":
                return lambda _, data: dist.all_reduce(data, group=group)
            case "broadcast":
                return lambda _, data: dist.broadcast(data, src=ranks[0], group=group)
            case "all_gather":
                gather = either(dist, "all_gather_single", "all_gather_into_tensor")
                return lambda sent, got: gather(got, sent, group=group)
            case "reduce_scatter":
                scatter = either(dist, "reduce_scatter_single", "reduce_scatter_tensor")
                return lambda sent, got: scatter(got, sent, group=group)
            case "all_to_all":
                return lambda sent, got: dist.all_to_all_single(got, sent, group=group)
            case "send_recv":
                return self._ring_shift

    def _ring_shift(self, sent: Any, got: Any) -> None:
        ranks, here, dist = self.member.ranks, self.member.index, self.dist
        after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
        pending = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, self.member.group),
                dist.P2POp(dist.irecv, got, before, self.member.group),
            ]
        )
        for work in pending:
            work.wait()

    # -- timing ------------------------------------------------------------------------------

    def timed(self, iterations: int, warmup: int, entering: Callable[[], None]) -> list[int]:
        """Return host wall times in ns of `iterations` runs after `warmup` and a barrier.

        `entering` is called before each of them, so that others can tell how far this rank came.
        """
        for iteration in range(warmup):
            entering()
            self.launch(iteration)
        entering()
        self.barrier()
        times_ns = []
        for iteration in range(iterations):
            entering()
            begin_ns = time.monotonic_ns()
            self.launch(iteration)
            times_ns.append(time.monotonic_ns() - begin_ns)
        return times_ns

    def barrier(self) -> None:
        """Wait for all members."""
        devices = [self.device.index] if self.device.type == "cuda" else None
        self.dist.barrier(group=self.member.group, device_ids=devices)

    # -- verification ------------------------------------------------------------------------

    def verify(self) -> int:
        """Run once on known data, return how many received elements are wrong."""
        self.fill()
        if self.op not in _IN_PLACE:
            self._received[0].zero_()
        self.barrier()
        self.launch(0)
        wanted, got = self.expected(), self._received[0].double()
        terms = len(self.member.ranks) if self.op in _REDUCING else 1
        largest = terms * (modulus(self.op, self.dtype) - 1)
        allowed = 0.0 if largest <= EXACT_BELOW[self.dtype] else terms * EPSILON[self.dtype]
        # written so that a NaN counts as wrong
        right = (got - wanted).abs() <= wanted.abs() * allowed
        return int((~right).sum().item())

    def fill(self) -> None:
        """Put this member's known data into the first slot."""
        self._sent[0].copy_(self._pattern(self.member.index, 0, self.row.sent))

    def expected(self) -> Any:
        """Return the (received,) float64 elements that this member must get."""
        here, ranks = self.member.index, len(self.member.ranks)
        size, block = self.row.received, self.row.count
        match self.op:
            case "all_reduce":
                return sum(self._pattern(i, 0, size).double() for i in range(ranks))
            case "reduce_scatter":
                return sum(self._pattern(i, here * block, size).double() for i in range(ranks))
            case "all_gather":
                parts = [self._pattern(i, 0, block) for i in range(ranks)]
            case "all_to_all":
                parts = [self._pattern(i, here * block, block) for i in range(ranks)]
            case "broadcast":
                parts = [self._pattern(0, 0, size)]
            case "send_recv":
                parts = [self._pattern((here - 1) % ranks, 0, size)]
        return self.torch.cat(parts).double()

    def _pattern(self, index: int, first: int, length: int) -> Any:
        period = modulus(self.op, self.dtype)
        return pattern(self.place, index, range(first, first + length), period)


def _unbound(sent: Any, got: Any) -> None:
    raise ValueError("the groups of this operation were destroyed")


def either(dist: Any, name: str, before: str) -> Any:
    """Return the function `name`, which torch before 2.13 has as `before`."""
    return getattr(dist, name, None) or getattr(dist, before)
