"""``python -m drivers.emulators CONFIG.json``: one emulated unit, until SIGTERM or SIGINT.

SIGHUP has it read the `faults` of its configuration again, and break or be mended accordingly.
Prints one line of JSON (`Ready`) when every face answers. Exit status 2 and one line on standard
error where the configuration or the machine does not let it start.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
from pathlib import Path

import msgspec

from drivers.emulators.config import EmulatedSwitch
from drivers.emulators.entry import main, until_stopped
from drivers.emulators.process import serve

SWITCH_INTERVAL_S = 0.0005
"""The mover's thread waits no longer than this for the interpreter; the default is 5 ms."""


def _work(path: Path) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # select() waits with microseconds, epoll with milliseconds: serial pacing needs the former.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    serving = serve(_read(path), reread=lambda: _read(path).faults)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(until_stopped(serving))


def _read(path: Path) -> EmulatedSwitch:
    return msgspec.json.decode(path.read_bytes(), type=EmulatedSwitch)


if __name__ == "__main__":
    sys.exit(main("drivers.emulators", _work))
