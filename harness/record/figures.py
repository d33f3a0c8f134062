"""Numbers for a reader: a unit, a sensible number of digits, and never more than the bound allows.

Pure. A bound is rounded up to one digit and the value to the same decimal place: 25.3174 +/- 0.4
becomes ``25.3 ±0.4``. No value has more than four significant digits.
"""

from __future__ import annotations

import math

from harness.model.sizes import format_size

DIGITS = 4
DASH = "-"
"""Stands where nothing was measured."""


def figure(value: float | None, bound: float | None = None) -> str:
    """Write a number without its unit, with the digits that its bound allows, four at most."""
    if value is None or math.isnan(value):
        return DASH
    if not value:
        return "0"
    place = _place(value) - DIGITS + 1
    return _rounded(value, max(place, _bound_place(bound)) if bound else place)


def with_bound(value: float | None, bound: float | None) -> str:
    """Write a number and its bound: ``25.3 ±0.4``; a value below its bound is not resolved."""
    if value is None or not bound:
        return figure(value)
    if abs(value) < bound:
        return f"below ±{bound_only(bound)}"
    return f"{figure(value, bound)} ±{bound_only(bound)}"


def with_interval(value: float, half_width: float | None) -> str:
    """Write a mean and half of its confidence interval, that with two digits: ``1.425 ±0.063``."""
    if not half_width or half_width < abs(value) * 1e-6:
        return figure(value)
    place = _place(half_width) - 1
    return f"{_rounded(value, place)} ±{_rounded(half_width, place)}"


def bound_only(bound: float) -> str:
    """Write a bound: rounded up to one digit."""
    place = _bound_place(bound)
    step = 10.0**place
    return _rounded(math.ceil(bound / step - 1e-9) * step, place)


def size(size_bytes: int) -> str:
    """Write a message size: ``4 MiB``, ``960 B``."""
    text = format_size(size_bytes)
    digits = text.rstrip("KMGiB")
    return f"{digits} {text[len(digits) :]}"


def _place(value: float) -> int:
    """Return the power of ten of the first digit."""
    return math.floor(math.log10(abs(value)))


def _bound_place(bound: float) -> int:
    """Return the decimal place of a bound rounded up to one digit: 0.96 is 1, so it is 0."""
    place = _place(bound)
    return place + (math.ceil(bound / 10.0**place - 1e-9) >= 10)


def _rounded(value: float, place: int) -> str:
    return f"{round(value, -place):.{max(0, -place)}f}"
