"""What an agent makes of its ranks' answers, and whom it names."""

from agents.frames import Unpacker, pack
from agents.pipe import FRAMES, Position, merge
from agents.ranks import at_fault
from agents.seat import combine
from harness.wire.messages import Done, Failure, Held, RankSamples, RanksReady, Samples


def position(entered: int, inside: bool = True) -> Position:
    return Position(entered=entered, inside=inside)


def test_a_silent_rank_and_one_outside_are_named() -> None:
    ranks, text = at_fault(
        [0, 1, 2], {0: position(7), 2: position(6, inside=False)}, must_enter=True
    )
    assert ranks == (1, 2)
    assert "rank 1 does not answer" in text
    assert "rank 2 is outside, having entered collective 6" in text


def test_the_rank_behind_is_named_when_all_are_inside() -> None:
    assert at_fault([0, 1], {0: position(7), 1: position(6)}, must_enter=True)[0] == (1,)


def test_nobody_is_named_when_the_missing_rank_is_elsewhere() -> None:
    ranks, text = at_fault([0, 1], {0: position(7), 1: position(7)}, must_enter=True)
    assert ranks == ()
    assert "another node" in text


def test_a_rank_that_need_not_enter_is_not_named_for_being_outside() -> None:
    found = {0: position(0, inside=False)}
    assert at_fault([0, 1], found, must_enter=False)[0] == (1,)
    assert at_fault([0], found, must_enter=False)[0] == ()


def test_a_death_outranks_what_follows_from_it() -> None:
    died = Failure(error="RankDied", text="rank 1 killed", ranks=(1,))
    broke = Failure(error="CollectiveBroken", text="connection closed by peer")
    assert combine([broke, died]) == died
    assert combine([broke, broke]).text == "connection closed by peer; connection closed by peer"


def test_answers_are_merged_by_rank_and_latest_stamp() -> None:
    assert merge([Done(t_ns=5), Done(t_ns=3)]) == Done(t_ns=5)
    assert merge([Held(entered={0: 7}), Held(entered={1: 6})]) == Held(entered={0: 7, 1: 6})
    ready = [
        RanksReady(ready_ns=9 - r, pids={r: 100 + r}, backend="gloo", effective_env={"A": "1"})
        for r in (0, 1)
    ]
    assert merge(ready) == RanksReady(
        ready_ns=9, pids={0: 100, 1: 101}, backend="gloo", effective_env={"A": "1"}
    )
    rows = [RankSamples(rank=r, group=(0, 1), size_bytes=4, times_ns=(1,), wrong=0) for r in (0, 1)]
    assert merge([Samples(ranks=(row,)) for row in rows]) == Samples(ranks=tuple(rows))


def test_frames_survive_any_cut() -> None:
    messages = [Done(t_ns=n) for n in range(3)]
    stream = b"".join(pack(n, 0, message) for n, message in enumerate(messages))
    unpacker = Unpacker(FRAMES)
    found = [frame for at in range(len(stream)) for frame in unpacker.feed(stream[at : at + 1])]
    assert [frame.body for frame in found] == messages
    assert [frame.seq for frame in found] == [0, 1, 2]
