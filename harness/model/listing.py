"""Names in a line: all where they are few, else the first of them and how many more. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

FEW = 16


def few(names: Iterable[str], most: int = FEW) -> str:
    """Return names in the order in which people count: ``n2`` before ``n10``."""
    return first(sorted(names, key=_counted), most, ", ")


def first(texts: Iterable[str], most: int = FEW, between: str = "; ") -> str:
    """Return texts in the order that they have."""
    found = list(texts)
    shown = found if len(found) <= most else found[: most // 2]
    more = len(found) - len(shown)
    return between.join(shown) + (f" and {more:,} more" if more else "")


def _counted(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
