"""Message sizes as a person writes them: ``"1MiB"``, ``"64 KiB"``, ``"1GB"``, ``"512"``.

KiB, MiB and GiB are powers of 1024; KB, MB and GB are powers of 1000; a bare number (or ``B``) is
bytes. The letters ``K``, ``M``, ``G`` alone are refused: nccl-tests reads them as 1024-based and
most people as 1000-based. Pure; raises `ValueError`.
"""

from __future__ import annotations

import re
from decimal import Decimal

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
SIZE_MAX = 2**40

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", re.ASCII)


def parse_size(text: str) -> int:
    """Return bytes. Raises `ValueError` on anything but a whole, positive number of them."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f'{text!r} is not a size such as "1MiB", "64 KiB" or "1GB"')
    if found[2] not in UNITS:
        near = next((u for u in UNITS if u and u.lower() == found[2].lower()), None)
        right = (
            f'"{found[1]}{near}"' if near else "one of B, KB, MB, GB (1000) or KiB, MiB, GiB (1024)"
        )
        raise ValueError(f"{text!r}: unknown unit {found[2]!r}; write {right}")
    size = Decimal(found[1]) * UNITS[found[2]]
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if not 0 < size <= SIZE_MAX:
        raise ValueError(f"{text!r}: a size lies between 1 byte and {format_size(SIZE_MAX)}")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Write bytes the short way that `parse_size` reads back exactly: ``"16MiB"``, ``"100B"``."""
    for unit in ("GiB", "MiB", "KiB", "GB", "MB", "KB"):
        if size_bytes >= UNITS[unit] and size_bytes % UNITS[unit] == 0:
            return f"{size_bytes // UNITS[unit]}{unit}"
    return f"{size_bytes}B"
