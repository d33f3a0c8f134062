"""KV that goes from a simulated instance to another: how many bytes, how long, and who has it.

Of one (layer, KV head), a request's KV of n tokens takes ``n * 2 * head_dim * dtype * bytes_scale``
bytes, rounded up, as in `agents.generation.kv`. Every rank of the target gets each layer and head
that it holds once (`harness.model.reshard`). What arrived is claimed by transfer and request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from functools import cache
from math import ceil

from harness.bench.simulated.world import Flow, World
from harness.clock import NS_PER_S
from harness.model.layout import Layout
from harness.model.requests import Carried
from harness.model.reshard import moves
from harness.model.shape import ModelShape
from harness.wire.generation import KvTarget

KEEP_NS = 60 * NS_PER_S
"""How long what has arrived waits to be claimed."""
SEND_S = 20
"""How long a sender tries, in all."""


class Landing:
    """Where an instance takes KV; the ``HOST:PORT`` of its ranks are found among what is shared."""

    def __init__(self, world: World, node: str) -> None:
        self.node = node
        self.peers: tuple[str, ...] = ()
        self._world = world
        self._came: dict[tuple[str, str], tuple[int, int]] = {}

    def open(self, peers: Sequence[str]) -> None:
        """Be found there."""
        self.peers = tuple(peers)
        for peer in peers:
            self._world.shared[_key(peer)] = self

    def land(self, transfer: str, kv_tokens: dict[str, int]) -> None:
        """Take the KV of requests; what nobody claimed in time is dropped."""
        now_ns = self._world.clock.now_ns()
        self._came = {key: row for key, row in self._came.items() if row[1] >= now_ns - KEEP_NS} | {
            (transfer, name): (tokens, now_ns) for name, tokens in kv_tokens.items()
        }

    def claim(self, transfer: str, request: Carried) -> bool:
        """Take what has arrived of a request's KV; return whether it is all of it, and in time."""
        found = self._came.pop((transfer, request.id), None)
        now_ns = self._world.clock.now_ns()
        return found is not None and found[0] == request.kv_tokens and found[1] >= now_ns - KEEP_NS

    def close(self) -> None:
        """Be found no longer."""
        for peer in self.peers:
            self._world.shared.pop(_key(peer), None)


async def send(
    world: World,
    source: tuple[str, Layout],
    left: Sequence[Carried],
    to: KvTarget,
    *,
    shape: ModelShape,
    bytes_scale: float,
) -> dict[str, int]:
    """Send what KV these requests had at `source`, a node and a layout, to where they go on.

    Returns the bytes of each that arrived. All are sent at once, and arrive together, or none does.
    """
    (node, layout), figures = source, world.figures.generation
    landing = _found(world, to)
    tokens = {request.id: request.kv_tokens for request in left if request.kv_tokens}
    if landing is None or not tokens:
        return {}
    lanes = _lanes(layout, to.instance.layout, shape)
    of_token = 2 * shape.head_dim * shape.kv_dtype_bytes * bytes_scale
    sent_bytes = {name: ceil(count * of_token) * lanes for name, count in tokens.items()}
    total = sum(sent_bytes.values())
    try:
        async with asyncio.timeout(SEND_S):
            await world.takes(figures.kv_fixed_s)
            await asyncio.gather(
                world.network.carry([Flow(node, landing.node, total)]),
                world.takes(total / (figures.kv_gb_per_s.value * 1e9)),
            )
    except TimeoutError:
        return {}
    if _found(world, to) is not landing:
        return {}  # the instance went meanwhile
    landing.land(to.transfer, tokens)
    return sent_bytes


def _found(world: World, to: KvTarget) -> Landing | None:
    """Return where all ranks of the target listen; None where one of them does not."""
    found = [world.shared.get(_key(peer)) for peer in to.peers]
    if len(found) != to.instance.layout.gpus or any(one is not found[0] for one in found):
        return None
    landing: Landing | None = found[0]
    return landing


def _key(peer: str) -> Hashable:
    return "kv", peer


@cache
def _lanes(source: Layout, target: Layout, shape: ModelShape) -> int:
    """Return the (layer, head) pairs that are sent of each request: alike, whatever its group."""
    return sum(
        len(part.layers) * len(part.heads) for _, _, part in moves(source, target, shape, "")
    )
