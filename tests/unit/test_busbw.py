"""Bus bandwidth and sizes against the tool's own figures."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.model.busbw import (
    DTYPE_BYTES,
    Counts,
    algbw_gb_per_s,
    busbw_gb_per_s,
    counts,
    factor,
    max_of_ranks_ns,
    mean_of_ranks_ns,
    smallest_bytes,
)
from harness.model.nccl import refused_names
from harness.model.scenario import Dtype, Op

LOGS = Path(__file__).parents[1] / "data" / "nccl-tests"
RANKS = 8
OPS: dict[Op, str] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
}
ROUNDED_FROM = 16 * RANKS
"""The version that wrote the logs did not round blocks to 16 bytes; from here on it is the same."""


def rows(op: Op) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (size, count, the eight figures from the right-hand end) of each row of a log."""
    for line in (LOGS / f"nccl_{OPS[op]}.log").read_text().splitlines():
        words = line.split()
        if len(words) >= 11 and words[0].isdigit():
            yield int(words[0]), int(words[1]), words[-8:]


def within_print(printed: str, low: float, high: float) -> bool:
    """Whether a printed figure can stand for a value in low..high."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return low - half <= float(printed) <= high + half


@pytest.mark.parametrize("op", OPS)
def test_every_row_has_the_tools_own_bandwidths(op: Op) -> None:
    found = list(rows(op))
    assert len(found) == 34
    for size, _, figures in found:
        for time, algbw, busbw in (figures[0:3], figures[4:7]):
            half_us = 0.5 * 10.0 ** -len(time.partition(".")[2])
            slow_ns, fast_ns = (1000 * (float(time) + sign * half_us) for sign in (1, -1))
            ends = algbw_gb_per_s(size, slow_ns), algbw_gb_per_s(size, fast_ns)
            assert within_print(algbw, *ends), (size, time)
            ends = tuple(busbw_gb_per_s(op, size, RANKS, ns) for ns in (slow_ns, fast_ns))
            assert within_print(busbw, *ends), (size, time)


@pytest.mark.parametrize("op", OPS)
def test_size_and_count_columns_are_the_tools(op: Op) -> None:
    checked = 0
    for size, count, _ in rows(op):
        if size >= ROUNDED_FROM:
            row = counts(op, size, RANKS, "float32")
            assert (row.size_bytes, row.count) == (size, count)
            checked += 1
    assert checked == 27


def test_blocks_are_rounded_down_to_sixteen_bytes_of_each_rank() -> None:
    assert counts("all_gather", 1000, 3, "float32") == Counts(960, 80, 80, 240)
    assert counts("reduce_scatter", 1000, 3, "float16") == Counts(960, 160, 480, 160)
    assert counts("all_to_all", 1000, 3, "int32") == Counts(960, 80, 240, 240)
    assert counts("all_reduce", 1002, 3, "float32") == Counts(1000, 250, 250, 250)
    assert counts("all_gather", 47, 3, "float32") == Counts(0, 0, 0, 0)
    assert counts("broadcast", 3, 3, "float32") == Counts(0, 0, 0, 0)


@given(
    op=st.sampled_from([*OPS, "send_recv"]),
    size=st.integers(0, 2**40),
    ranks=st.integers(1, 4096),
    dtype=st.sampled_from(list(DTYPE_BYTES)),
)
def test_a_row_never_exceeds_what_was_asked(op: Op, size: int, ranks: int, dtype: Dtype) -> None:
    row = counts(op, size, ranks, dtype)
    assert 0 <= size - row.size_bytes < max(16 * ranks, DTYPE_BYTES[dtype])
    assert row.size_bytes == max(row.sent, row.received) * DTYPE_BYTES[dtype]


@given(st.sampled_from(get_args(Op)), st.integers(2, 600), st.sampled_from(get_args(Dtype)))
def test_the_smallest_size_is_the_first_of_which_something_is_left(
    op: Op, ranks: int, dtype: Dtype
) -> None:
    least = smallest_bytes(op, ranks, dtype)
    assert counts(op, least, ranks, dtype).size_bytes == least
    assert counts(op, least - 1, ranks, dtype) == Counts(0, 0, 0, 0)


def test_factors() -> None:
    found = {op: factor(op, 4) for op in (*OPS, "send_recv")}
    assert found == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1.0,
        "send_recv": 1.0,
    }


def test_a_slow_rank_is_diluted_in_the_mean_and_kept_in_the_maximum() -> None:
    times = [[10, 10, 10], [10, 40, 10]]
    assert mean_of_ranks_ns(times) == 15
    assert max_of_ranks_ns(times) == [10, 40, 10]


def test_only_listed_nccl_variables_are_allowed() -> None:
    asked = {"NCCL_IB_TIMEOUT": "22", "NCCL_TYPO": "1", "LD_PRELOAD": "x"}
    assert refused_names(asked) == ["LD_PRELOAD", "NCCL_TYPO"]
