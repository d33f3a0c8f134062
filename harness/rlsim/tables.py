"""Measured collectives: what nccl-tests printed, as a table of times over sizes.

Between sizes times are interpolated on logarithms, and never fall as the size grows: measurements
that do are pooled with their neighbours (isotonic regression). Beyond its sizes a table says
nothing. Sizes in bytes as nccl-tests counts them, times in us.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from harness.errors import BadFile
from harness.model.scenario import Op


class Key(NamedTuple):
    """What a table was measured on: kind of GPU, operation, ranks, nodes."""

    gpu: str
    op: Op
    ranks: int
    nodes: int = 1


@dataclass(frozen=True)
class Table:
    """Times over sizes, both rising; `source` is what a reader looks up."""

    key: Key
    sizes_bytes: tuple[int, ...]
    times_us: tuple[float, ...]
    source: str

    def time_us(self, size_bytes: float) -> float | None:
        """Return the time of a size between the smallest and the largest, None beyond.

        >>> Table(Key("A100", "all_reduce", 8), (1000, 4000), (10.0, 20.0), "").time_us(4000)
        20.0
        """
        sizes, times = self.sizes_bytes, self.times_us
        if not sizes[0] <= size_bytes <= sizes[-1]:
            return None
        i = bisect_left(sizes, size_bytes)
        if sizes[i] == size_bytes:
            return times[i]
        share = log(size_bytes / sizes[i - 1]) / log(sizes[i] / sizes[i - 1])
        return times[i - 1] * float((times[i] / times[i - 1]) ** share)


def table_of(key: Key, measured: Iterable[tuple[int, float]], source: str) -> Table:
    """Return the table of (size, us), in any order, sizes as often as they were measured.

    Raises `ValueError` where nothing above 0 was.
    """
    by_size: dict[int, list[float]] = {}
    for size_bytes, us in measured:
        if size_bytes > 0 and us > 0:
            by_size.setdefault(size_bytes, []).append(us)
    if not by_size:
        raise ValueError(f"no time of any {key.op} was measured")
    sizes = sorted(by_size)
    means = _rising([log(fmean(by_size[size])) for size in sizes])
    return Table(key, tuple(sizes), tuple(map(exp, means)), source)


def _rising(values: list[float]) -> list[float]:
    """Return the rising values that are nearest to these, by least squares."""
    from scipy.optimize import isotonic_regression  # noqa: PLC0415 - only who has tables pays for it

    found: list[float] = isotonic_regression(values).x.tolist()
    return found


# -- nccl-tests ------------------------------------------------------------------------------------

_RANK = re.compile(r"#\s+Rank\s+\d+ .*?\bon\s+(\S+)\s+device\s+\d+ \[\S+\] (.+)")
_FIGURES = 8
"""Fields from the right-hand end: time, algbw, busbw and errors, out of place and in place."""


class Log(NamedTuple):
    """What a run of nccl-tests printed: its ranks and where they were, and (size, us) by row."""

    gpu: str
    ranks: int
    nodes: int
    out_of_place: tuple[tuple[int, float], ...]
    in_place: tuple[tuple[int, float], ...]


def parse_log(text: str, path: str = "log") -> Log:
    """Return what a log says, older and newer formats alike.

    What else is printed between the rows is passed over, as are rows of size 0: no element was
    left for each rank. Raises `BadFile` where there are no ranks or no rows.
    """
    hosts: list[str] = []
    gpus: list[str] = []
    out: list[tuple[int, float]] = []
    inside: list[tuple[int, float]] = []
    for line in text.splitlines():
        if found := _RANK.match(line):
            hosts.append(found[1])
            gpus.append(found[2].strip())
            continue
        words = line.split()
        if len(words) >= _FIGURES + 3 and words[0].isdigit() and words[1].isdigit():
            size_bytes = int(words[0])
            for rows, word in ((out, words[-_FIGURES]), (inside, words[-_FIGURES // 2])):
                if size_bytes and (us := _number(word)):
                    rows.append((size_bytes, us))
    problems = [] if hosts else ["no line '#  Rank  0 ... on HOST device 0 [..] GPU'"]
    if not out:
        problems.append("no rows of nccl-tests: size, count, type, ..., time, algbw, busbw, error")
    if len(set(gpus)) > 1:
        problems.append(f"GPUs of several kinds: {', '.join(sorted(set(gpus)))}")
    if problems:
        raise BadFile(path, problems)
    return Log(gpus[0], len(hosts), len(set(hosts)), tuple(out), tuple(inside))


def _number(word: str) -> float:
    """Return a time; 0.0 for what is none, such as N/A."""
    try:
        return float(word)
    except ValueError:
        return 0.0


def read_logs(paths: Mapping[Op, Path]) -> tuple[Table, ...]:
    """Return the tables of logs of nccl-tests, one operation each; times are those out of place."""
    tables = []
    for op, path in paths.items():
        found = parse_log(path.read_text(), str(path))
        key = Key(found.gpu, op, found.ranks, found.nodes)
        tables.append(table_of(key, found.out_of_place, str(path)))
    return tuple(tables)
