"""How long tasks of this machine have waited for a CPU, as its kernel tells it (Linux PSI).

All nodes of an emulated bench share the cores of one machine: where those are short, things take
longer than the bench's links and devices would. Tasks that are none of ours count too.
"""

from __future__ import annotations

import re
from pathlib import Path

CPU = Path("/proc/pressure/cpu")
_SOME = re.compile(r"^some .*\btotal=(\d+)$", re.MULTILINE)


def waited_us(path: Path = CPU) -> int | None:
    """Return the microseconds, since the machine's start, in which some task waited for a CPU.

    Of several CPUs the busy ones are averaged, as the kernel does. None where it does not tell: too
    old, PSI not built in or switched off, or not to be read by us.
    """
    try:
        return some_us(path.read_text())
    except OSError:
        return None


def some_us(text: str) -> int | None:
    """Return the total of the line ``some``, in microseconds; None where there is none."""
    found = _SOME.search(text)
    return int(found[1]) if found else None
