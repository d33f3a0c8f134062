"""Request traces in: lines of JSON or CSV to the requests that are replayed. Pure.

Lines come one at a time, so a trace is never held as text. A bad row is named by line and column:
it is refused, or, where the workload file says so, left out and counted. Lengths are in tokens;
arrivals become ns after the first request of their step, and requests are put in that order.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from harness.errors import BadFile
from harness.model.replay import Replay, ReplayRequest, Turn, replay_of
from harness.model.schema import did_you_mean
from harness.model.trace_values import BadField, arrival_ns, block_ids, whole_number
from harness.model.workload import Columns, TraceWorkload, columns_of
from harness.model.workload_rules import TOKENS_MAX, TURNS_MAX

PROBLEMS_MAX = 20
"""Bad rows that are named; when rows are refused, reading stops there."""
STEP_MAX = 1_000_000

_BOM = b"\xef\xbb\xbf"

Fields = Callable[[str], Any]
"""The value of a row's column; None where the row has none."""


class _BadRow(Exception):
    """What is wrong with a row, and in which column where it is in one."""


class _Header(NamedTuple):
    """The first line of a CSV file: how many fields a row has, and where each column is."""

    width: int
    places: dict[str, int]


class _Row(NamedTuple):
    """What a row says, before it has its place among the others."""

    step: int
    arrival_ns: int
    prompt: str | int | None
    turn: Turn
    blocks: tuple[int, ...]


def read_trace(lines: Iterable[bytes], workload: TraceWorkload) -> Replay:
    """Read the lines of a trace file. Raises `BadFile`, naming its path, on rows that it refuses.

    A trace without one good row is refused whatever `on_bad_row` says: it replays nothing.
    """
    columns = columns_of(workload)
    rows: list[_Row] = []
    problems: list[str] = []
    skipped = 0
    for number, row in _rows(lines, workload, columns):
        if isinstance(row, _Row):
            rows.append(row)
            if len(rows) == workload.requests_max:
                break
            if len(rows) > TURNS_MAX:
                raise BadFile(
                    workload.path,
                    [f"more than {TURNS_MAX} requests; set requests_max to read less"],
                )
            continue
        skipped += 1
        if len(problems) < PROBLEMS_MAX:
            problems.append(f"line {number}{row}")
        elif workload.on_bad_row == "refuse":
            problems.append(f"more bad rows from line {number} on")
            break
    if problems and workload.on_bad_row == "refuse":
        raise BadFile(workload.path, [*problems, 'on_bad_row = "skip" leaves bad rows out'])
    if not rows:
        raise BadFile(workload.path, ["no request in it", *problems])
    return replay_of(
        _placed(rows), block_tokens=columns.block_tokens, skipped=skipped, problems=problems
    )


def _rows(
    lines: Iterable[bytes], workload: TraceWorkload, columns: Columns
) -> Iterator[tuple[int, _Row | _BadRow]]:
    """Yield each row with its line number (the first is 1); empty lines are none."""
    header: _Header | None = None
    is_csv = workload.format in ("azure", "csv")
    for number, raw in enumerate(lines, 1):
        line = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
        if not line:
            continue
        try:
            if not is_csv:
                fields = _json_fields(line)
            elif header is None:
                header = _header(line, number, workload, columns)
                continue
            else:
                fields = _csv_fields(line, header)
            yield number, _row(fields, columns)
        except _BadRow as bad:
            yield number, bad


def _row(fields: Fields, columns: Columns) -> _Row:
    def value(column: str, parse: Callable[..., Any], *args: Any) -> Any:
        try:
            return parse(fields(column), *args)
        except BadField as error:
            raise _BadRow(f", column {column!r}: {error}") from error

    prompt = value(columns.prompt_tokens, whole_number, 1, TOKENS_MAX)
    return _Row(
        step=value(columns.step, whole_number, 0, STEP_MAX) if columns.step else 0,
        arrival_ns=value(columns.arrival, arrival_ns, columns.arrival_unit)
        if columns.arrival
        else 0,
        prompt=value(columns.prompt, _name) if columns.prompt else None,
        turn=Turn(prompt, value(columns.response_tokens, whole_number, 1, TOKENS_MAX)),
        blocks=value(columns.blocks, block_ids, prompt, columns.block_tokens)
        if columns.blocks
        else (),
    )


def _name(found: Any) -> str | int:
    if found == "" or isinstance(found, bool) or not isinstance(found, str | int):
        raise BadField("text or a whole number", found)
    return found


# -- lines -----------------------------------------------------------------------------------------


def _json_fields(line: bytes) -> Fields:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BadRow(f": not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _BadRow(": expected a JSON object in braces")
    return row.get


def _csv_fields(line: bytes, header: _Header) -> Fields:
    fields = _split(line)
    if len(fields) != header.width:
        raise _BadRow(f": expected {header.width} fields, found {len(fields)}")
    return lambda column: fields[header.places[column]]


def _header(line: bytes, number: int, workload: TraceWorkload, columns: Columns) -> _Header:
    """Find the columns; a header that lacks one makes all rows bad at once, so it is refused."""
    try:
        names = [name.strip() for name in _split(line)]
    except _BadRow as bad:
        raise BadFile(workload.path, [f"line {number}{bad}"]) from bad
    needed = (columns.prompt_tokens, columns.response_tokens, columns.arrival)
    problems = []
    for name in (*needed, columns.step, columns.prompt):
        if name and name not in names:
            problems.append(f"line {number}: no column {name!r}{did_you_mean(name, names)}")
        elif name and names.count(name) > 1:
            problems.append(f"line {number}: {names.count(name)} columns are called {name!r}")
    if problems:
        raise BadFile(workload.path, problems)
    return _Header(len(names), {name: place for place, name in enumerate(names)})


def _split(line: bytes) -> list[str]:
    """Split one line of CSV; a field in quotes does not go on in the next line."""
    try:
        text = line.decode()
        return next(csv.reader((text,), strict=True)) if '"' in text else text.split(",")
    except UnicodeDecodeError as error:
        raise _BadRow(": not UTF-8 text") from error
    except csv.Error as error:
        raise _BadRow(f": not CSV: {error}") from error


# -- places ----------------------------------------------------------------------------------------


def _placed(rows: list[_Row]) -> Iterator[ReplayRequest]:
    """Order rows by step and arrival, and number prompts and samples as they first appear."""
    rows.sort(key=lambda row: row[:2])
    start: dict[int, int] = {}
    prompts: defaultdict[int, dict[Any, int]] = defaultdict(dict)
    samples: defaultdict[tuple[int, int], int] = defaultdict(int)
    for row in rows:
        start.setdefault(row.step, row.arrival_ns)
        known = prompts[row.step]
        key = (len(known),) if row.prompt is None else row.prompt
        prompt = known.setdefault(key, len(known))
        sample = samples[row.step, prompt]
        samples[row.step, prompt] += 1
        yield ReplayRequest(
            id=f"{row.step}-{prompt}-{sample}",
            step=row.step,
            prompt=prompt,
            sample=sample,
            turns=(row.turn,),
            arrival_ns=row.arrival_ns - start[row.step],
            blocks=row.blocks,
        )
