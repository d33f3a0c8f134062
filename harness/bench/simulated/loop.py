"""Traffic of simulated ranks: one exchange in a loop, held and let go by a gate of each node.

As real ranks do, those of a node enter the next iteration as soon as their gate lets them, and wait
inside for the others. See `harness.model.gate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from harness.bench.simulated.deadline import left_s
from harness.bench.simulated.exchange import Exchange
from harness.bench.simulated.world import World
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.gate import Gate, Watch

_BEFORE_NS = NS_PER_MS
"""So long before whoever asked gives up, he is told how far it came."""


class Loop:
    """Goes on from now until `close`; `timeout_ns` is how long it may be waited for."""

    def __init__(
        self, world: World, exchange: Exchange, nodes: Iterable[str], timeout_ns: int
    ) -> None:
        self.gates = {node: Gate() for node in nodes}
        self.timeout_ns = timeout_ns
        self._world, self._exchange = world, exchange
        self._watches: list[tuple[str, Watch]] = []
        self._happened = asyncio.Event()
        """Set when an iteration ended or a gate has moved; a new one then."""
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Let nothing go on."""
        self._task.cancel()

    def stir(self) -> None:
        """Have all look again who wait: a gate has moved."""
        self._happened.set()
        self._happened = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, which is asked whenever something happened."""
        while not holds():
            await self._happened.wait()

    async def steady(self, node: str, watch: Watch) -> None:
        """Wait until a node's traffic is steady, or until that was waited for long enough."""
        self._watches.append((node, watch))
        try:
            left = left_s(self._world.clock, self.timeout_ns)
            async with asyncio.timeout(left and left - _BEFORE_NS / NS_PER_S):
                await self.until(lambda: watch.steady_ns != 0)
        except TimeoutError:
            if since_ns := self.gates[node].inside_since_ns:
                waited_ns = self._world.clock.now_ns() - since_ns
                watch.longest_ns = max(watch.longest_ns, waited_ns)
        finally:
            self._watches.remove((node, watch))

    # -- iterations ------------------------------------------------------------------------------

    async def _run(self) -> None:
        clock = self._world.clock
        while True:
            await self._all_enter()
            over_ns = await self._exchange.done(self._world, clock.now_ns())
            await clock.sleep_ns(over_ns - clock.now_ns())
            for node, gate in self.gates.items():
                begin_ns = gate.inside_since_ns
                gate.leave(clock.now_ns())
                for watched, watch in self._watches:
                    if watched == node and not watch.steady_ns:
                        watch.observe(begin_ns, clock.now_ns())
            self.stir()

    async def _all_enter(self) -> None:
        """Have the ranks of each node enter as soon as they may."""
        outside = dict(self.gates)

        def all_inside() -> bool:
            for node, gate in list(outside.items()):
                if gate.may_enter():
                    gate.enter(self._world.clock.now_ns())
                    del outside[node]
            return not outside

        await self.until(all_inside)
