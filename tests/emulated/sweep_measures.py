"""Measures that misbehave, for workers, which import them by their names.

`UNIT` is put on the path: the study itself is among the unit tests.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from harness.sweeps.point import Measured, Point

UNIT = Path(__file__).parents[1] / "unit"
if str(UNIT) not in sys.path:
    sys.path.insert(0, str(UNIT))

from sweep_study import measure  # noqa: E402 - see the module

__all__ = ["measure"]


def dies_at_seed_2(point: Point) -> Measured:
    """Be killed, as by a machine that runs out of memory."""
    if point.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(point)


def never_ends_at_seed_2(point: Point) -> Measured:
    """Be at work for ever."""
    while point.seed == 2:
        time.sleep(3600)
    return measure(point)


def takes_too_much_at_seed_2(point: Point) -> Measured:
    """Ask for memory without end; what is held shows in the peak."""
    held = [bytearray(2**26)]
    while point.seed == 2:
        held.append(bytearray(2**26))
    return measure(point)


def has_a_bug(point: Point) -> Measured:
    """Raise what nobody foresaw, and print."""
    sys.stdout.write("a measure may print\n")
    raise ZeroDivisionError(f"seed {point.seed}")


def takes_a_while(point: Point) -> Measured:
    """Take long enough to be stopped half-way through a sweep."""
    time.sleep(0.3)
    return measure(point)
