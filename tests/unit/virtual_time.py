"""An event loop whose time jumps to the next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")


class Jumping(selectors.DefaultSelector):
    """Waits for no timer; what is never to happen is an error instead of a hang."""

    now_ns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing is to happen any more")
        self.now_ns += max(0, round(timeout * 1e9))
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock is integer nanoseconds; also `asyncio.timeout` lives by it."""

    def __init__(self) -> None:
        self.jumping = Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_ns / 1e9


class VirtualClock:
    """A `harness.clock.Clock` of the running virtual loop."""

    def now_ns(self) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.jumping.now_ns

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def sleep_ns(self, duration_ns: int) -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        loop.call_later(max(0, duration_ns) / 1e9, lambda: over.done() or over.set_result(None))
        await over


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
