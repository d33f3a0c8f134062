"""The journal: whole after a crash, masked at the sink, readable by whoever comes later."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BadFile, InfrastructureError
from harness.model.documents import SCHEMA, Descriptor, Document, Event, Field, Start, Stop
from harness.model.streams import STREAMS
from harness.record.journal import Journal, is_closed, read_journal

START = Start(
    schema=SCHEMA,
    run="r1",
    t_ns=1,
    wall="2026-01-01T00:00:00+00:00",
    world="emulated",
    scenario="s",
    bench="b",
    seed=0,
    versions={},
)


class Steady:
    """A clock that goes on by 10 ns each time it is read."""

    def __init__(self) -> None:
        self.t_ns = 0

    def now_ns(self) -> int:
        self.t_ns += 10
        return self.t_ns

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def sleep_ns(self, duration_ns: int) -> None:
        self.t_ns += duration_ns


def note(text: str) -> dict[str, object]:
    return {"level": "info", "who": "test", "text": text}


def small_journal(path: Path) -> Journal:
    journal = Journal.create(path, Steady())
    journal.start(START)
    journal.describe("note", STREAMS["note"])
    return journal


def test_documents_come_back_as_they_were_written(tmp_path: Path) -> None:
    with small_journal(tmp_path / "j") as journal:
        journal.event("note", note("one"))
        journal.event("note", note("two"))
        journal.stop("passed", 0, "")
    start, descriptor, one, two, stop = read_journal(tmp_path / "j")
    assert start == START
    assert descriptor == Descriptor(stream="note", fields=STREAMS["note"])
    assert one == Event(stream="note", seq=1, t_ns=10, data=note("one"))
    assert two == Event(stream="note", seq=2, t_ns=20, data=note("two"))
    assert isinstance(stop, Stop)
    assert stop.counts == {"note": 2}


def test_every_line_is_on_its_way_before_the_next_act(tmp_path: Path) -> None:
    with small_journal(tmp_path / "j") as journal:
        journal.event("note", note("one"))
        assert len(list(read_journal(tmp_path / "j"))) == 3
        assert not is_closed(tmp_path / "j")
        journal.stop("failed", 1, "because")
        assert is_closed(tmp_path / "j")


def test_a_field_must_be_declared(tmp_path: Path) -> None:
    with small_journal(tmp_path / "j") as journal:
        with pytest.raises(ValueError, match="'clock' was not described"):
            journal.event("clock", {})
        with pytest.raises(ValueError, match="'note' has no field colour"):
            journal.event("note", note("x") | {"colour": "red"})


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    small_journal(tmp_path / "j").close()
    with pytest.raises(InfrastructureError, match="File exists"):
        Journal.create(tmp_path / "j", Steady())


def test_whoever_watches_sees_what_is_recorded(tmp_path: Path) -> None:
    seen: list[Document] = []
    with Journal.create(
        tmp_path / "j", Steady(), secrets=["hunter2"], watch=seen.append
    ) as journal:
        journal.start(START)
        journal.describe("note", STREAMS["note"])
        journal.event("note", note("login hunter2"))
    assert seen == list(read_journal(tmp_path / "j"))


SECRET = 'p"\\ä\n'


def test_secrets_are_masked_wherever_they_turn_up(tmp_path: Path) -> None:
    fields = {"deep": Field(dtype="object"), "n": Field(dtype="integer")}
    with Journal.create(tmp_path / "j", Steady(), secrets=["", "12", SECRET]) as journal:
        journal.start(START)
        journal.describe("odd", fields)
        journal.conceal("hunter2longer")
        journal.conceal("hunter2")
        journal.event(
            "odd", {"deep": {f"a{SECRET}b": [(f"x{SECRET}",), "hunter2longer"]}, "n": 121212}
        )
        journal.stop("bug", 70, f"{SECRET} hunter2")
    text = (tmp_path / "j").read_text()
    assert "hunter2" not in text
    assert json.dumps(SECRET)[1:-1] not in text
    *_, event, stop = read_journal(tmp_path / "j")
    assert isinstance(event, Event)
    assert event.data == {"deep": {"a***b": [["x***"], "***"]}, "n": 121212}
    assert isinstance(stop, Stop)
    assert stop.reason == "*** ***"


@settings(max_examples=60)
@given(data=st.data())
def test_a_journal_cut_anywhere_keeps_all_whole_lines(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "j"
    path.unlink(missing_ok=True)
    with small_journal(path) as journal:
        for i in range(4):
            journal.event("note", note(f"number {i}"))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    reader = read_journal(path)
    found = list(reader)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    finished = sum(end - 1 <= cut for end in ends)  # a line without its end is whole, too
    assert len(found) == finished
    assert reader.torn == (cut not in (0, *ends, *(end - 1 for end in ends)))
    assert not is_closed(path)


def test_another_process_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with small_journal(path) as journal:
        journal.event("note", note("one"))
        journal.event("note", note("two"))
    path.write_bytes(path.read_bytes()[:-7])
    with Journal.reopen(path, Steady()) as again:
        again.event("note", note("after"))
        again.stop("interrupted", 4, "recovered")
    reader = read_journal(path)
    found = list(reader)
    assert reader.torn == 1
    assert [document.seq for document in found if isinstance(document, Event)] == [1, 2]
    assert is_closed(path)


def test_a_later_major_version_is_refused_naming_both(tmp_path: Path) -> None:
    path = tmp_path / "j"
    small_journal(path).close()
    path.write_text(path.read_text().replace(f'"schema":"{SCHEMA}"', '"schema":"9.1"'))
    with pytest.raises(BadFile, match=r"schema 9\.1; this version reads 1\.x"):
        list(read_journal(path))
    with pytest.raises(BadFile, match="no journal here"):
        read_journal(tmp_path / "none")


def test_a_full_disk_is_named() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        journal = Journal(full, Steady())
        with pytest.raises(InfrastructureError, match="/dev/full: cannot be written: No space"):
            journal.start(START)


def test_what_a_full_disk_kept_back_spoils_no_closing() -> None:
    with Path("/dev/full").open("wb") as full:
        journal = Journal(full, Steady())
        with pytest.raises(InfrastructureError):
            journal.start(START)
        with pytest.raises(InfrastructureError, match="/dev/full: cannot be written: No space"):
            journal.sync()
        journal.close()
