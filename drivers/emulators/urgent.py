"""A device has a processor of its own: it does not wait for what else this machine does."""

from __future__ import annotations

import contextlib
import os


def run_first() -> None:
    """Let this thread, and what it starts, run before ordinary ones, where we may."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
