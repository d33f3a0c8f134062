"""The ledger counts each token once, whatever engines tell; prompts are the same in every arm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.prompts import Prompts
from harness.model.replay import ReplayRequest, Turn
from harness.run.generation.ledger import Ledger
from harness.wire.generation import Output

SEED = Prompts(vocab=50, seed=1)


def request(id_: str = "0-0-0", turns: tuple[Turn, ...] = (Turn(10, 6),)) -> ReplayRequest:
    return ReplayRequest(id=id_, step=0, prompt=0, sample=0, turns=turns)


def told(
    start: int, count: int, ended: Any = "", instance: str = "a", id_: str = "0-0-0"
) -> Output:
    return Output(
        instance=instance, id=id_, start=start, count=count, first_ns=1, last_ns=2, ended=ended,
        ids=tuple(range(100 + start, 100 + start + count)),
    )  # fmt: skip


def begun(prompts: Prompts | None = None) -> Ledger:
    ledger = Ledger(prompts)
    ledger.add([request()], now_ns=0)
    ledger.send("0-0-0", "a")
    return ledger


def counts(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.tokens, ledger.lost_tokens, ledger.doubled_tokens


def test_tokens_in_order_are_counted_once() -> None:
    ledger = begun(SEED)
    for output in (told(0, 2), told(2, 3), told(5, 1, "finished")):
        ledger.apply(output, 1, 2)
    assert counts(ledger) == (6, 0, 0)
    assert ledger.finished == 1
    assert list(ledger.entries["0-0-0"].output) == [100, 101, 102, 103, 104, 105]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([told(0, 2), told(3, 3, "finished")], (5, 1, 0)),  # a gap
        ([told(0, 4), told(2, 4, "finished")], (6, 0, 2)),  # an overlap
        ([told(0, 4), told(0, 4), told(4, 2, "finished")], (6, 0, 4)),  # told twice
        ([told(0, 4, "finished")], (4, 2, 0)),  # ended early
        ([told(0, 8, "finished")], (6, 0, 2)),  # went on too long
    ],
)
def test_what_is_wrong_is_counted_and_positions_stay_right(
    outputs: list[Output], expected: tuple[int, int, int]
) -> None:
    ledger = begun(SEED)
    for output in outputs:
        ledger.apply(output, 1, 2)
    assert counts(ledger) == expected
    entry = ledger.entries["0-0-0"]
    assert len(entry.output) == entry.produced_tokens
    assert all(id_ in (0, 100 + at) for at, id_ in enumerate(entry.output))


def test_an_instance_that_no_longer_has_it_delivers_nothing() -> None:
    ledger = begun()
    ledger.apply(told(0, 2), 1, 2)
    ledger.hold("0-0-0")
    assert ledger.apply(told(2, 2), 3, 4) is None
    ledger.requeue("0-0-0")
    ledger.send("0-0-0", "b")
    ledger.apply(told(2, 1, "finished", instance="a"), 3, 4)
    assert (ledger.tokens, ledger.finished) == (2, 0)
    assert ledger.work_of("0-0-0").carried.produced_tokens == 2


def test_a_turn_follows_with_real_outputs_in_its_context() -> None:
    ledger = Ledger(SEED)
    two = request(turns=(Turn(4, 2), Turn(3, 1)))
    ledger.add([two], now_ns=0)
    ledger.send("0-0-0", "a")
    entry = ledger.apply(told(0, 2, "finished"), 1, 2)
    assert entry is not None
    assert (entry.state, ledger.finished, ledger.at("a")) == ("queued", 0, ())
    work = ledger.work_of("0-0-0")
    assert work.prompt == (*SEED.added(two, 0), 100, 101, *SEED.added(two, 1))
    assert (work.carried.prompt_tokens, work.carried.response_tokens, work.output) == (9, 1, ())


def test_states_that_do_not_follow_are_bugs() -> None:
    ledger = begun()
    with pytest.raises(ValueError, match="0-0-0 is in the ledger already"):
        ledger.add([request()], 0)
    with pytest.raises(ValueError, match="0-0-0 is sent, not queued or held"):
        ledger.send("0-0-0", "b")
    with pytest.raises(ValueError, match="0-0-0 is sent, not held"):
        ledger.requeue("0-0-0")


def test_the_digest_tells_whether_the_same_was_generated() -> None:
    def run(*outputs: Output) -> str:
        ledger = begun(SEED)
        for output in outputs:
            ledger.apply(output, 1, 2)
        return ledger.digest(ledger.entries)

    assert run(told(0, 6, "finished")) == run(told(0, 3), told(3, 3), told(6, 0, "finished"))
    assert run(told(0, 6, "finished")) != run(told(0, 2), told(3, 3, "finished"))


def test_the_digest_counts_repeats_once_if_they_are_the_same() -> None:
    ledger = begun(SEED)
    ledger.apply(told(0, 6, "finished"), 1, 2)
    once = ledger.digest(ledger.entries)
    ledger.add([request("again")], now_ns=0)
    ledger.send("again", "a")
    ledger.apply(told(0, 6, "finished", id_="again"), 1, 2)
    assert ledger.digest(ledger.entries) == once
    ledger.entries["again"].output[3] += 1
    assert ledger.digest(ledger.entries) != once
    assert ledger.digest(["0-0-0"]) == once


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7), st.booleans()), max_size=60)


@settings(max_examples=200, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
       steps=STEPS)  # fmt: skip
def test_no_history_loses_or_doubles(turns: list[tuple[int, int]], steps: Any) -> None:
    """An honest engine's outputs, moves at any time, and outputs of engines left behind."""
    ledger = Ledger(SEED)
    asked = request(turns=tuple(Turn(*turn) for turn in turns))
    ledger.add([asked], now_ns=0)
    entry, delivered = ledger.entries[asked.id], 0
    for engine, count, move in [*steps, *[(0, 9, False)] * 40]:
        if entry.state == "finished":
            break
        if entry.state in ("queued", "held"):
            ledger.send(asked.id, f"i{engine}")
        start = entry.produced_tokens
        if move:
            ledger.hold(asked.id)
            ledger.apply(told(start, count, instance=f"i{engine}"), 1, 2)
            continue
        new = min(count, entry.now.response_tokens - start)
        ended = "finished" if start + new == entry.now.response_tokens else ""
        ledger.apply(told(start, new, ended, instance=entry.at), 1, 2)
        delivered += new
        if entry.state == "sent":
            assert ledger.known_tokens_at(entry.at) == entry.known_tokens
    assert entry.state == "finished"
    assert counts(ledger) == (delivered, 0, 0)
    assert delivered == asked.response_tokens
    assert not any(ledger.at(f"i{n}") or ledger.known_tokens_at(f"i{n}") for n in range(6))


