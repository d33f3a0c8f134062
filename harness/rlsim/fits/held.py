"""Which engines each node of a run had, by what was built: a new one takes the place of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any


class Held:
    """Weights of a rank of each engine, as far as rows of the stream `engine` were taken."""

    def __init__(self) -> None:
        self._engines: dict[str, dict[frozenset[int], int]] = defaultdict(dict)

    def take(self, row: Mapping[str, Any]) -> None:
        """Have an engine in the place of those on its GPUs."""
        gpus, there = frozenset(row["gpus"]), self._engines[row["node"]]
        for others in [others for others in there if others & gpus]:
            del there[others]
        there[gpus] = (row["weights_bytes"] or 0) // max(1, len(gpus))

    def of_rank_bytes(self, node: str) -> int:
        """Return the most that a rank of a node holds; 0: it has none."""
        return max(self._engines[node].values(), default=0)

    @property
    def largest_bytes(self) -> int:
        """The most that a rank holds anywhere."""
        return max(map(self.of_rank_bytes, list(self._engines)), default=0)
