"""The pool as policies see it, made from the fleet and its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from harness.clock import NS_PER_S
from harness.model.layout import Layout, Mix
from harness.run.generation.fleet import Fleet
from harness.run.generation.ledger import Entry
from harness.run.generation.places import Place
from harness.run.rl.columns import OpenColumns
from harness.scheduling.view import Finished, Instance, Ints, Moved, View


def view_of(
    fleet: Fleet,
    entries: Sequence[Entry],
    columns: OpenColumns,
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

    `columns`: what is kept of open entries from look to look. `coming`: requests of each batch
    that follows. `knows`: the true lengths are seen too.
    """
    places = [place for place in fleet.places.values() if not place.dead]
    seen = columns.look(entries, {place.name: i for i, place in enumerate(places)})
    return View(
        now_s=fleet.session.bench.clock.now_ns() / NS_PER_S,
        instances=tuple(_instance(fleet, place) for place in places),
        requests=seen.requests,
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
        truth=seen.truth if knows else None,
        truth_recomputes=seen.truth_recomputes if knows else None,
    )


def truth_of(entries: Sequence[Entry]) -> Ints:
    """Return how many tokens each still has to produce, over all of its turns: for an oracle."""
    return np.array([e.request.response_tokens - e.total_tokens for e in entries], dtype=np.int64)


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
