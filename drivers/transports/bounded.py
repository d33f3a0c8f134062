"""Blocking foreign calls under our own deadline.

Name look-ups and several steps of an SSH session have no timeout of their own, or one that does not
cover all of their waiting. They run in a thread that is left behind when the deadline passes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from drivers.base import NS_PER_S
from drivers.errors import DeadlineExpired

T = TypeVar("T")


def remaining_s(deadline_ns: int) -> float:
    """Return the seconds left until `deadline_ns` (monotonic), never negative."""
    return max(0, deadline_ns - time.monotonic_ns()) / NS_PER_S


class _Work(Generic[T]):
    """One call and what became of it; a result that comes too late is disposed of."""

    def __init__(self, call: Callable[[], T], dispose: Callable[[T], None]) -> None:
        self._call, self._dispose = call, dispose
        self._lock = threading.Lock()
        self._abandoned = False
        self.done = threading.Event()
        self.result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work (in its thread)."""
        try:
            result = self._call()
        except BaseException as error:  # raised again in the waiting thread
            self.error = error
        else:
            with self._lock:
                if self._abandoned:
                    self._dispose(result)
                else:
                    self.result.append(result)
        self.done.set()

    def abandon(self) -> bool:
        """Give up on the result; return False when it has just come."""
        with self._lock:
            self._abandoned = not self.result and self.error is None
            return self._abandoned


def bounded(
    call: Callable[[], T],
    deadline_ns: int,
    *,
    what: str,
    abandon: Callable[[], None] = lambda: None,
    dispose: Callable[[T], None] = lambda _: None,
) -> T:
    """Return ``call()``, or raise `DeadlineExpired` naming `what` once `deadline_ns` has passed.

    On expiry `abandon` is called to make the work fail soon (it closes the socket under it), and a
    result that comes all the same is given to `dispose`.
    """
    work = _Work(call, dispose)
    threading.Thread(target=work.run, name=f"bounded: {what}", daemon=True).start()
    if not work.done.wait(remaining_s(deadline_ns)) and work.abandon():
        abandon()
        raise DeadlineExpired(f"{what}: no answer in time")
    if work.error is not None:
        raise work.error
    return work.result[0]
