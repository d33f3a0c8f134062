"""What one field of a trace's row means: counts, moments, ids of blocks. Pure.

A field comes as text (CSV) or as a JSON value; whole numbers may be written ``12.0``, as
spreadsheets and data frames do. Moments are in ns, exact to the digits given.
Raises `BadField`, which says what was expected and what was found.
"""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Any

from harness.model.workload import ArrivalUnit

NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
ARRIVAL_NS_MAX = 2**62
"""Some 146 years; a Unix time in ns is within."""
EPOCH_DAY = 719_163
"""1970-01-01 as `datetime.toordinal` counts."""
SHOWN = 40

_WHOLE = re.compile(r"(\d{1,19})(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"\d{1,20}(?:\.\d{0,30})?", re.ASCII)
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?"
    r"(?:[Zz]|([+-])([01]\d|2[0-3]):?([0-5]\d))?",
    re.ASCII,
)


class BadField(ValueError):
    """A value that cannot be what its column holds."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {shown(found)}")


def shown(found: object) -> str:
    """Quote a value in a message, cut where it is long."""
    if found is None or found == "":
        return "nothing"
    text = repr(found)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def whole_number(found: Any, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`."""
    value: int | None = None
    if isinstance(found, str):
        match = _WHOLE.fullmatch(found.strip())
        value = int(match[1]) if match else None
    elif isinstance(found, int) and not isinstance(found, bool):
        value = found
    elif isinstance(found, float) and found.is_integer():
        value = int(found)
    if value is None or not least <= value <= most:
        raise BadField(f"a whole number from {least} to {most}", found)
    return value


def arrival_ns(found: Any, unit: ArrivalUnit) -> int:
    """Return a moment in ns, after the epoch or after the trace's own zero."""
    if unit == "datetime":
        return _moment_ns(found)
    value = -1
    if isinstance(found, str) and _NUMBER.fullmatch(found.strip()):
        value = round(Decimal(found.strip()) * NS[unit])
    elif isinstance(found, int | float) and not isinstance(found, bool):
        value = round(found * NS[unit]) if 0 <= found <= ARRIVAL_NS_MAX else -1
    if not 0 <= value <= ARRIVAL_NS_MAX:
        raise BadField(f"a time in {unit}, 0 or more", found)
    return value


def _moment_ns(found: Any) -> int:
    match = _MOMENT.fullmatch(found.strip()) if isinstance(found, str) else None
    at = _whole_second(f"{match[1]} {match[2]}") if match else None
    if match is None or at is None:
        raise BadField("a moment such as 2023-11-16 18:17:03.9799600", found)
    days = at.toordinal() - EPOCH_DAY
    seconds = days * 86_400 + at.hour * 3600 + at.minute * 60 + at.second
    if match[4]:
        ahead = int(match[5]) * 3600 + int(match[6]) * 60
        seconds -= ahead if match[4] == "+" else -ahead
    value = seconds * 10**9 + int((match[3] or "").ljust(9, "0"))
    if not 0 <= value <= ARRIVAL_NS_MAX:
        raise BadField("a moment from 1970 to 2100", found)
    return value


def _whole_second(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # the digits are in their places, but there is no such day or hour
        return None


def block_ids(found: Any, prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Return the ids of a prompt's blocks: as many as the prompt fills, the last one in part."""
    whole = isinstance(found, list) and all(type(item) is int and item >= 0 for item in found)
    if not whole:
        raise BadField("a list of whole numbers, 0 or more", found)
    if len(found) != (needed := -(-prompt_tokens // block_tokens)):
        raise BadField(
            f"{needed} blocks of {block_tokens} tokens for a prompt of {prompt_tokens}", len(found)
        )
    return tuple(found)
