"""Collectives of gloo, as torch runs them: steps of an algorithm, edges between ranks. Pure.

The algorithms are those of `harness.fabric.demand`: rings, everyone to everyone, a binomial tree.
A rank copies and adds up what it sends while the network carries it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.model.scenario import Op
from harness.rlsim.hops import Hop


class Round(NamedTuple):
    """What goes on at once: so many steps, edges between ranks, those on one node too."""

    steps: int
    edges: tuple[Hop, ...]

    @property
    def most_bytes(self) -> float:
        """Return what the busiest rank sends."""
        sent: dict[int, float] = {}
        for hop in self.edges:
            sent[hop.sender] = sent.get(hop.sender, 0.0) + hop.bytes
        return max(sent.values(), default=0.0)


def rounds(op: Op, size_bytes: float, ranks: int, *, one_way: bool = False) -> Iterator[Round]:
    """Yield the rounds of one collective, one after another.

    `one_way`: of a `send_recv`, the first sends to the second, and nobody else.
    """
    each = range(ranks)
    match op:
        case "all_reduce" | "reduce_scatter":  # gloo scatters what it has reduced everywhere
            part = 2 * (ranks - 1) / ranks * size_bytes
            yield Round(2 * (ranks - 1), tuple(Hop(i, (i - 1) % ranks, part) for i in each))
        case "all_gather":
            part = (ranks - 1) / ranks * size_bytes
            yield Round(ranks - 1, tuple(Hop(i, (i + 1) % ranks, part) for i in each))
        case "all_to_all":
            part = size_bytes / ranks
            edges = tuple(Hop(i, j, part) for i in each for j in each if i != j)
            yield Round(ranks - 1, edges)
        case "broadcast":
            reached = 1
            while reached < ranks:
                new = range(reached, min(2 * reached, ranks))
                yield Round(1, tuple(Hop(i - reached, i, size_bytes) for i in new))
                reached *= 2
        case "send_recv":
            senders = range(1) if one_way else each
            yield Round(1, tuple(Hop(i, (i + 1) % ranks, size_bytes) for i in senders))
