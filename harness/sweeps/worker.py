"""A process that makes points, one after the other: ``python -m harness.sweeps.worker``.

Its arguments are the process that started it, and a measure as ``MODULE:FUNCTION``. It says
``ready`` once that is imported, then answers each `Point` that it reads, a line of JSON, with a
`Row`. It ends with its standard input, and dies with its parent. What a measure prints goes to
standard error. Whatever a measure raises becomes an error of its row; here alone, `Exception` is
caught: one point must not stop the rest.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.sweeps.point import Measure, Point, Row, differences, row_of

NICENESS = 10
READY = b"ready\n"
BYTES_PER_GB = 10**9
_PR_SET_PDEATHSIG = 1
_FORGET_PEAK = "5"


def name_of(measure: Measure) -> str:
    """Return how a worker finds this function."""
    return f"{measure.__module__}:{measure.__qualname__}"


def named(name: str) -> Measure:
    """Import a function by the name that `name_of` gave it."""
    module, _, attribute = name.partition(":")
    found: Measure = getattr(import_module(module), attribute)
    return found


def made(point: Point, measure: Measure) -> Row:
    """Return the row of a point, made here and now, whatever happens."""
    _forget_peak()
    before_s, error, measured = _cpu_s(), "", None
    try:
        if different := list(differences(point)):
            error = "; ".join(different)
        else:
            with _at_most(point.memory_gb):
                measured = measure(point)
    except MemoryError:
        error = f"needs more than {point.memory_gb:g} GB of memory (memory_gb)"
    except HarnessError as failure:
        error = str(failure) or type(failure).__name__
    except Exception as bug:  # see the module
        traceback.print_exc()
        error = f"a bug of ours: {type(bug).__name__}: {bug} ({_place(bug)})"
    cpu_s, peak_mb = _cpu_s() - before_s, _peak_mb()
    return row_of(point, measured=measured, error=error, cpu_s=cpu_s, peak_mb=peak_mb)


@contextmanager
def _at_most(memory_gb: float) -> Iterator[None]:
    """Let this process hold no more private memory: beyond, Python raises `MemoryError`."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = round(memory_gb * BYTES_PER_GB)
    if before[1] != resource.RLIM_INFINITY:
        most = min(most, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _place(error: Exception) -> str:
    """Return where an error was raised, for a reader without the log."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _forget_peak() -> None:
    """Begin to look for the highest memory anew; where the kernel won't, it is the worker's."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)


def _peak_mb() -> float:
    """Return the most memory in use at once since `_forget_peak`; 0 where no system tells."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; leave at once if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Answer points until there are no more."""
    parent, measure_name = arguments
    _die_with(int(parent))
    os.nice(NICENESS)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a measure prints is no reply
    measure = named(measure_name)
    replies.write(READY)
    for line in sys.stdin.buffer:
        row = made(msgspec.json.decode(line, type=Point), measure)
        replies.write(msgspec.json.encode(row) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
