"""Which engines each node of a run had, by what was built: a new one takes the place of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any


class Held:
    """Bytes of weights by node, as far as rows of the stream `engine` were taken."""

    def __init__(self) -> None:
        self._engines: dict[str, dict[frozenset[int], int]] = defaultdict(dict)

    def take(self, row: Mapping[str, Any]) -> None:
        """Have an engine in the place of those on its GPUs."""
        gpus, there = frozenset(row["gpus"]), self._engines[row["node"]]
        for others in [others for others in there if others & gpus]:
            del there[others]
        there[gpus] = row["weights_bytes"] or 0

    def bytes_of(self, node: str) -> int:
        """Return what all engines of a node hold."""
        return sum(self._engines[node].values())

    @property
    def largest_bytes(self) -> int:
        """What the largest engine anywhere holds; 0: there is none."""
        return max((size for there in self._engines.values() for size in there.values()), default=0)
