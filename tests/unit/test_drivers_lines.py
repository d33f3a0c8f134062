"""Transports without a wire: transcript, replay, faults, and foreign calls under a deadline."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.catalog import open_ocs
from drivers.errors import BadAddress, DeadlineExpired, LinkLost, Misuse
from drivers.transports.bounded import bounded
from drivers.transports.faulty import Faulty
from drivers.transports.replay import Replay, load_dialogue
from drivers.transports.transcript import Masking, Transcript

SECRET = "pass>word"


@given(
    st.lists(st.sampled_from([SECRET, "pass", "p", "\r\n", "M 1 COMPLD", ">word"])),
    st.lists(st.integers(0, 100)),
)
def test_a_secret_never_passes_however_it_is_cut(parts: list[str], cuts: list[int]) -> None:
    data = "".join(parts).encode()
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    masking = Masking([SECRET])
    shown = b"".join(masking.feed(data[a:b]) for a, b in itertools.pairwise(edges))
    whole = shown + masking.rest()
    assert SECRET.encode() not in whole
    masked = data.replace(SECRET.encode(), b"***")
    assert masked.startswith(shown)
    assert whole in (masked, shown + b"***")


def test_a_transcript_holds_both_sides_with_times_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "transcripts" / "agg0.txt"
    line = Transcript(Replay([(b"hello s3cret\n", b"yes\r\n")]), path, ["s3cret"])
    line.send(b"hello s3cret\n", 0)
    assert line.receive(0) == b"yes\r\n"
    before_close = path.read_text().splitlines()
    line.close()
    line.close()
    assert before_close == path.read_text().splitlines()[:-1], "not written line by line"
    stamps, marks, texts = zip(
        *(line.split(" ", 2) for line in path.read_text().splitlines()), strict=True
    )
    assert marks == ("#", ">", "<", "#")
    assert texts[1:3] == (r"hello ***\n", r"yes\r\n")
    assert [int(s) for s in stamps] == sorted(int(s) for s in stamps)


def test_a_disk_that_is_full_stops_no_exchange() -> None:
    line = Transcript(Replay([(b"hello\n", b"yes\r\n")]), Path("/dev/full"))
    line.send(b"hello\n", 0)
    assert line.receive(0) == b"yes\r\n"
    line.close()


def test_replay_insists_on_both_sides() -> None:
    replay = Replay([(b"a", b"1"), (b"b", b"2")])
    with pytest.raises(AssertionError, match="the dialogue has"):
        replay.send(b"x", 0)
    replay = Replay([(b"ab", b"1"), (b"b", b"2")])
    replay.send(b"a", 0)
    with pytest.raises(DeadlineExpired):
        replay.receive(0)
    replay.send(b"b", 0)
    with pytest.raises(AssertionError, match="never read"):
        replay.finish()
    assert replay.receive(0) == b"1"
    with pytest.raises(AssertionError, match="never sent"):
        replay.finish()


def test_a_dialogue_file_with_another_line_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("# x\n> a\\n\n< b\n? c\n")
    with pytest.raises(ValueError, match=r"d\.txt:4"):
        load_dialogue(path)


def test_injected_faults() -> None:
    def line(**faults: object) -> Faulty:
        return Faulty(Replay([(b"?", b"abcdef"), (b"!", b"xyz")]), **faults)

    split = line(chunks=(1, 3))
    split.send(b"?", 0)
    assert [split.receive(0) for _ in range(3)] == [b"a", b"bcd", b"e"]
    cut = line(cut_after=4)
    cut.send(b"?", 0)
    assert cut.receive(0) == b"abcd"
    with pytest.raises(LinkLost):
        cut.receive(0)
    dropped = line(drop=[1])
    dropped.send(b"?", 0)
    with pytest.raises(DeadlineExpired):
        dropped.receive(0)
    dropped.send(b"!", 0)
    assert dropped.receive(0) == b"xyz"
    garbled = line(garble=lambda data: data.replace(b"c", b"\xff"))
    garbled.send(b"?", 0)
    assert garbled.receive(0) == b"ab\xffdef"
    slept: list[float] = []
    late = line(delay_ns=10**9, sleep=slept.append)
    late.send(b"?", 0)
    with pytest.raises(DeadlineExpired):
        late.receive(0)
    assert slept == [1.0]


def test_a_call_that_hangs_is_left_behind_and_its_late_result_disposed_of() -> None:
    go, gone = threading.Event(), threading.Event()
    disposed: list[str] = []

    def hang() -> str:
        go.wait(20)
        return "late"

    def dispose(result: str) -> None:
        disposed.append(result)
        gone.set()

    with pytest.raises(DeadlineExpired, match="look-up: no answer in time"):
        bounded(hang, time_past(), what="look-up", abandon=go.set, dispose=dispose)
    assert gone.wait(20)
    assert disposed == ["late"]


def test_a_call_that_fails_raises_its_own_error() -> None:
    def fail() -> None:
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        bounded(fail, far(), what="x")
    assert bounded(lambda: 7, far(), what="x") == 7


def time_past() -> int:
    return 0


def far() -> int:
    return 1 << 62


def test_the_catalog_names_what_it_has() -> None:
    with pytest.raises(Misuse, match="no driver 'polaris'; there are polatis-scpi"):
        open_ocs("polaris", "tcp://h:1", name="agg0", exchange_timeout_ns=1)
    with pytest.raises(BadAddress):
        open_ocs("polatis-scpi", "h:1", name="agg0", exchange_timeout_ns=1)
