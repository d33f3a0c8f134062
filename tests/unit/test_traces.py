"""Request traces: what they say is replayed, what is wrong with them is named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BadFile
from harness.model.load import LINE_BYTES_MAX, requests_of
from harness.model.replay import Replay, Turn
from harness.model.traces import PROBLEMS_MAX, read_trace
from harness.model.workload import Columns, TraceWorkload

DATA = Path(__file__).parents[1] / "data/traces"
MOONCAKE = TraceWorkload(
    question="?", format="mooncake", path=str(DATA / "mooncake_synthetic_head.jsonl")
)
AZURE = TraceWorkload(question="?", format="azure", path=str(DATA / "azure_code_head.csv"))
COLUMNS = Columns(prompt_tokens="in", response_tokens="out", arrival="at")
CSV = TraceWorkload(question="?", format="csv", path="t.csv", columns=COLUMNS)
JSONL = msgspec.structs.replace(CSV, format="jsonl", path="t.jsonl")


def read(text: str | bytes, workload: TraceWorkload = CSV, **columns: Any) -> Replay:
    data = text.encode() if isinstance(text, str) else text
    changed = msgspec.structs.replace(workload.columns, **columns)
    lines = data.splitlines(keepends=True)
    return read_trace(lines, msgspec.structs.replace(workload, columns=changed))


def refused(text: str | bytes, workload: TraceWorkload = CSV, **columns: Any) -> list[str]:
    with pytest.raises(BadFile) as caught:
        read(text, workload, **columns)
    assert caught.value.path == workload.path
    return caught.value.problems


def skipping(workload: TraceWorkload) -> TraceWorkload:
    return msgspec.structs.replace(workload, on_bad_row="skip")


# -- public traces ---------------------------------------------------------------------------------


def test_mooncake_rows_have_their_times_lengths_and_prefix_blocks() -> None:
    replay = requests_of(MOONCAKE)
    assert len(replay.requests) == 12
    assert replay.block_tokens == 512
    first, third = replay.requests[0], replay.requests[2]
    assert first.turns == (Turn(40_160, 6),)
    assert first.blocks == tuple(range(79))
    assert (third.arrival_ns, third.prompt_tokens, third.response_tokens) == (40_000_000, 23_769, 3)
    assert replay.digest == requests_of(MOONCAKE).digest


def test_azure_rows_have_seven_digits_crlf_and_no_last_line_end() -> None:
    data = Path(AZURE.path).read_bytes()
    assert data.count(b"\r\n") == 24
    assert not data.endswith(b"\n")
    replay = requests_of(AZURE)
    assert len(replay.requests) == 24
    assert replay.requests[0].turns == (Turn(4808, 10),)
    assert [request.arrival_ns for request in replay.requests[:2]] == [0, 52_000_000]
    last = replay.requests[-1]  # 18:17:35.4346470 against 18:17:03.9799600, the first
    assert (last.arrival_ns, last.turns) == (31_454_687_000, (Turn(159, 127),))


def test_only_as_many_requests_are_read_as_wanted() -> None:
    def lines() -> Iterator[bytes]:
        yield from (b"in,out,at\n", b"1,2,3\n", b"4,5,6\n")
        pytest.fail("read on")

    replay = read_trace(lines(), msgspec.structs.replace(CSV, requests_max=2))
    assert [request.turns[0] for request in replay.requests] == [Turn(1, 2), Turn(4, 5)]


# -- columns named in the workload file ------------------------------------------------------------


def test_csv_and_json_lines_with_the_same_rows_are_the_same_requests() -> None:
    by_csv = read('at,out,"note, long",in\n1.5,7,x,100\n\n0.25,9.0,"a, b",200\n')
    by_json = read('{"at": 1.5, "in": 100, "out": 7}\n{"at": 0.25, "in": 200.0, "out": 9}\n', JSONL)
    assert by_csv == by_json
    assert [(r.arrival_ns, r.turns[0]) for r in by_csv.requests] == [
        (0, Turn(200, 9)),
        (1_250_000_000, Turn(100, 7)),
    ]


def test_rows_of_an_rl_log_are_grouped_by_step_and_prompt() -> None:
    text = "step,uid,in,out\n1,b,10,5\n0,a,20,6\n0,c,30,7\n0,a,20,8\n1,b,10,9\n"
    replay = read(text, arrival="", step="step", prompt="uid")
    assert [(r.id, r.response_tokens) for r in replay.requests] == [
        ("0-0-0", 6),
        ("0-1-0", 7),
        ("0-0-1", 8),
        ("1-0-0", 5),
        ("1-0-1", 9),
    ]
    assert {request.arrival_ns for request in replay.requests} == {0}


@pytest.mark.parametrize(
    ("unit", "texts", "gap_ns"),
    [
        ("s", ("1700000000.000000001", "1700000000.000000004"), 3),
        ("ms", ("1", "2.5"), 1_500_000),
        ("us", ("1", "3"), 2_000),
        ("ns", ("1700000000000000001", "1700000000000000002"), 1),
        ("datetime", ("2024-02-28T23:59:59.9", "2024-03-01 00:00:00"), 86_400_100_000_000),
        ("datetime", ("2024-01-01 00:00:00Z", "2024-01-01 02:00:01+02:00"), 1_000_000_000),
        ("datetime", ("2024-01-01 00:00:00.000000001", "2024-01-01 00:00:00.000000002"), 1),
    ],
)
def test_times_are_exact_to_the_digits_given(
    unit: str, texts: tuple[str, str], gap_ns: int
) -> None:
    text = "in,out,at\n" + "".join(f"1,1,{moment}\n" for moment in texts)
    assert [r.arrival_ns for r in read(text, arrival_unit=unit).requests] == [0, gap_ns]


# -- bad rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1,x,3", "line 3, column 'out': expected a whole number from 1 to 10000000, found 'x'"),
        ("1,,3", "line 3, column 'out': expected a whole number from 1 to 10000000, found nothing"),
        ("0,2,3", "line 3, column 'in': expected a whole number from 1"),
        ("-1,2,3", "line 3, column 'in': expected a whole number from 1"),
        ("1.5,2,3", "line 3, column 'in': expected a whole number"),
        ("1_0,2,3", "line 3, column 'in': expected a whole number"),
        ("\u0661,2,3", "line 3, column 'in': expected a whole number"),
        ("99999999999999999999999999,2,3", "line 3, column 'in': expected a whole number"),
        ("1,2,soon", "line 3, column 'at': expected a time in s, 0 or more, found 'soon'"),
        ("1,2,-3", "line 3, column 'at': expected a time in s, 0 or more, found '-3'"),
        ("1,2,nan", "line 3, column 'at': expected a time in s"),
        ("1,2,99999999999", "line 3, column 'at': expected a time in s"),
        ("1,2", "line 3: expected 3 fields, found 2"),
        ("1,2,3,4", "line 3: expected 3 fields, found 4"),
        ('1,"2,3', "line 3: not CSV: "),
    ],
)
def test_a_bad_row_is_named_by_line_and_column(row: str, said: str) -> None:
    text = f"in,out,at\n10,20,30\n{row}\n40,50,60\n"
    problems = refused(text)
    assert problems[0].startswith(said)
    assert problems[1:] == ['on_bad_row = "skip" leaves bad rows out']
    replay = read(text, skipping(CSV))
    assert [request.prompt_tokens for request in replay.requests] == [10, 40]
    assert replay.skipped == 1
    assert replay.problems[0].startswith(said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: not JSON: "),
        ("[" * 5000, "line 2: not JSON: "),
        ("[1, 2]", "line 2: expected a JSON object in braces"),
        ('{"in": 1, "at": 0}', "line 2, column 'out': expected a whole number"),
        ('{"in": true, "out": 1, "at": 0}', "line 2, column 'in': expected a whole number"),
        ('{"in": 1, "out": [], "at": 0}', "line 2, column 'out': expected a whole number"),
        ('{"in": 1, "out": 1, "at": 1e300}', "line 2, column 'at': expected a time in s"),
        ('{"in": 1, "out": 1, "at": -1}', "line 2, column 'at': expected a time in s"),
        ('{"in": 1025, "out": 1, "at": 1}', "'ids': expected a list of whole numbers, 0 or more"),
        ('{"in": 1025, "out": 1, "at": 1, "ids": [1, true]}', "'ids': expected a list of whole n"),
        (
            '{"in": 1025, "out": 1, "at": 1, "ids": [1, 2]}',
            "'ids': expected 3 blocks of 512 tokens for a prompt of 1025, found 2",
        ),
    ],
)
def test_a_bad_line_of_json_is_named(row: str, said: str) -> None:
    good = '{"in": 512, "out": 1, "at": 0, "ids": [4]}\n'
    problems = refused(good + row, JSONL, blocks="ids", block_tokens=512)
    assert said in problems[0]
    replay = read(good + row + "\n" + good, skipping(JSONL), blocks="ids", block_tokens=512)
    assert (len(replay.requests), replay.skipped) == (2, 1)


@pytest.mark.parametrize(
    "at", ["2023-11-31 00:00:00", "2023-11-16", "1969-12-31 23:59:59", "0", ""]
)
def test_a_moment_that_is_none_is_named(at: str) -> None:
    problems = refused(f"in,out,at\n1,1,{at}\n", arrival_unit="datetime")
    assert problems[0].startswith("line 2, column 'at': expected a moment ")


def test_text_that_is_not_utf8_is_a_bad_row() -> None:
    assert refused(b"in,out,at\n1,\xff,3\n")[0] == "line 2: not UTF-8 text"
    assert refused(b'{"in": "\xff"}\n', JSONL)[0].startswith("line 1: not JSON")
    assert len(read(b"\xef\xbb\xbfin,out,at\n1,2,3\n").requests) == 1  # a byte order mark is none


def test_many_bad_rows_do_not_flood_the_message() -> None:
    text = "in,out,at\n1,1,1\n" + "0,0,0\n" * 100
    problems = refused(text)
    assert len(problems) == PROBLEMS_MAX + 2
    assert problems[-2] == f"more bad rows from line {3 + PROBLEMS_MAX} on"
    replay = read(text, skipping(CSV))
    assert (replay.skipped, len(replay.problems)) == (100, PROBLEMS_MAX)


@pytest.mark.parametrize("text", ["", "\n\n", "in,out,at\n", "in,out,at\n0,0,0\n"])
@pytest.mark.parametrize("workload", [CSV, skipping(CSV)], ids=["refuse", "skip"])
def test_a_trace_without_a_good_row_is_refused(text: str, workload: TraceWorkload) -> None:
    problems = refused(text, workload)
    assert problems[0] == "no request in it" or problems[0].startswith("line 2, column 'in'")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("in,outt,at", "line 1: no column 'out'; did you mean 'outt'?"),
        ("in,out", "line 1: no column 'at'"),
        ("in,out,at,in", "line 1: 2 columns are called 'in'"),
        ('in,"out,at', "line 1: not CSV: "),
    ],
)
def test_a_header_without_the_columns_is_refused_even_where_rows_are_skipped(
    header: str, said: str
) -> None:
    assert refused(f"{header}\n1,2,3\n", skipping(CSV))[0].startswith(said)


# -- files -----------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "endless").write_bytes(b"x" * (LINE_BYTES_MAX + 1))
    for name, said in (
        ("none", "no such file"),
        (".", "not a file of rows"),
        ("endless", f"line 1: longer than {LINE_BYTES_MAX} bytes: is this the right file?"),
    ):
        with pytest.raises(BadFile) as caught:
            requests_of(msgspec.structs.replace(CSV, path=str(tmp_path / name)))
        assert caught.value.problems == [said]


LINES = Path(AZURE.path).read_bytes()[:400]
JSON_LINES = b'{"in": 600, "out": 1, "at": 0, "ids": [4, 5]}\n' * 4
EDITS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 9), st.binary(max_size=5)), max_size=5
)


@settings(max_examples=150, deadline=None)
@given(edits=EDITS, skip=st.booleans(), json=st.booleans())
def test_no_edit_of_a_trace_gives_a_traceback(edits: Any, skip: bool, json: bool) -> None:
    data, workload = (JSON_LINES, JSONL) if json else (LINES, AZURE)
    for place, cut, scrap in edits:
        data = data[:place] + scrap + data[place + cut :]
    columns: Any = {"blocks": "ids", "block_tokens": 512} if json else {}
    with contextlib.suppress(BadFile):
        replay = read(data, skipping(workload) if skip else workload, **columns)
        assert all(0 <= request.arrival_ns <= 2**62 for request in replay.requests)
        assert all(request.response_tokens >= 1 for request in replay.requests)