# -- prompts ----------------------------------------------------------------------------------


def test_samples_share_their_prompt_and_tools_answer_each_by_itself() -> None:
    turns = (Turn(20, 1), Turn(20, 1))
    a, b = (ReplayRequest(id=str(s), step=1, prompt=2, sample=s, turns=turns) for s in (0, 1))
    other = ReplayRequest(id="x", step=1, prompt=3, sample=0, turns=turns)
    assert SEED.added(a, 0) == SEED.added(b, 0) != SEED.added(other, 0)
    assert SEED.added(a, 1) != SEED.added(b, 1)
    assert all(3 <= id_ < 50 for id_ in SEED.added(a, 0) + SEED.added(a, 1))
    assert SEED.added(a, 0) != Prompts(vocab=50, seed=2).added(a, 0)


def test_a_seed_means_the_same_ids_on_every_machine() -> None:
    assert SEED.added(request(), 0) == (17, 12, 21, 33, 40, 7, 47, 31, 21, 21)


def test_equal_blocks_are_equal_tokens() -> None:
    blocks = Prompts(vocab=1000, block_tokens=4)
    a, b = (
        ReplayRequest(id=i, step=0, prompt=n, sample=0, turns=(Turn(10, 1),), blocks=of)
        for n, (i, of) in enumerate((("a", (7, 8, 9)), ("b", (7, 8, 5))))
    )
    assert blocks.added(a, 0)[:8] == blocks.added(b, 0)[:8]
    assert blocks.added(a, 0)[8:] != blocks.added(b, 0)[8:]
    assert len(blocks.added(a, 0)) == 10
