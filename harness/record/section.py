"""What reports are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Section:
    """One part of a report: lines, then a table; the columns in `text` are set to the left."""

    title: str
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default=())
    text: tuple[int, ...] = (0,)
