"""Bus bandwidth, exactly as nccl-tests defines it. Pure.

Source of the sizes and factors: nccl-tests 2.19 (``src/*.cu``: `GetCollByteCount`, `GetBw`). For
`n` ranks, `S` bytes in the *size* column and `t` seconds: algbw = S / t, busbw = algbw x factor,
in GB/s of 10^9 bytes. The factor makes the figure comparable with the rate of one link whatever
the number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.model.scenario import Dtype, Op

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}

BLOCK_BYTES = 16
"""Per-rank blocks are rounded down to this, so that each begins aligned."""

_SPLIT: frozenset[Op] = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Operations whose size counts all ranks' blocks; the others count one rank's buffer."""


@dataclass(frozen=True)
class Counts:
    """One row: its *size* and *count* columns, and the elements that each rank sends and gets."""

    size_bytes: int
    count: int
    sent: int
    received: int


def counts(op: Op, asked_bytes: int, ranks: int, dtype: Dtype) -> Counts:
    """Return the row that nccl-tests makes of `asked_bytes`; all zero below one block per rank.

    >>> counts("all_gather", 1000, 3, "float32")
    Counts(size_bytes=960, count=80, sent=80, received=240)
    """
    width = DTYPE_BYTES[dtype]
    elements = asked_bytes // width
    if op not in _SPLIT:
        return Counts(elements * width, elements, elements, elements)
    unit = BLOCK_BYTES // width
    block = elements // ranks // unit * unit
    whole = block * ranks
    return Counts(
        size_bytes=whole * width,
        count=block,
        sent=block if op == "all_gather" else whole,
        received=block if op == "reduce_scatter" else whole,
    )


def smallest_bytes(op: Op, ranks: int, dtype: Dtype) -> int:
    """Return the smallest size of which something is left for each rank."""
    return BLOCK_BYTES * ranks if op in _SPLIT else DTYPE_BYTES[dtype]


def factor(op: Op, ranks: int) -> float:
    """Return busbw / algbw: 2(n-1)/n, (n-1)/n or 1."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _SPLIT else 1.0


def algbw_gb_per_s(size_bytes: int, time_ns: float) -> float:
    """Return S / t in GB/s; bytes per nanosecond are GB/s."""
    return size_bytes / time_ns


def busbw_gb_per_s(op: Op, size_bytes: int, ranks: int, time_ns: float) -> float:
    """Return the bus bandwidth in GB/s of a row's *size* column over `time_ns`."""
    return algbw_gb_per_s(size_bytes, time_ns) * factor(op, ranks)


def mean_of_ranks_ns(times_ns: Sequence[Sequence[int]]) -> float:
    """Return what nccl-tests reports (``-a 1``): each rank's mean, averaged over ranks.

    `times_ns` has shape (ranks, iterations); ns. A slow rank is diluted.
    """
    return statistics.fmean(statistics.fmean(rank) for rank in times_ns)


def max_of_ranks_ns(times_ns: Sequence[Sequence[int]]) -> list[int]:
    """Return per iteration the slowest rank's time, ns: what a training step feels.

    `times_ns` has shape (ranks, iterations), every rank with as many iterations.
    """
    return [max(column) for column in zip(*times_ns, strict=True)]
