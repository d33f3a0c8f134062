"""Flows side by side in arrays: who they are, where they go, what is left of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.rlsim.kernels import Floats
from harness.rlsim.paths import Ints, Paths


class Batch(NamedTuple):
    """Flows: ids, paths, bytes that are left of each, and how long its last byte is under way."""

    ids: Ints
    paths: Paths
    left_bytes: Floats
    latency_ns: Ints

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Return all flows of one or more, by their ids."""
        every = cls(
            np.concatenate([one.ids for one in batches]),
            Paths.joined([one.paths for one in batches]),
            np.concatenate([one.left_bytes for one in batches]),
            np.concatenate([one.latency_ns for one in batches]),
        )
        return every if (np.diff(every.ids) > 0).all() else every.take(np.argsort(every.ids))

    def take(self, flows: Ints) -> Batch:
        """Return those at these places, in the order given."""
        return Batch(
            self.ids[flows], self.paths.take(flows), self.left_bytes[flows], self.latency_ns[flows]
        )

    def without(self, ids: Collection[int]) -> Batch:
        """Return the others."""
        if not ids:
            return self
        return self.take(np.flatnonzero(~np.isin(self.ids, np.fromiter(ids, np.int64))))

    def rerouted(self, paths: Mapping[int, Sequence[int]]) -> Batch:
        """Return the same flows, some of them on other paths."""
        if not paths:
            return self
        turned = self.take(np.searchsorted(self.ids, sorted(paths)))
        turned = turned._replace(paths=Paths.of([paths[id_] for id_ in sorted(paths)]))
        return Batch.joined([self.without(paths), turned])
