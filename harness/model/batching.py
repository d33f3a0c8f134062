"""The life cycle of requests in one engine: continuous batching over a paged KV cache.

The paced engine and the simulator advance this same machine; they differ in what they do while a
step lasts. `plan_step` looks and changes nothing; `complete_step` makes the step true, or the same
decode step many times over. Commands (`harness.model.intake`) act between steps, as an engine's
step loop does. A planned step that is dropped has not happened.

As in vLLM 0.32: first come first served; decodes go before prefill chunks under one token budget;
a request is admitted when blocks for all it knows are free, and it then holds them; when a decode
finds no block, the youngest running request loses its KV and goes back ahead of all that wait, to
be recomputed from its prompt and partial output. The last token of a response is never computed.

All decoding requests advance together, so their counters stand still and one beat counts for all:
a step costs O(1) in the batch, whatever is not decoding costs O(log). Lengths in tokens, memory in
blocks, times in ns. Pure: the caller owns the clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from harness.errors import UsageError
from harness.model.requests import Event, Request, carried


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine takes: sequences and tokens in a step, KV blocks, length of a request."""

    sequences_max: int
    step_max_tokens: int
    blocks: int
    block_tokens: int = 16
    length_max_tokens: int = 2**31


class Chunk(NamedTuple):
    """Part of a request's known tokens, prefilled in one step; `last` gives it a token."""

    id: str
    tokens: int
    last: bool


class Step(NamedTuple):
    """What one step does. `kv_tokens`: what its `batch` decoding sequences attend to, together."""

    serial: int
    batch: int
    kv_tokens: int
    chunks: tuple[Chunk, ...] = ()
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


def _place(request: Request) -> int:
    return request.place


