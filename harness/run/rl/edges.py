"""The way of new weights from nodes that train to nodes that generate: who sends to whom. Pure.

`chain`: the first that trains, then every receiver, one after the other. `tree`: from the first
receiver on each passes it on to two, as in a heap, so that none is far from the first. `pairs`:
every node that trains serves the receiver of its own ordinal; where receivers are more, they are
dealt in turn, and each source begins a chain over its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Path = Literal["chain", "tree", "pairs"]
Edge = tuple[str, str]
"""From a node, to a node."""


def sources_of(trainers: Sequence[str], receivers: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the nodes where weights are published: as many as serve, in the trainers' order."""
    return tuple(trainers[: max(1, len(receivers))] if path == "pairs" else trainers[:1])


def edges_of(sources: Sequence[str], receivers: Sequence[str], path: Path) -> tuple[Edge, ...]:
    """Return every transfer of the whole file; each receiver gets it once."""
    if path == "tree":
        above = (receivers[(i - 1) // 2] if i else sources[0] for i in range(len(receivers)))
        return tuple(zip(above, receivers, strict=True))
    first = sources if path == "pairs" else sources[:1]
    return tuple(
        edge
        for ordinal, source in enumerate(first)
        for edge in _chain(source, receivers[ordinal :: len(first)])
    )


def children_of(node: str, edges: Sequence[Edge]) -> tuple[str, ...]:
    """Return to whom a node sends, in order."""
    return tuple(to for sender, to in edges if sender == node)


def _chain(source: str, receivers: Sequence[str]) -> tuple[Edge, ...]:
    return tuple(zip((source, *receivers), receivers, strict=False))
