"""An event loop whose time jumps: when all wait, it is at once as late as the next of them waits.

The same coroutines that live in real time run on it to the same decisions, in no time, in the same
order each time. When all wait and nothing is ever to happen, that is told as `Deadlock`, with who
waits for what. Signals are heard: Ctrl-C is looked for now and then.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from datetime import UTC, datetime
from heapq import heappush
from typing import Any, TypeVar

from harness.clock import NS_PER_S
from harness.errors import StepFailed

T = TypeVar("T")

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""The wall time of everything virtual: a label, the same each time."""
LOOK_EVERY = 256
"""Rounds of the loop between two looks at signals: a system call costs as much as a round."""
WAITING_MAX = 20
"""Tasks that a deadlock names."""


class Deadlock(StepFailed):
    """All wait, and nothing is to happen any more."""


class _Jumping(selectors.DefaultSelector):
    """Waits for no timer. Nothing but the loop's own wake-up is ever registered on it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.stuck: Callable[[], Exception] = lambda: Deadlock("all wait")
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return what is ready, `timeout` later; raises `Deadlock` where all wait for ever."""
        self._rounds += 1
        if timeout is None:
            if ready := super().select(0):
                return ready
            raise self.stuck()
        if timeout > 0:
            self.now_ns += max(1, round(timeout * NS_PER_S))
        if self._rounds % LOOK_EVERY:
            return []
        return super().select(0)


class _Timer(asyncio.TimerHandle):
    """Comes after whoever is due earlier, or was made earlier for the same nanosecond."""

    __slots__ = ("turn",)
    turn: tuple[int, int]

    def __lt__(self, other: Any) -> bool:
        mine, its = self.turn, other.turn
        return bool(mine < its)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. Its time is whole nanoseconds from 0 on.

    What is handed to a thread is done here and now: it takes no time, and always the same turn.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self._timers = 0
        super().__init__(self._jumping)
        self._jumping.stuck = lambda: Deadlock(
            f"a deadlock: {'; '.join(waiting(self)) or 'nobody is at work'}"
        )

    @property
    def now_ns(self) -> int:
        """Return the present moment."""
        return self._jumping.now_ns

    def time(self) -> float:
        """Return the same in seconds."""
        return self._jumping.now_ns / NS_PER_S

    def call_at(  # type: ignore[override]  # as its own is, but for types of variable arguments
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Plan a call; of those for one moment the one that was planned first comes first.

        asyncio leaves that to the shape of its heap, so that any timer more would change it.
        """
        self._check_closed()  # type: ignore[attr-defined]  # what asyncio does, too
        timer = _Timer(when, callback, args, self, context)
        self._timers += 1
        timer.turn = round(when * NS_PER_S), self._timers
        heappush(self._scheduled, timer)  # type: ignore[attr-defined]  # its heap
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001 - as asyncio has it
        return timer

    def busy(self, duration_ns: int) -> None:
        """Let time pass in which nobody gets a turn: something keeps the loop at work."""
        self._jumping.now_ns += duration_ns

    def run_in_executor(  # type: ignore[override]  # typeshed's is of one Python version each
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Do it at once."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class VirtualClock:
    """The `harness.clock.Clock` of the virtual loop that runs."""

    def now_ns(self) -> int:
        """Return the loop's time; 0 before and after it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._last_ns
        if not isinstance(loop, VirtualLoop):
            raise TypeError("a virtual clock is read outside a virtual loop")
        self._last_ns = loop.now_ns
        return loop.now_ns

    _last_ns = 0

    def wall(self) -> datetime:
        """Return the same moment always."""
        return EPOCH

    async def sleep_ns(self, duration_ns: int) -> None:
        """Wait; 0 and less let others go first."""
        await asyncio.sleep(max(0, duration_ns) / NS_PER_S)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a virtual loop of its own. Raises `Deadlock`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


# -- who waits for what ----------------------------------------------------------------------------


def waiting(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return each task that waits, and through which of our functions it came to where it does."""
    told = sorted(f"{task.get_name()} waits in {_where(task)}" for task in asyncio.all_tasks(loop))
    if len(told) > WAITING_MAX:
        told[WAITING_MAX:] = [f"and {len(told) - WAITING_MAX} more"]
    return told


def _where(task: asyncio.Task[Any]) -> str:
    names = [name for name in _awaited(task.get_coro()) if name]
    return " > ".join(names) or "its beginning"


def _awaited(coro: Any) -> Iterator[str]:
    """Yield the names of coroutines from the outermost to the one that waits."""
    while coro is not None:
        yield getattr(coro, "__qualname__", "")
        coro = getattr(coro, "cr_await", None)
        if not hasattr(coro, "cr_await"):
            return
