"""A thread for one device: drivers block, the event loop must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from harness.processes import ask_for_real_time

T = TypeVar("T")


class Worker:
    """One thread that does calls in turn; unlike an executor's it cannot keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` done after those before it; cancelled before its turn, it is not done."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """End after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        ask_for_real_time()
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # it is for whoever awaits the call
                future.set_exception(error)