@dataclass(slots=True, eq=False)
class Batching:
    """One engine's requests. Read it freely; change it by the functions of this module only."""

    limits: Limits
    version: int = 0
    paused: bool = False
    admitting: bool = True
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    preempted: list[Request] = field(default_factory=list)
    prefilling: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    blocks_used: int = 0
    kv_tokens: int = 0
    beat: int = 0
    serial: int = 0
    places: int = 0
    phases: list[int] = field(default_factory=list)
    finishes: list[tuple[int, int, Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = self.limits
        if min(limits.sequences_max, limits.blocks, limits.block_tokens) < 1:
            raise UsageError("sequences_max, blocks and block_tokens are at least 1")
        if limits.step_max_tokens <= limits.sequences_max:
            raise UsageError(
                f"step_max_tokens {limits.step_max_tokens} must exceed sequences_max "
                f"{limits.sequences_max}: else a full batch never prefills"
            )
        self.phases = [0] * limits.block_tokens

    @property
    def decoding(self) -> int:
        """Sequences that decode in the next step."""
        return len(self.running) - len(self.prefilling)

    @property
    def blocks_free(self) -> int:
        """KV blocks that nobody holds."""
        return self.limits.blocks - self.blocks_used


def plan_step(state: Batching) -> Step | None:
    """Return the next step; None where there is nothing to do, or the engine is paused."""
    if state.paused or not state.requests:
        return None
    victims, batch, kv_tokens = _victims(state)
    chunks: list[Chunk] = []
    pairs = 0
    budget = state.limits.step_max_tokens - batch
    free = state.blocks_free
    admitted: list[Request] = []
    if not victims and (state.preempted or (state.waiting and state.admitting)):
        admitted = _admissible(state, budget, free - _blocks_wanted(state))
    for request in (*state.prefilling, *admitted):
        if request in victims:
            continue
        tokens = min(budget, request.known_tokens - request.computed_tokens)
        if tokens:
            budget -= tokens
            pairs += tokens * request.computed_tokens + tokens * (tokens + 1) // 2
            last = request.computed_tokens + tokens == request.known_tokens
            chunks.append(Chunk(request.id, tokens, last))
    if not batch and not chunks and not victims:
        return None
    return Step(
        serial=state.serial,
        batch=batch,
        kv_tokens=kv_tokens + batch,
        chunks=tuple(chunks),
        prefill_tokens=state.limits.step_max_tokens - batch - budget,
        prefill_pairs=pairs,
        admitted=tuple(request.id for request in admitted),
        preempted=tuple(request.id for request in victims),
    )


def complete_step(state: Batching, step: Step, now_ns: int, times: int = 1) -> list[Event]:
    """Make a planned step true at its end, `now_ns`; a pure decode step also `times` over.

    Returns what happened, in the order preempted, admitted, first tokens, finished. The caller
    keeps `times` within `steps_alike`. Raises `ValueError` on a step planned for another state.
    """
    if step.serial != state.serial:
        raise ValueError("the step was planned before something else changed: plan again")
    state.serial += 1
    events = []
    for name in step.preempted:
        request = state.requests[name]
        preempt(state, request)
        events.append(Event("preempted", now_ns, carried(request)))
    for name in step.admitted:
        request = state.requests[name]
        _admit(state, request)
        events.append(Event("admitted", now_ns, carried(request)))
    if step.batch:
        state.blocks_used += _blocks_in(state, times)
        state.kv_tokens += step.batch * times
        state.beat += times
    for chunk in step.chunks:
        _prefill(state, state.requests[chunk.id], chunk, now_ns, events)
    while state.finishes and state.finishes[0][0] <= state.beat:
        finish_beat, _, request = heapq.heappop(state.finishes)
        if _is_current(request, finish_beat):
            release(state, request)
            events.append(_end(state, request, now_ns))
    return events


def steps_alike(state: Batching, step: Step) -> int:
    """Return how often the step can be repeated as it is, the last time perhaps finishing some.

    More than once only where it does nothing but decode: up to the next finish, or to the step
    for which KV blocks would run out.
    """
    if step.chunks or step.preempted or not step.batch:
        return 1
    while not _is_current(state.finishes[0][2], state.finishes[0][0]):
        heapq.heappop(state.finishes)
    steps = state.finishes[0][0] - state.beat
    size, free = state.limits.block_tokens, state.blocks_free
    if step.batch * -(-steps // size) <= free or _blocks_in(state, steps) <= free:
        return steps
    cycles = free // step.batch
    steps, free = cycles * size, free - cycles * step.batch
    while (wanted := state.phases[-(state.beat + steps) % size]) <= free:
        steps, free = steps + 1, free - wanted
    return steps


def settle(state: Batching, request: Request) -> Request:
    """Bring a decoding request's counters up to the present; returns it."""
    if request.status == "decoding" and (since := state.beat - request.joined_beat):
        request.produced_tokens += since
        request.computed_tokens += since
        request.joined_beat = state.beat
        request.version_last = state.version
    return request


def blocks_held(state: Batching, request: Request) -> int:
    """Return the KV blocks of a settled request."""
    tokens = {"prefilling": request.known_tokens, "decoding": request.computed_tokens}
    return -(-tokens.get(request.status, 0) // state.limits.block_tokens)


def release(state: Batching, request: Request) -> None:
    """Take a request out of the batch or its queue; it keeps its status, and its KV is gone."""
    settle(state, request)
    state.blocks_used -= blocks_held(state, request)
    if request.status == "decoding":
        _take(state.running, request)
        state.kv_tokens -= request.computed_tokens
        state.phases[(request.computed_tokens - state.beat) % state.limits.block_tokens] -= 1
    elif request.status == "prefilling":
        _take(state.running, request)
        _take(state.prefilling, request)
    elif request.status == "preempted":
        _take(state.preempted, request)
    else:
        del state.waiting[request.id]


def preempt(state: Batching, request: Request) -> None:
    """Drop a running request's KV and put it back, in its place, to be recomputed."""
    release(state, request)
    request.move("preempt")
    request.computed_tokens = 0
    request.preemptions += 1
    insort(state.preempted, request, key=_place)


def join(state: Batching, request: Request) -> None:
    """Let a request decode from the next step on; its KV is there and its blocks are counted."""
    request.joined_beat = state.beat
    state.kv_tokens += request.computed_tokens
    state.phases[(request.computed_tokens - state.beat) % state.limits.block_tokens] += 1
    finish_beat = state.beat + request.response_tokens - request.produced_tokens
    heapq.heappush(state.finishes, (finish_beat, request.place, request))


def _is_current(request: Request, finish_beat: int) -> bool:
    """Whether an entry of the finish queue still speaks of the request's present stay."""
    left = request.response_tokens - request.produced_tokens
    return request.status == "decoding" and request.joined_beat + left == finish_beat


def _blocks_wanted(state: Batching) -> int:
    """Return the blocks that the decoding requests need for their next token."""
    return state.phases[-state.beat % state.limits.block_tokens]


def _blocks_in(state: Batching, steps: int) -> int:
    """Return the blocks that the decoding requests need for their next `steps` tokens."""
    size = state.limits.block_tokens
    cycles, rest = divmod(steps, size)
    wanted = sum(state.phases[-(state.beat + i) % size] for i in range(rest))
    return cycles * state.decoding + wanted


def _victims(state: Batching) -> tuple[list[Request], int, int]:
    """Return whom to preempt, youngest first, and the batch and its KV tokens without them."""
    batch, kv_tokens, wanted, free = (
        state.decoding,
        state.kv_tokens,
        _blocks_wanted(state),
        state.blocks_free,
    )
    victims: list[Request] = []
    for request in reversed(state.running):
        if wanted <= free:
            break
        victims.append(settle(state, request))
        free += blocks_held(state, request)
        if request.status == "decoding":
            batch -= 1
            kv_tokens -= request.computed_tokens
            wanted -= request.computed_tokens % state.limits.block_tokens == 0
    return victims, batch, kv_tokens


def _admissible(state: Batching, budget: int, free: int) -> list[Request]:
    """Return whom to admit, in order: preempted ones first, then those that wait."""
    found: list[Request] = []
    seats = state.limits.sequences_max - len(state.running)
    budget -= sum(request.known_tokens - request.computed_tokens for request in state.prefilling)
    queues = (state.preempted, state.waiting.values() if state.admitting else ())
    for queue in queues:
        for request in queue:
            blocks = -(-request.known_tokens // state.limits.block_tokens)
            if not seats or budget <= 0 or blocks > free:
                return found
            found.append(request)
            seats, free, budget = seats - 1, free - blocks, budget - request.known_tokens
    return found


def _admit(state: Batching, request: Request) -> None:
    release(state, request)
    request.move("admit")
    insort(state.running, request, key=_place)
    insort(state.prefilling, request, key=_place)
    state.blocks_used += blocks_held(state, request)


def _prefill(
    state: Batching, request: Request, chunk: Chunk, now_ns: int, events: list[Event]
) -> None:
    request.computed_tokens += chunk.tokens
    if not chunk.last:
        return
    ends = request.produced_tokens + 1 == request.response_tokens
    if ends:
        release(state, request)
    else:
        _take(state.prefilling, request)
    request.produced_tokens += 1
    request.version_last = state.version
    if request.version_first is None:
        request.version_first, request.first_token_ns = state.version, now_ns
        events.append(Event("first_token", now_ns, carried(request)))
    if ends:
        events.append(_end(state, request, now_ns))
        return
    request.move("decode")
    join(state, request)


def _end(state: Batching, request: Request, now_ns: int) -> Event:
    """Finish a request that is out of the batch."""
    request.move("finish")
    del state.requests[request.id]
    return Event("finished", now_ns, carried(request))


def _take(ordered: list[Request], request: Request) -> None:
    del ordered[bisect_left(ordered, request.place, key=_place)]
