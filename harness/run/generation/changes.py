"""Waiting until something about the fleet is so, and the tasks beside that make it so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from harness.clock import NS_PER_S
from harness.tasks import end


class Changes:
    """Told of every change; whoever waits looks again. A failure wakes all and is theirs."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.failure: Exception | None = None

    def happened(self) -> None:
        """Let everybody look again."""
        self._next.set()
        self._next = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """End all waiting, now and later, with the first such error."""
        self.failure = self.failure or error
        self.happened()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    async def until(self, predicate: Callable[[], bool], timeout_ns: int) -> bool:
        """Wait until `predicate` holds; return whether it does in the end."""
        limit = asyncio.timeout(timeout_ns / NS_PER_S)
        try:
            async with limit:
                while True:
                    self.check()
                    if predicate():
                        return True
                    await self._next.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            return predicate()


class Changing(asyncio.Lock):
    """Held by whoever changes the layout; `then` looks after what was left to him meanwhile."""

    then: Callable[[], None] | None = None

    def release(self) -> None:
        """Let go of it."""
        super().release()
        if self.then is not None:
            self.then()


class Background:
    """Tasks that nobody awaits: an error that escapes one of them fails everybody who waits."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel all and see them ended."""
        await end(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._changes.fail(error)
