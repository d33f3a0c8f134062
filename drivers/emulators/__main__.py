"""``python -m drivers.emulators CONFIG.json``: one emulated unit, until SIGTERM or SIGINT.

SIGHUP has it read the `faults` of its configuration again, and break or be mended accordingly.
Prints one line of JSON (`Ready`) when every face answers. Exit status 2 and one line on standard
error where the configuration or the machine does not let it start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import sys
from pathlib import Path

import msgspec

from drivers.emulators.config import EmulatedSwitch
from drivers.emulators.process import serve
from drivers.errors import Misuse

SWITCH_INTERVAL_S = 0.0005
"""The mover's thread waits no longer than this for the interpreter; the default is 5 ms."""


def main() -> int:
    """Run one unit; return the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m drivers.emulators CONFIG.json\n")
        return 2
    path = Path(sys.argv[1])
    with contextlib.suppress(PermissionError):  # already the leader of its own session
        os.setsid()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # select() waits with microseconds, epoll with milliseconds: serial pacing needs the former.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_until_stopped(path))
    except (OSError, Misuse, msgspec.DecodeError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 2
    return 0


async def _until_stopped(path: Path) -> None:
    config, stopped = _read(path), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve(config, reread=lambda: _read(path).faults) as ready:
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


def _read(path: Path) -> EmulatedSwitch:
    return msgspec.json.decode(path.read_bytes(), type=EmulatedSwitch)


if __name__ == "__main__":
    sys.exit(main())
