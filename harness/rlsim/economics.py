"""What performance costs: per US $ and per W, of the network alone and with its GPUs.

A divisor of the network alone rewards a cheap, slow network, so both are always told. Performance
is any rate, more being better; its unit is handed in. Tables are rows of text with units in the
head; `aligned` makes lines of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.errors import UsageError
from harness.rlsim.bills import Bill
from harness.rlsim.prices import TITLES

ABSENT = "-"
"""Told of a design without a bill."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in a divisor, all round: no server, no cooling."""

    usd: float = 30_000.0
    """A round assumption."""
    w: float = 700.0
    """The most that an H100 or H800 board may draw."""


@dataclass(frozen=True)
class Design:
    """A network, and what was achieved on it."""

    name: str
    performance: float
    bill: Bill


class Worth(NamedTuple):
    """Performance, and that per unit of each divisor; None where a design has no bill.

    Of two, `relative` gives ratios.
    """

    performance: float | None
    per_network_usd: float | None
    per_usd: float | None
    per_network_w: float | None
    per_w: float | None


def worth_of(design: Design, gpu: Gpu) -> Worth:
    """Return what a design is worth."""
    bill = design.bill
    gpus_usd, gpus_w = bill.gpus * gpu.usd, bill.gpus * gpu.w
    divisors = (bill.usd, bill.usd + gpus_usd, bill.w, bill.w + gpus_w)
    return Worth(
        design.performance,
        *(design.performance / of if bill.is_priced and of else None for of in divisors),
    )


def relative(worth: Worth, baseline: Worth) -> Worth:
    """Return how many times the baseline's each is; None where either has none."""
    return Worth(
        *(
            None if own is None or not other else own / other
            for own, other in zip(worth, baseline, strict=True)
        )
    )


# -- tables ----------------------------------------------------------------------------------------

Rows = list[tuple[str, ...]]


def cost_rows(designs: Sequence[Design], gpu: Gpu) -> Rows:
    """Return what each design costs and draws, without and with its GPUs; the head first."""
    rows: Rows = [
        ("design", "network $M", "with GPUs $M", "network $ per GPU", "network kW", "with GPUs kW")
    ]
    for design in designs:
        bill = design.bill
        figures = (
            bill.usd / 1e6,
            (bill.usd + bill.gpus * gpu.usd) / 1e6,
            bill.usd / bill.gpus,
            bill.w / 1e3,
            (bill.w + bill.gpus * gpu.w) / 1e3,
        )
        rows.append((design.name, *(_figure(x if bill.is_priced else None) for x in figures)))
    return rows


def worth_rows(designs: Sequence[Design], gpu: Gpu, unit: str) -> Rows:
    """Return performance in `unit`, and that per $M and per kW; the head first."""
    rows: Rows = [
        (
            "design",
            unit,
            f"{unit} per network $M",
            f"{unit} per $M with GPUs",
            f"{unit} per network kW",
            f"{unit} per kW with GPUs",
        )
    ]
    for design in designs:
        worth = zip(worth_of(design, gpu), (1.0, 1e6, 1e6, 1e3, 1e3), strict=True)
        figures = (None if each is None else each * scale for each, scale in worth)
        rows.append((design.name, *map(_figure, figures)))
    return rows


def relative_rows(designs: Sequence[Design], gpu: Gpu, baseline: str) -> Rows:
    """Return all that `worth_rows` tells as multiples of one design's; the head first.

    Raises `UsageError` where no design has this name.
    """
    known = {design.name: worth_of(design, gpu) for design in designs}
    if baseline not in known:
        raise UsageError(f"no design {baseline!r} to compare with; there are {', '.join(known)}")
    head = ("performance", "per network $", "per $ with GPUs", "per network W", "per W with GPUs")
    rows: Rows = [(f"x {baseline}", *head)]
    for name, worth in known.items():
        ratios = relative(worth, known[baseline])
        rows.append((name, *(ABSENT if x is None else f"{x:.2f}" for x in ratios)))
    return rows


def tell_bill(bill: Bill) -> list[str]:
    """Return the lines of a bill, aligned: title, head, items, the sum, and the sum per GPU."""
    if not bill.is_priced:
        return [bill.title, *bill.notes]
    rows: Rows = [("item", "what for", "count", "$ each", "$", "W each", "W")]
    rows += [
        (
            TITLES[line.item],
            line.what,
            f"{line.count:,}",
            f"{line.each_usd:,.0f}",
            f"{line.usd:,.0f}",
            f"{line.each_w:,.2f}",
            f"{line.w:,.0f}",
        )
        for line in bill.lines
    ]
    rows += [
        ("all", "", "", "", f"{bill.usd:,.0f}", "", f"{bill.w:,.0f}"),
        ("per GPU", "", "", "", f"{bill.usd / bill.gpus:,.0f}", "", f"{bill.w / bill.gpus:,.1f}"),
    ]
    return [bill.title, *aligned(rows, texts=2), *bill.notes]


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return rows as lines; the first `texts` columns to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(wide) if k < texts else cell.rjust(wide)
            for k, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _figure(value: float | None) -> str:
    """Write a figure with four digits, or all those before the point."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
