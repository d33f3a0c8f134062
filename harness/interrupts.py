"""Signals that end a run: once in order, with restoration; twice at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from harness.errors import ExitCode, Interrupted


class Interrupts:
    """Ctrl-C, SIGTERM or a closed terminal once: an orderly end with restoration. Twice: at once.

    The second leaves snapshots and records behind, which is what ``harness recover`` needs.
    """

    def __init__(self, recovery: str, snapshots: Path) -> None:
        self._recovery, self._snapshots = recovery, snapshots
        self._count = 0
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError and self._count:
            raise Interrupted("interrupted; the switches are as they were found")

    def _interrupt(self) -> None:
        self._count += 1
        if self._count == 1:
            assert self._task is not None
            self._task.cancel()
            _tell("interrupted: restoring the switches (again: leave at once)")
            return
        code, left = ExitCode.INTERRUPTED, "no circuit was changed"
        if any(self._snapshots.iterdir()):
            code, left = ExitCode.RESTORE_FAILED, "circuits were not restored"
        _tell(f"left at once: {left}; run: {self._recovery}")
        os._exit(code)


def _tell(text: str) -> None:
    with suppress(OSError):  # the terminal may be what went away
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
