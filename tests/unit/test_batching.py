"""The life cycle of requests: nothing lost or doubled, memory kept, everyone's turn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.model.batching import (
    Batching,
    Limits,
    Step,
    blocks_held,
    complete_step,
    plan_step,
    settle,
    steps_alike,
)
from harness.model.intake import (
    Refused,
    abort,
    abort_all,
    admit_again,
    drained,
    drop_kv,
    export,
    import_with_kv,
    pause,
    resume,
    set_version,
    stop_admitting,
    submit,
    view,
)
from harness.model.requests import MOVES, Carried, Event, Status

SMALL = Limits(sequences_max=4, step_max_tokens=16, blocks=12, block_tokens=4)


def engine(*lengths: tuple[int, int], limits: Limits = SMALL) -> Batching:
    """An engine with requests r0, r1, ... of (prompt, response) tokens."""
    state = Batching(limits)
    for number, (prompt, response) in enumerate(lengths):
        submit(state, Carried(f"r{number}", prompt, response, 0))
    return state


def step(state: Batching, now_ns: int = 0) -> tuple[Step, list[Event]]:
    planned = plan_step(state)
    assert planned is not None
    return planned, complete_step(state, planned, now_ns)


def names(events: list[Event], what: str) -> list[str]:
    return [event.request.id for event in events if event.what == what]


def check_books(state: Batching) -> None:
    """Recount from scratch what the engine counts as it goes."""
    for request in state.requests.values():
        settle(state, request)
    running = [r for r in state.requests.values() if r.status in ("prefilling", "decoding")]
    decoding = [r for r in running if r.status == "decoding"]
    assert sorted(r.place for r in running) == [r.place for r in state.running]
    assert [r for r in state.running if r.status == "prefilling"] == state.prefilling
    assert state.blocks_used == sum(blocks_held(state, r) for r in running)
    assert 0 <= state.blocks_used <= state.limits.blocks
    assert state.kv_tokens == sum(r.computed_tokens for r in decoding)
    assert state.decoding == len(decoding) == sum(state.phases)
    assert len(running) <= state.limits.sequences_max
    assert all(r.computed_tokens == r.known_tokens - 1 for r in decoding)
    waiting = set(state.waiting) | {r.id for r in state.preempted}
    assert waiting | {r.id for r in running} == set(state.requests)
    assert [r.place for r in state.preempted] == sorted(r.place for r in state.preempted)


def test_a_prompt_is_prefilled_in_chunks_and_its_last_chunk_gives_the_first_token() -> None:
    state = engine((20, 3))
    first, events = step(state)
    assert [(c.tokens, c.last) for c in first.chunks] == [(16, False)]
    assert names(events, "admitted") == ["r0"]
    assert first.prefill_pairs == 16 * 17 // 2
    second, events = step(state, 7)
    assert [(c.tokens, c.last) for c in second.chunks] == [(4, True)]
    assert second.prefill_pairs == 4 * 16 + 4 * 5 // 2
    assert [(e.what, e.at_ns, e.request.produced_tokens) for e in events] == [("first_token", 7, 1)]
    third, events = step(state)
    assert (third.batch, third.kv_tokens, third.prefill_tokens) == (1, 21, 0)
    assert not events
    _, events = step(state, 9)
    assert names(events, "finished") == ["r0"]
    assert events[0].request.produced_tokens == 3
    assert plan_step(state) is None
    assert state.blocks_used == 0


def test_decodes_go_before_prefill_under_one_budget() -> None:
    state = engine((4, 9), (4, 9), (30, 2))
    step(state)
    later, _ = step(state)
    assert (later.batch, later.prefill_tokens) == (2, 14)


def test_a_response_of_one_token_ends_with_its_prefill() -> None:
    state = engine((5, 1))
    _, events = step(state, 3)
    assert [event.what for event in events] == ["admitted", "first_token", "finished"]
    assert not state.requests
    check_books(state)


def test_the_youngest_is_preempted_and_recomputed_with_all_of_its_output() -> None:
    state = engine((8, 20), (8, 20), (8, 20), limits=Limits(4, 64, 9, 4))
    preempted: list[str] = []
    ended: dict[str, Carried] = {}
    while (planned := plan_step(state)) is not None:
        events = complete_step(state, planned, 0)
        preempted += names(events, "preempted")
        ended |= {e.request.id: e.request for e in events if e.what == "finished"}
        check_books(state)
    assert preempted[0] == "r2"
    assert "r0" not in preempted, "the oldest keeps its KV"
    assert [ended[name].produced_tokens for name in ("r0", "r1", "r2")] == [20, 20, 20]
    assert ended["r2"].preemptions == preempted.count("r2")


def test_an_aborted_request_returns_its_partial_output_and_its_blocks() -> None:
    state = engine((8, 20), (8, 20))
    for _ in range(4):
        step(state)
    left = abort(state, "r0")
    assert left is not None
    assert (left.produced_tokens, left.kv_tokens) == (4, 11)
    assert abort(state, "r0") is None, "it is gone: an abort that comes too late is no error"
    check_books(state)
    elsewhere = Batching(SMALL)
    submit(elsewhere, left)
    planned, _ = step(elsewhere)
    assert planned.prefill_tokens == 12, "prompt and partial output are recomputed"
    produced = view(elsewhere, "r0")
    assert produced is not None
    assert produced.produced_tokens == 5


def test_a_request_that_comes_with_its_kv_decodes_at_once() -> None:
    state = engine((8, 20))
    for _ in range(4):
        step(state)
    left = export(state, "r0")
    assert left is not None
    elsewhere = Batching(SMALL)
    import_with_kv(elsewhere, left)
    planned, _ = step(elsewhere)
    assert (planned.batch, planned.prefill_tokens, planned.kv_tokens) == (1, 0, 12)
    check_books(elsewhere)


def test_kv_of_half_a_prompt_spares_that_half() -> None:
    state = engine((30, 2))
    step(state)
    left = export(state, "r0")
    assert left is not None
    elsewhere = Batching(SMALL)
    import_with_kv(elsewhere, left)
    planned, _ = step(elsewhere)
    assert planned.prefill_tokens == 14
    check_books(elsewhere)


def test_imports_that_do_not_fit_are_refused_before_anything_changes() -> None:
    state = engine((8, 20), (8, 20), (8, 20), (8, 20))
    for _ in range(3):
        step(state)
    serial = state.serial
    with pytest.raises(Refused, match="all 4 sequences are running"):
        import_with_kv(state, Carried("x", 4, 9, 0, produced_tokens=2, kv_tokens=5))
    assert abort(state, "r3")
    with pytest.raises(Refused, match=r"needs 6 KV blocks; 3 of 12 are free"):
        import_with_kv(state, Carried("x", 20, 9, 0, produced_tokens=2, kv_tokens=21))
    with pytest.raises(Refused, match="comes with KV of 0 tokens; submit it"):
        import_with_kv(state, Carried("x", 4, 9, 0, produced_tokens=2))
    with pytest.raises(Refused, match="r0: is here already"):
        submit(state, Carried("r0", 4, 9, 0))
    with pytest.raises(Refused, match="output that is not complete"):
        submit(state, Carried("x", 4, 9, 0, produced_tokens=9))
    with pytest.raises(Refused, match="all of the KV cache holds 48"):
        submit(state, Carried("x", 40, 10, 0))
    short = Batching(Limits(4, 16, 12, 4, length_max_tokens=10))
    with pytest.raises(Refused, match="11 tokens; the model takes 10"):
        submit(short, Carried("x", 6, 5, 0))
    assert state.serial == serial + 1, "only the abort"
    check_books(state)


def test_limits_that_could_never_prefill_are_refused() -> None:
    with pytest.raises(UsageError, match="must exceed sequences_max"):
        Batching(Limits(16, 16, 12, 4))
    with pytest.raises(UsageError, match="at least 1"):
        Batching(Limits(4, 16, 0, 4))


def test_draining_admits_nobody_new_but_brings_back_the_preempted() -> None:
    state = engine((8, 20), (8, 20), (8, 20), (4, 4), limits=Limits(3, 64, 9, 4))
    step(state)
    stop_admitting(state)
    ended: list[str] = []
    while (planned := plan_step(state)) is not None:
        ended += names(complete_step(state, planned, 0), "finished")
    assert sorted(ended) == ["r0", "r1", "r2"]
    assert drained(state)
    assert list(state.waiting) == ["r3"]
    admit_again(state)
    assert step(state)[0].admitted == ("r3",)


def test_pause_freezes_and_resume_goes_on() -> None:
    state = engine((4, 6))
    step(state)
    pause(state)
    assert plan_step(state) is None
    submit(state, Carried("late", 4, 2, 0))
    resume(state)
    planned, _ = step(state)
    assert (planned.batch, planned.admitted) == (1, ("late",))


def test_weight_versions_of_the_first_and_the_last_token_are_kept() -> None:
    state = engine((4, 6), (4, 2))
    step(state)
    step(state)
    set_version(state, 3)
    partial = view(state, "r0")
    assert partial is not None
    assert (partial.version_first, partial.version_last) == (0, 0)
    _, events = step(state)
    assert drop_kv(state) == 1
    planned, events = step(state)
    assert planned.prefill_tokens == 7
    while (next_step := plan_step(state)) is not None:
        events += complete_step(state, next_step, 0)
    (ended,) = [e.request for e in events if e.what == "finished"]
    assert (ended.version_first, ended.version_last) == (0, 3)
    with pytest.raises(Refused, match="weights 2 are older than 3"):
        set_version(state, 2)


def test_a_step_planned_before_a_command_is_refused() -> None:
    state = engine((4, 6), (4, 6))
    step(state)
    planned = plan_step(state)
    assert planned is not None
    submit(state, Carried("late", 4, 2, 0))
    abort(state, "r1")
    with pytest.raises(ValueError, match="plan again"):
        complete_step(state, planned, 0)


def test_what_has_ended_cannot_move() -> None:
    ended: set[Status] = {"finished", "aborted", "exported"}
    assert not [move for move in MOVES if move[0] in ended]
    alive = {status for status, _ in MOVES}
    assert all((status, verb) in MOVES for status in alive for verb in ("abort", "export"))


class Bench:
    """Two engines under random commands, and a naive count of every token."""

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        self.engines = [Batching(limits), Batching(limits)]
        self.rng = rng
        self.tokens: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.limbo: dict[str, Carried] = {}
        self.first_admitted: list[list[int]] = [[], []]

    def submit(self, which: int) -> None:
        limits = self.engines[which].limits
        most = min(limits.length_max_tokens, limits.blocks * limits.block_tokens + 1)
        prompt = self.rng.randint(1, max(1, most // self.rng.choice([2, 6, 12])))
        longest = max(1, (most - prompt) // self.rng.choice([1, 3, 6]))
        name, response = f"r{len(self.wanted)}", self.rng.randint(1, longest)
        submit(self.engines[which], Carried(name, prompt, response, 0))
        self.wanted[name], self.tokens[name] = response, 0

    def step(self, which: int) -> None:
        state = self.engines[which]
        planned = plan_step(state)
        if planned is None:
            return
        again = plan_step(state)
        assert planned == again, "planning changes nothing"
        times = self.rng.randint(1, steps_alike(state, planned))
        if times > 1:
            assert not planned.chunks
        victims = set(planned.preempted)
        if victims:
            assert self.short_of_blocks(state, planned.preempted[:-1]), "no more than needed"
        assert not self.short_of_blocks(state, planned.preempted), "no fewer than needed"
        for request in state.running:
            if request.status == "decoding" and request.id not in victims:
                self.tokens[request.id] += times
        for chunk in planned.chunks:
            self.tokens[chunk.id] += chunk.last
        waiting = [r.id for r in (*state.preempted, *state.waiting.values())]
        assert list(planned.admitted) == waiting[: len(planned.admitted)], "first come first served"
        for event in complete_step(state, planned, 0, times):
            if event.what == "finished":
                self.end(event.request, "finished")
                assert event.request.produced_tokens == self.wanted[event.request.id]

    def short_of_blocks(self, state: Batching, preempted: tuple[str, ...]) -> bool:
        """Whether without these the decoding requests would still lack blocks for a token."""
        stay = [settle(state, r) for r in state.running if r.id not in preempted]
        held = sum(blocks_held(state, r) for r in stay)
        full = sum(
            r.computed_tokens % state.limits.block_tokens == 0
            for r in stay
            if r not in state.prefilling
        )
        return held + full > state.limits.blocks

    def leave(self, which: int, how: str) -> None:
        state = self.engines[which]
        if not state.requests:
            return
        name = self.rng.choice(sorted(state.requests))
        left = (abort if how == "abort" else export)(state, name)
        assert left is not None
        assert left.produced_tokens == self.tokens[name], "the partial output is whole"
        self.limbo[name] = left

    def enter(self, which: int, with_kv: bool) -> None:
        if not self.limbo:
            return
        name = self.rng.choice(sorted(self.limbo))
        try:
            (import_with_kv if with_kv else submit)(self.engines[which], self.limbo[name])
        except Refused:
            return
        del self.limbo[name]

    def end(self, request: Carried, how: str) -> None:
        assert request.id not in self.ended, "ends once"
        assert request.produced_tokens == self.tokens[request.id]
        self.ended[request.id] = how

    def finish_all(self) -> None:
        for name in sorted(self.limbo):
            submit(self.engines[0], self.limbo.pop(name))
        for which, state in enumerate(self.engines):
            resume(state)
            admit_again(state)
            for _ in range(20_000):
                if not state.requests:
                    break
                self.step(which)
            assert not state.requests, "every request comes to its end"
            assert state.blocks_used == state.kv_tokens == 0


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sequences=st.integers(1, 5),
    extra=st.integers(1, 12),
    blocks=st.integers(2, 14),
    block_tokens=st.sampled_from([1, 2, 4, 16]),
    commands=st.lists(st.integers(0, 99), min_size=30, max_size=150),
)
def test_no_token_is_lost_or_doubled_whatever_is_asked(
    seed: int, sequences: int, extra: int, blocks: int, block_tokens: int, commands: list[int]
) -> None:
    limits = Limits(sequences, sequences + extra, blocks, block_tokens)
    rng = random.Random(seed)
    bench = Bench(limits, rng)
    for command in commands:
        which = rng.randint(0, 1)
        state = bench.engines[which]
        if command < 20:
            bench.submit(which)
        elif command < 70:
            bench.step(which)
        elif command < 80:
            bench.leave(which, rng.choice(["abort", "export"]))
        elif command < 92:
            bench.enter(which, rng.random() < 0.7)
        elif command < 94:
            drop_kv(state)
        elif command < 96:
            (pause if rng.random() < 0.5 else resume)(state)
        elif command < 98:
            (stop_admitting if rng.random() < 0.5 else admit_again)(state)
        else:
            set_version(state, state.version + 1)
        check_books(state)
    bench.finish_all()
    assert bench.ended == dict.fromkeys(bench.wanted, "finished")
    assert bench.tokens == bench.wanted


def test_all_that_is_aborted_comes_back_oldest_first() -> None:
    state = engine((8, 20), (8, 20), (8, 20), (8, 20), (8, 20))
    for _ in range(3):
        step(state)
    left = abort_all(state)
    assert [each.id for each in left] == ["r0", "r1", "r2", "r3", "r4"]
    assert [each.produced_tokens > 0 for each in left] == [True, True, True, True, False]
    assert not state.requests
    check_books(state)
