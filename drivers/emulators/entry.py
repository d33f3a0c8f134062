"""How an emulated device's process begins and ends, whatever it emulates.

Prints one line of JSON (`Ready`) when it answers, and serves until SIGTERM or SIGINT. Exit status 2
and one line on standard error where the configuration or the machine does not let it start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from drivers.emulators.config import Ready
from drivers.emulators.urgent import run_first
from drivers.errors import Misuse


def main(module: str, work: Callable[[Path], None]) -> int:
    """Do `work` with the configuration that the command line names; return the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"usage: python -m {module} CONFIG.json\n")
        return 2
    path = Path(sys.argv[1])
    with contextlib.suppress(PermissionError):  # already the leader of its own session
        os.setsid()
    run_first()
    try:
        work(path)
    except (OSError, Misuse, msgspec.DecodeError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 2
    return 0


async def until_stopped(serving: AbstractAsyncContextManager[Ready]) -> None:
    """Serve, say so, and go on until a signal comes."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving as ready:
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()
