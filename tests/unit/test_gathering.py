"""Who gives weights to whom: every writer gets what it lacks, once, from somebody who has it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agents.training.gathering import Move, moves

NAMES = "abcdefgh"
HELD = st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=5)


@given(HELD, st.data())
def test_every_writer_gets_what_it_lacks_once(held: list[set[str]], data: st.DataObject) -> None:
    ranks = st.sampled_from(range(len(held)))
    writers = data.draw(st.lists(ranks, min_size=1, unique=True))
    found = moves([sorted(names) for names in held], writers)
    everything = set().union(*held)
    assert all(move.name in held[move.giver] for move in found)
    for writer in writers:
        got = [move.name for move in found if move.writer == writer]
        assert len(got) == len(set(got))
        assert set(got) == everything - held[writer]
    assert {move.writer for move in found} <= set(writers)


def test_shards_go_to_every_other_writer() -> None:
    found = moves([["s0"], ["s1"], ["s2"]], (0, 2))
    assert found == [Move("s1", 1, 0), Move("s2", 2, 0), Move("s0", 0, 2), Move("s1", 1, 2)]


def test_what_all_writers_hold_is_not_sent() -> None:
    """FSDP's own all-gather leaves every rank with all parameters."""
    assert moves([NAMES, NAMES], (0, 1)) == []


def test_those_who_hold_the_same_give_in_turn() -> None:
    found = moves([NAMES[:4], NAMES[:4], NAMES[4:]], (2,))
    assert Counter(move.giver for move in found) == {0: 2, 1: 2}
