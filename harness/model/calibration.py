"""Step times as they were measured, made into a table of a latency profile. Pure.

A table is a full grid, batch by context, so of the points asked for the largest grid that an
instance has room for is measured, and the rest is left out with its reason. A point is the median
of its steps. Times of a profile never fall as the load grows; medians that do are noise, and are
averaged with their neighbours until they do not (isotonic, least squares: `rising`). Both a wide
spread and a large correction are told.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import msgspec

from harness.errors import UsageError
from harness.model.layout import Layout
from harness.model.profile import Profile, Source, Table

STEPS_MIN = 3
"""Fewer have no median that one odd step could not be."""
SPREAD_MAX_PCT = 25.0
"""Between the quartiles, of the median: beyond, a point is told as unsteady."""
CORRECTED_MAX_PCT = 5.0
"""Of a median, by `rising`: beyond, it is told."""
ROUNDS_MAX = 100
DECIMALS = 1
"""Of a microsecond; finer is below what any clock here can tell."""


@dataclass(frozen=True)
class Grid:
    """The points of a table; each axis rises."""

    batch: tuple[int, ...]
    context_tokens: tuple[int, ...]
    prefill_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """What one instance takes."""

    sequences_max: int
    step_max_tokens: int
    length_max_tokens: int
    blocks: int
    block_tokens: int


@dataclass(frozen=True)
class Point:
    """A load's step time: median, and distance of the quartiles as a share of it."""

    us: float
    spread_pct: float


def fitting(grid: Grid, room: Room, steps: int) -> tuple[Grid, list[str]]:
    """Return the largest part of the grid that fits, and why the rest is left out.

    Decoded sequences grow by up to `steps` tokens, and a block before all of them decode.
    Raises `UsageError` where nothing fits.
    """
    points = list(product(grid.batch, grid.context_tokens))
    refused = {point: _no_room(*point, room, steps) for point in points}
    corners = [
        (batch, context)
        for batch, context in points
        if not any(refused[b, c] for b, c in points if b <= batch and c <= context)
    ]
    prompts = {tokens: _no_prompt(tokens, room) for tokens in grid.prefill_tokens}
    prefill = tuple(tokens for tokens, reason in prompts.items() if not reason)
    if not corners or not prefill:
        reasons = [reason for reason in [*refused.values(), *prompts.values()] if reason]
        raise UsageError(f"no point fits: {reasons[0]}")
    batch_max, context_max = max(corners, key=lambda corner: (_size(grid, *corner), corner))
    kept = Grid(
        tuple(batch for batch in grid.batch if batch <= batch_max),
        tuple(tokens for tokens in grid.context_tokens if tokens <= context_max),
        prefill,
    )
    left = [reason for reason in (*refused.values(), *prompts.values()) if reason]
    left += [
        f"batch {batch} at {context} tokens: a table is a full grid, and its row or column has "
        "points that do not fit"
        for batch, context in points
        if not refused[batch, context] and (batch > batch_max or context > context_max)
    ]
    return kept, list(dict.fromkeys(left))


def _size(grid: Grid, batch_max: int, context_max: int) -> int:
    rows = sum(batch <= batch_max for batch in grid.batch)
    return rows * sum(context <= context_max for context in grid.context_tokens)


