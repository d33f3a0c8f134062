"""The pool as policies see it, made from the fleet and its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from harness.clock import NS_PER_S
from harness.model.layout import Layout, Mix
from harness.run.generation.fleet import Fleet
from harness.run.generation.ledger import Entry
from harness.run.generation.places import Place
from harness.scheduling.view import Finished, Instance, Ints, Moved, Requests, View


def view_of(
    fleet: Fleet,
    entries: Sequence[Entry],
    history: Iterable[Finished],
    *,
    cap_tokens: int,
    turns_max: int = 1,
    coming: Sequence[int] = (),
    switched_s: float | None = None,
    switches: int = 0,
    moved: Iterable[Moved] = (),
    knows: bool = False,
) -> View:
    """Return what there is to see; `entries` are those that are open, `history` ends with now.

    `coming`: requests of each batch that follows. `knows`: the true lengths are seen too.
    """
    places = [place for place in fleet.places.values() if not place.dead]
    return View(
        now_s=fleet.session.bench.clock.now_ns() / NS_PER_S,
        instances=tuple(_instance(fleet, place) for place in places),
        requests=_requests(entries, {place.name: i for i, place in enumerate(places)}),
        history=tuple(history),
        gpus_of=fleet.usable,
        cap_tokens=cap_tokens,
        layout=Mix((fleet.layout,)) if isinstance(fleet.layout, Layout) else fleet.layout,
        turns_max=turns_max,
        coming=coming[0] if coming else 0,
        coming_batches=len(coming),
        switched_s=switched_s,
        switches=switches,
        changing=fleet.changing.locked(),
        moved=tuple(moved),
        truth=truth_of(entries) if knows else None,
        truth_recomputes=_ints(_recomputed(e, e.turn + 1) for e in entries) if knows else None,
    )


def truth_of(entries: Sequence[Entry]) -> Ints:
    """Return how many tokens each still has to produce, over all of its turns: for an oracle."""
    return np.array([e.request.response_tokens - e.total_tokens for e in entries], dtype=np.int64)


def finished_of(batch: int, entries: Iterable[Entry]) -> Finished:
    """Return trajectories that have ended as a part of history."""
    entries = list(entries)
    return Finished(
        batch=batch,
        group=_ints(group_of(entry) for entry in entries),
        length=_ints(entry.total_tokens for entry in entries),
        recomputed=_ints(_recomputed(entry, 1, entry.turn + 1) for entry in entries),
    )


def group_of(entry: Entry) -> int:
    """Return the number that samples of one prompt share, unique over steps of the workload."""
    return entry.request.batch << 32 | entry.request.prompt


def _instance(fleet: Fleet, place: Place) -> Instance:
    capacity, stats = place.capacity, place.stats
    return Instance(
        name=place.name,
        node=place.node,
        layout=place.instance.layout,
        accepting=place.accepting,
        sequences_max=capacity.sequences_max,
        kv_capacity_tokens=capacity.blocks * capacity.block_tokens,
        kv_used_tokens=fleet.ledger.known_tokens_at(place.name) + sum(place.moving.values()),
        running=stats.running if stats else 0,
        waiting=(stats.waiting if stats else 0) + place.sent_since,
        tokens_per_s=place.tokens_per_s,
        length_max_tokens=place.length_max_tokens,
    )


def _requests(entries: Sequence[Entry], index: dict[str, int]) -> Requests:
    return Requests(
        ids=tuple(entry.id for entry in entries),
        group=_ints(map(group_of, entries)),
        produced=_ints(entry.total_tokens for entry in entries),
        context=_ints(entry.known_tokens for entry in entries),
        at=_ints(index.get(entry.at, -1) for entry in entries),
        running=np.array([entry.resumed_ns > 0 for entry in entries], dtype=np.bool_),
        batch=_ints(entry.request.batch for entry in entries),
        recomputed=_ints(_recomputed(entry, 1, entry.turn + 1) for entry in entries),
    )


def _recomputed(entry: Entry, first: int, end: int | None = None) -> int:
    """Return the contexts with which these turns begin, in all."""
    turns = entry.request.turns
    upto = accumulate(turn.prompt_tokens + turn.response_tokens for turn in turns)
    begins = [after - turn.response_tokens for after, turn in zip(upto, turns, strict=True)]
    return sum(begins[first:end])


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
