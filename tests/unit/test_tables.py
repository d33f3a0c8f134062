"""Logs of nccl-tests and their traps; tables that are interpolated and never fall."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile
from harness.rlsim.tables import Key, Table, parse_log, read_logs, table_of

LOGS = Path(__file__).parents[1] / "data" / "nccl-tests"
KEY = Key("A100", "all_reduce", 8)
NAMES = ("allgather", "allreduce", "alltoall", "broadcast", "reduce", "reducescatter")


@pytest.mark.parametrize("name", NAMES)
def test_every_log_is_read_whatever_its_columns(name: str) -> None:
    found = parse_log((LOGS / f"nccl_{name}.log").read_text())
    assert (found.gpu, found.ranks, found.nodes) == ("A100-SXM4-40GB", 8, 1)
    # 34 rows, of which those of size 0 say nothing: 5 where the size is split over ranks, else 2
    split = name in ("allgather", "alltoall", "reducescatter")
    assert len(found.out_of_place) == len(found.in_place) == (29 if split else 32)
    assert found.out_of_place[-1][0] == 8 << 30
    assert found.out_of_place != found.in_place


def test_times_are_those_of_their_columns() -> None:
    rows = dict(parse_log((LOGS / "nccl_allgather.log").read_text()).out_of_place)
    assert rows[32] == 35.03
    assert rows[4194304] == 100.7
    assert dict(parse_log((LOGS / "nccl_allgather.log").read_text()).in_place)[4194304] == 99.56


def test_newer_logs_of_several_hosts_are_read() -> None:
    text = """
# nThread 1 nGpus 1 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
#  Rank  0 Group  0 Pid  71 on  alpha device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  72 on   beta device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop  root  time  algbw  busbw #wrong  time
           8             2   float   sum    -1  14.21   0.00   0.00      0   14.05  0.00  0.00  0
          16             4   float   sum    -1  15.00   0.00   0.00      0     N/A  0.00  0.00 N/A
# Out of bounds values : 0 OK
"""
    found = parse_log(text)
    assert (found.gpu, found.ranks, found.nodes) == ("NVIDIA H100 80GB HBM3", 2, 2)
    assert found.out_of_place == ((8, 14.21), (16, 15.0))
    assert found.in_place == ((8, 14.05),)


def test_what_is_no_log_is_refused_with_all_that_is_missing() -> None:
    with pytest.raises(BadFile) as refused:
        parse_log("hello", "x.log")
    assert len(refused.value.problems) == 2
    assert "x.log: no line '#  Rank" in str(refused.value)
    with pytest.raises(ValueError, match="all_reduce"):
        table_of(KEY, [(0, 5.0)], "")


def test_sizes_between_are_read_off_on_logarithms() -> None:
    table = table_of(KEY, [(4000, 40.0), (1000, 10.0)], "")
    assert table.time_us(2000) == pytest.approx(20.0)
    assert table.time_us(1000) == pytest.approx(10.0)
    assert table.time_us(999) is None
    assert table.time_us(4001) is None


def test_a_measurement_that_stands_out_is_pooled_with_its_neighbours() -> None:
    table = table_of(KEY, [(1, 6.0), (2, 17.0), (4, 7.0), (8, 8.0), (16, 30.0), (16, 32.0)], "")
    assert table.times_us[0] == pytest.approx(6.0)
    assert table.times_us[1] == table.times_us[2] == table.times_us[3]
    assert 7 < table.times_us[1] < 17
    assert table.times_us[4] == pytest.approx(31.0)


@given(
    st.dictionaries(st.integers(1, 1 << 35), st.floats(0.1, 1e7), min_size=1),
    st.lists(st.floats(0, 1), min_size=2, max_size=9),
)
def test_no_larger_size_is_ever_faster(measured: dict[int, float], shares: list[float]) -> None:
    table = table_of(KEY, measured.items(), "")
    low, high = table.sizes_bytes[0], table.sizes_bytes[-1]
    asked = sorted(low + (high - low) * share for share in shares)
    times = [table.time_us(size) for size in asked]
    known = [us for us in times if us is not None]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(known))


def test_logs_become_tables() -> None:
    (one, two) = read_logs(
        {"all_reduce": LOGS / "nccl_allreduce.log", "broadcast": LOGS / "nccl_broadcast.log"}
    )
    assert isinstance(one, Table)
    assert one.key == Key("A100-SXM4-40GB", "all_reduce", 8, 1)
    assert one.time_us(8 << 20) == pytest.approx(162.0, abs=0.1)
    assert two.key.op == "broadcast"
