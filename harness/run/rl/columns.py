"""Samples as columns of numbers, kept and patched: a look at ten thousand of them takes little.

What never changes of a sample is told once, what a turn brings as it begins, and what engines tell
is read anew at every look. Of samples that have ended nothing changes any more. Lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.model.replay import ReplayRequest
from harness.run.generation.ledger import Entry
from harness.scheduling.view import Finished, Ints, Requests

FORGET_AT = 2
"""Times as many samples as are open: that many being known, the others are forgotten."""
ENDED_LEAST = 64
"""Samples that have ended, for which there is room at first."""


class Look(NamedTuple):
    """Open samples now; what each really has left, and contexts that its later turns compute."""

    requests: Requests
    truth: Ints
    truth_recomputes: Ints


class OpenColumns:
    """The open samples of a loop."""

    def __init__(self) -> None:
        self._row_of: dict[Entry, int] = {}
        self._ids: NDArray[np.object_] = np.empty(0, object)
        self._fixed = np.empty((4, 0), np.int64)
        """Group, batch, length, and contexts computed in all, by row."""
        self._turns = np.empty((3, 0), np.int64)
        """The present turn, prompts given so far, and contexts computed after the first turn's."""

    def look(self, entries: Sequence[Entry], index: Mapping[str, int]) -> Look:
        """Read the open samples; `index`: of each instance, by its name."""
        rows = self._rows(entries)
        turn, context, produced, resumed_ns = (
            _ints(map(attrgetter(name), entries), len(entries))
            for name in ("turn", "context_tokens", "produced_tokens", "resumed_ns")
        )
        for at in np.flatnonzero(turn != self._turns[0, rows]).tolist():
            self._turns[:, rows[at]] = _turn(entries[at])
        group, batch, length, in_all = self._fixed[:, rows]
        _, given, recomputed = self._turns[:, rows]
        known = context + produced
        requests = Requests(
            ids=tuple(self._ids[rows].tolist()),
            group=group,
            produced=known - given,
            context=known,
            at=_ints(map(index.get, map(attrgetter("at"), entries), repeat(-1)), len(entries)),
            running=resumed_ns > 0,
            batch=batch,
            recomputed=recomputed,
        )
        return Look(requests, length - requests.produced, in_all - recomputed)

    def _rows(self, entries: Sequence[Entry]) -> Ints:
        """Return the row of each in what is kept; those that are new get theirs."""
        if len(self._row_of) > FORGET_AT * len(entries):
            kept = [entry for entry in entries if entry in self._row_of]
            those = [self._row_of[entry] for entry in kept]
            self._row_of = {entry: row for row, entry in enumerate(kept)}
            self._ids, self._fixed = self._ids[those], self._fixed[:, those]
            self._turns = self._turns[:, those]
        rows = _ints(map(self._row_of.get, entries, repeat(-1)), len(entries))
        new = np.flatnonzero(rows < 0)
        if len(new):
            fresh = [entries[at] for at in new.tolist()]
            rows[new] = np.arange(len(new)) + len(self._row_of)
            self._row_of.update(zip(fresh, rows[new].tolist(), strict=True))
            ids = np.array([entry.id for entry in fresh], object)
            self._ids = np.concatenate([self._ids, ids])
            self._fixed = _joined(self._fixed, [_fixed(entry.request) for entry in fresh])
            self._turns = _joined(self._turns, [_turn(entry) for entry in fresh])
        return rows


class EndedColumns:
    """The samples of one batch that have ended, until a step has used them."""

    def __init__(self, batch: int, entries: Iterable[Entry] = ()) -> None:
        self.batch = batch
        self._entries: list[Entry] = []
        self._table = np.empty((3, ENDED_LEAST), np.int64)
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Take one more."""
        at = len(self._entries)
        if at == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)
        _, _, recomputed = _turn(entry)
        self._table[:, at] = group_of(entry.request), entry.total_tokens, recomputed
        self._entries.append(entry)

    def without(self, ids: Collection[str]) -> EndedColumns:
        """Return the others."""
        return EndedColumns(self.batch, (e for e in self._entries if e.id not in ids))

    def finished(self) -> Finished:
        """Return their lengths as a part of history."""
        group, length, recomputed = self._table[:, : len(self._entries)]
        return Finished(self.batch, group, length, recomputed)


def group_of(request: ReplayRequest) -> int:
    """Return the number that samples of one prompt share, unique over steps of the workload."""
    return request.batch << 32 | request.prompt


def _fixed(request: ReplayRequest) -> tuple[int, int, int, int]:
    in_all = _recomputed(request, len(request.turns))
    return group_of(request), request.batch, request.response_tokens, in_all


def _turn(entry: Entry) -> tuple[int, int, int]:
    given = entry.known_tokens - entry.total_tokens
    return entry.turn, given, _recomputed(entry.request, entry.turn + 1)


def _recomputed(request: ReplayRequest, turns: int) -> int:
    """Return the contexts with which turns after the first begin, in all of the first `turns`."""
    if len(request.turns) == 1:
        return 0
    upto = accumulate(turn.prompt_tokens + turn.response_tokens for turn in request.turns)
    begins = (after - turn.response_tokens for after, turn in zip(upto, request.turns, strict=True))
    return sum(list(begins)[1:turns])


def _joined(table: Ints, columns: Sequence[tuple[int, ...]]) -> Ints:
    return np.concatenate([table, np.array(columns, np.int64).T], axis=1)


def _ints(values: Iterable[Any], count: int) -> Ints:
    return np.fromiter(values, np.int64, count)