def _no_room(batch: int, context: int, room: Room, steps: int) -> str:
    """Return why so many sequences of such a context cannot decode; "": they can."""
    length = context + steps + room.block_tokens
    if batch > room.sequences_max:
        return f"batch {batch}: an instance runs {room.sequences_max} sequences at most"
    if length > room.length_max_tokens:
        return f"context {context}, {steps} steps: a sequence has {room.length_max_tokens} at most"
    needed = batch * -(-length // room.block_tokens)
    if needed > room.blocks:
        return (
            f"batch {batch} at {context} tokens: needs {needed} KV blocks of {room.block_tokens} "
            f"tokens, the instance has {room.blocks}"
        )
    return ""


def _no_prompt(tokens: int, room: Room) -> str:
    """Return why such a prompt cannot be prefilled in one step; "": it can."""
    if tokens > room.step_max_tokens:
        return f"prefill {tokens}: a step computes {room.step_max_tokens} tokens at most"
    if tokens + 1 > min(room.length_max_tokens, room.blocks * room.block_tokens):
        return f"prefill {tokens}: a sequence has {room.length_max_tokens} tokens at most"
    return ""


def point_of(times_ns: Sequence[int]) -> Point:
    """Return what the times of one load's steps say."""
    median_ns = statistics.median(times_ns)
    low_ns, _, high_ns = statistics.quantiles(times_ns, n=4, method="inclusive")
    return Point(median_ns / 1000, 100 * (high_ns - low_ns) / max(1, median_ns))


def table_of(
    layout: Layout,
    grid: Grid,
    decode: Mapping[tuple[int, int], Point],
    prefill: Mapping[int, Point],
    source: str,
) -> tuple[Table, list[str]]:
    """Return the table of one layout, and what a reader must know of its points.

    `decode` by (batch, context), `prefill` by tokens.
    """
    found = [[decode[b, c].us for c in grid.context_tokens] for b in grid.batch]
    prompts = [prefill[tokens].us for tokens in grid.prefill_tokens]
    steps, alone = rising(found), rising([prompts])[0]
    names = [f"batch {b} at {c} tokens" for b in grid.batch for c in grid.context_tokens]
    names += [f"prefill {tokens}" for tokens in grid.prefill_tokens]
    points = [*(decode[point] for point in product(grid.batch, grid.context_tokens))]
    points += [prefill[tokens] for tokens in grid.prefill_tokens]
    written = [us for row in [*steps, alone] for us in row]
    table = Table(
        batch=grid.batch,
        context_tokens=grid.context_tokens,
        step_us=tuple(tuple(row) for row in steps),
        prefill_tokens=grid.prefill_tokens,
        prefill_us=tuple(alone),
        source=source,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        dp=layout.dp,
    )
    return table, list(_doubts(names, points, written))


def _doubts(
    names: Iterable[str], points: Iterable[Point], written: Iterable[float]
) -> Iterator[str]:
    for name, point, us in zip(names, points, written, strict=True):
        if point.spread_pct > SPREAD_MAX_PCT:
            yield f"{name}: unsteady, its quartiles lie {point.spread_pct:.0f} % apart"
        moved_pct = 100 * (us - point.us) / point.us
        if abs(moved_pct) > CORRECTED_MAX_PCT:
            yield (
                f"{name}: measured {point.us:.1f} us, written {us:.1f} ({moved_pct:+.0f} %), "
                "so that no time falls as the load grows"
            )


def rising(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the rows so that none falls along a row or a column, rounded.

    Neighbours that are out of order are replaced by their mean, along rows and columns in turn;
    what then still falls, by less than is written, is lifted.
    """
    grid = [list(row) for row in rows]
    for _ in range(ROUNDS_MAX):
        before = grid
        grid = _turned([_pooled(column) for column in _turned([_pooled(row) for row in grid])])
        if grid == before:
            break
    grid = [list(accumulate((round(us, DECIMALS) for us in row), max)) for row in grid]
    return _turned([list(accumulate(column, max)) for column in _turned(grid)])


def _turned(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _pooled(values: Sequence[float]) -> list[float]:
    """Return the closest values that never fall: adjacent violators are pooled."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            more, members = pools.pop()
            total, count = total + more, count + members
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def with_tables(known: Profile, tables: Sequence[Table], source: Source) -> Profile:
    """Return `known` with these tables, whose source gets a name of its own.

    Tables that it had of the same layouts are replaced.
    """
    name = next(
        name
        for number in range(1, len(known.sources) + 2)
        if (name := "measured" if number == 1 else f"measured-{number}") not in known.sources
    )
    measured = [msgspec.structs.replace(table, source=name) for table in tables]
    layouts = {_degrees(table) for table in measured}
    kept = [table for table in known.tables if _degrees(table) not in layouts]
    return msgspec.structs.replace(
        known, sources={**known.sources, name: source}, tables=(*measured, *kept)
    )


def _degrees(table: Table) -> tuple[int, ...]:
    return (table.tp, table.pp, table.ep, table.dp)


def comparison(tables: Sequence[Table]) -> list[str]:
    """Return the tables of one calibration side by side, at the largest context that all have."""
    context = max(set.intersection(*(set(table.context_tokens) for table in tables)))
    batches = sorted({batch for table in tables for batch in table.batch})
    prompts = sorted({tokens for table in tables for tokens in table.prefill_tokens})
    heads = [*(f"batch {n}" for n in batches), *(f"prompt {n}" for n in prompts), "tokens/s"]
    told = f"batches that decode at {context} tokens of context, prompts that are prefilled"
    lines = [f"one step, ms: {told}; tokens/s: at the largest batch", _line("layout", heads)]
    for table in tables:
        column = table.context_tokens.index(context)
        decode = {n: row[column] for n, row in zip(table.batch, table.step_us, strict=True)}
        prefill = dict(zip(table.prefill_tokens, table.prefill_us, strict=True))
        times = [*(decode.get(n) for n in batches), *(prefill.get(n) for n in prompts)]
        cells = ["-" if us is None else f"{us / 1000:.3f}" for us in times]
        rate = table.batch[-1] / decode[table.batch[-1]] * 1e6
        name = str(Layout(1, table.tp, table.pp, table.ep, table.dp))
        lines.append(_line(name, [*cells, f"{rate:.0f}"]))
    return lines


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<12}" + "".join(f"{cell:>13}" for cell in cells)
