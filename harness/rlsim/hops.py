"""Who sends how much to whom from node to node, when NCCL's algorithms run over several. Pure.

A group is laid out node by node, in the order in which nodes come first in it: so NCCL orders its
rings. GPUs of the same place on their nodes are a *rail*; what goes from node to node is split
evenly over the rails that both have. Bytes are payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.errors import UsageError

Place = tuple[str, int]
"""Of a rank: its node, and its GPU there."""


class Hop(NamedTuple):
    """Sender and receiver, by their place in the group, on different nodes; bytes of payload."""

    sender: int
    receiver: int
    bytes: float


class Nodes(NamedTuple):
    """A group by nodes: of each, rank by GPU, in the order of the group."""

    ranks: tuple[dict[int, int], ...]
    """`ranks[node][gpu]` is the place of a rank in the group."""

    @property
    def fewest(self) -> int:
        """Return how many ranks the emptiest node has."""
        return min(len(on) for on in self.ranks)

    def rails(self) -> tuple[int, ...]:
        """Return the GPUs that every node has.

        Raises `UsageError` where nodes differ: what is split by rails can't be.
        """
        first, *others = (tuple(sorted(on)) for on in self.ranks)
        if any(other != first for other in others):
            told = "; ".join(",".join(map(str, on)) for on in (first, *others))
            raise UsageError(
                f"a hierarchical collective needs the same GPUs of each node, not {told}"
            )
        return first


def nodes_of(places: Sequence[Place]) -> Nodes:
    """Return the group by nodes. Raises `UsageError` where two ranks share a GPU."""
    found: dict[str, dict[int, int]] = {}
    for rank, (node, gpu) in enumerate(places):
        on = found.setdefault(node, {})
        if gpu in on:
            raise UsageError(
                f"ranks {on[gpu]} and {rank} of a group are both on GPU {gpu} of {node}:"
                " NCCL takes one rank of each GPU"
            )
        on[gpu] = rank
    return Nodes(tuple(found.values()))


def ring(nodes: Nodes, size_bytes: float, *, closed: bool = True) -> Iterator[Hop]:
    """Yield what passes from each node to the next: `size_bytes`; a chain is not `closed`."""
    count = len(nodes.ranks)
    for a in range(count if closed else count - 1):
        yield from _between(nodes, a, (a + 1) % count, size_bytes)


def tree(nodes: Nodes, size_bytes: float) -> Iterator[Hop]:
    """Yield what passes along two trees that carry half of it each, up and down again."""
    for child, parent in double_tree(len(nodes.ranks)):
        yield from _between(nodes, child, parent, size_bytes / 2)
        yield from _between(nodes, parent, child, size_bytes / 2)


def double_tree(count: int) -> list[tuple[int, int]]:
    """Return (child, parent) of both trees; what is a leaf in one is not in the other.

    Source: `ncclGetBtree` and `ncclGetDtree` of NCCL's ``src/graph/trees.cc``.
    """
    one = []
    for node in range(1, count):
        bit = node & -node
        parent = (node ^ bit) | (bit << 1)
        one.append((node, parent if parent < count else node ^ bit))
    if count % 2:
        return one + [((a + 1) % count, (b + 1) % count) for a, b in one]
    return one + [(count - 1 - a, count - 1 - b) for a, b in one]


def all_to_all(nodes: Nodes, block_bytes: float) -> tuple[list[Hop], int]:
    """Return what goes from node to node with PXN, and how many blocks a rank sends over NVLink.

    What is for another node goes to the GPU of its receiver's rail first, over NVLink, so that
    each of these sends all of its node's blocks on its own rail; from a node that has no such GPU
    each sends for itself.
    """
    hops, within = [], [0] * sum(len(on) for on in nodes.ranks)
    for a, here in enumerate(nodes.ranks):
        for gpu, rank in here.items():
            within[rank] += len(here) - 1
            others = (on for b, on in enumerate(nodes.ranks) if b != a)
            within[rank] += sum(1 for on in others for rail in on if rail != gpu and rail in here)
        for b, there in enumerate(nodes.ranks):
            for rail, receiver in there.items() if b != a else ():
                if rail in here:
                    hops.append(Hop(here[rail], receiver, block_bytes * len(here)))
                else:
                    hops.extend(Hop(rank, receiver, block_bytes) for rank in here.values())
    return hops, max(within)


def crossing(edges: Iterable[Hop], places: Sequence[Place]) -> tuple[Hop, ...]:
    """Return those that have something to carry from node to node."""
    return tuple(
        hop for hop in edges if hop.bytes > 0 and places[hop.sender][0] != places[hop.receiver][0]
    )


def _between(nodes: Nodes, a: int, b: int, size_bytes: float) -> list[Hop]:
    """Return how so much gets from a node to another, over all their rails."""
    here, there = nodes.ranks[a], nodes.ranks[b]
    rails = [gpu for gpu in here if gpu in there]
    if not rails:  # no rail is common: the last passes it to the first
        return [Hop(list(here.values())[-1], next(iter(there.values())), size_bytes)]
    return [Hop(here[gpu], there[gpu], size_bytes / len(rails)) for gpu in rails]
