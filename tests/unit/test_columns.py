"""Samples as columns are what their entries say, look after look."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.model.replay import ReplayRequest, Turn
from harness.run.generation.ledger import Entry, Ledger
from harness.run.rl.columns import EndedColumns, OpenColumns
from harness.seeds import seeded
from harness.wire.generation import Output

PLACES = {"a": 0, "b": 1}


def request(number: int, turns: list[tuple[int, int]]) -> ReplayRequest:
    """A sample of `turns`: tokens of prompt and of response."""
    batch, prompt = divmod(number, 4)
    return ReplayRequest(
        f"r{number}", 0, prompt, 0, tuple(Turn(*one) for one in turns), 0, (), batch
    )


def contexts(entry: Entry, first: int, end: int | None = None) -> int:
    """What some of its turns find when they begin, in all, added up turn by turn."""
    found, known = [], 0
    for turn in entry.request.turns:
        found.append(known + turn.prompt_tokens)
        known += turn.prompt_tokens + turn.response_tokens
    return sum(found[first:end])


def check(columns: OpenColumns, entries: list[Entry]) -> None:
    seen = columns.look(entries, PLACES)
    rows, requests = list(zip(entries, range(len(entries)), strict=True)), seen.requests
    assert requests.ids == tuple(entry.id for entry in entries)
    for entry, row in rows:
        assert requests.group[row] == entry.request.batch << 32 | entry.request.prompt
        assert requests.produced[row] == entry.total_tokens
        assert requests.context[row] == entry.known_tokens
        assert requests.at[row] == PLACES.get(entry.at, -1)
        assert requests.running[row] == (entry.resumed_ns > 0)
        assert requests.batch[row] == entry.request.batch
        assert requests.recomputed is not None
        assert requests.recomputed[row] == contexts(entry, 1, entry.turn + 1)
        assert seen.truth[row] == entry.request.response_tokens - entry.total_tokens
        assert seen.truth_recomputes[row] == contexts(entry, entry.turn + 1)


def deliver(ledger: Ledger, id_: str, tokens: int) -> Entry:
    """Let an instance go on with a sample, to the end of its turn at most; return its entry."""
    entry = ledger.entries[id_]
    start = entry.produced_tokens
    count = min(tokens, entry.now.response_tokens - start)
    output = Output(
        instance=entry.at,
        id=id_,
        start=start,
        count=count,
        first_ns=5,
        last_ns=6,
        ended="finished" if start + count == entry.now.response_tokens else "",
    )
    ledger.apply(output, 5, 6)
    return entry


@given(st.integers(0, 10_000))
def test_columns_are_what_a_plain_look_gives(seed: int) -> None:
    chance = seeded(seed, "samples of a test")
    ledger, columns, done = Ledger(), OpenColumns(), EndedColumns(0)
    waiting = [
        request(n, [(chance.randint(1, 50), chance.randint(1, 20))] * chance.randint(1, 3))
        for n in range(chance.randint(1, 30))
    ]
    plain: list[Entry] = []
    open_: list[str] = []
    while waiting or open_:
        come = [waiting.pop() for _ in range(min(len(waiting), chance.randint(0, 4)))]
        open_ += ledger.add(come, now_ns=1)
        for id_ in chance.sample(open_, chance.randint(0, len(open_))):
            if ledger.entries[id_].state == "queued":
                ledger.send(id_, chance.choice("abc"))
            elif deliver(ledger, id_, chance.randint(1, 20)).state == "finished":
                open_.remove(id_)
                plain.append(ledger.entries[id_])
                done.add(ledger.entries[id_])
        check(columns, [ledger.entries[id_] for id_ in open_])
        ended = done.finished()
        assert ended.length.tolist() == [entry.request.response_tokens for entry in plain]
        assert ended.recomputed is not None
        assert ended.recomputed.tolist() == [contexts(entry, 1) for entry in plain]


def test_a_batch_that_has_ended_is_kept_without_what_was_used() -> None:
    ledger = Ledger()
    for id_ in ledger.add([request(number, [(5, number + 1)]) for number in range(200)], 1):
        ledger.send(id_, "a")
        deliver(ledger, id_, 1000)
    kept = EndedColumns(7, ledger.entries.values())
    before = kept.finished()
    assert before.length.tolist() == list(range(1, 201))
    left = kept.without({f"r{number}" for number in range(150)})
    assert (len(left), left.batch) == (50, 7)
    assert left.finished().length.tolist() == list(range(151, 201))
    assert before.length.tolist() == list(range(1, 201)), "what was handed out stays as it was"


def test_what_was_handed_out_stays_as_it_was() -> None:
    ledger, columns = Ledger(), OpenColumns()
    (id_,) = ledger.add([request(0, [(5, 10), (5, 10)])], 1)
    ledger.send(id_, "a")
    first = columns.look([ledger.entries[id_]], PLACES).requests
    deliver(ledger, id_, 10)
    second = columns.look([ledger.entries[id_]], PLACES).requests
    assert (first.produced.tolist(), second.produced.tolist()) == ([0], [10])
    assert (first.context.tolist(), second.context.tolist()) == ([5], [20])
    assert np.array_equal(first.group, second.group)
