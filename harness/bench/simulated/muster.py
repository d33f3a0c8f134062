"""Ranks of several nodes, until all of their world have come: then each knows where all others are.

What real ranks do at a store of keys. Nobody knows beforehand how many nodes there are, only how
many ranks.
"""

from __future__ import annotations

import asyncio
from functools import cached_property

from harness.rlsim.hops import Place


class Muster:
    """One world of ranks; `ranks_of` by node, in the order in which they came."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks_of: dict[str, tuple[int, ...]] = {}
        self._complete = asyncio.Event()

    async def join(self, node: str, ranks: tuple[int, ...]) -> None:
        """Bring a node's ranks, and wait for all others; who is cancelled has not come."""
        self.ranks_of[node] = ranks
        if sum(map(len, self.ranks_of.values())) == self.world_size:
            self._complete.set()
        try:
            await self._complete.wait()
        except asyncio.CancelledError:
            del self.ranks_of[node]
            raise

    @cached_property
    def places(self) -> list[Place]:
        """Each rank's node and its number there, which is its GPU's, once all have come."""
        found = {
            rank: (node, gpu)
            for node, ranks in self.ranks_of.items()
            for gpu, rank in enumerate(ranks)
        }
        return [found[rank] for rank in range(self.world_size)]
