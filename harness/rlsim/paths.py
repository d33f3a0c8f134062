"""The links that flows take, one after another in arrays: 8,192 paths are no 8,192 lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Paths:
    """Flow i takes `links[starts[i]:starts[i + 1]]`: indices from 0 on. Equal only to itself."""

    starts: Ints
    links: Ints

    @classmethod
    def of(cls, paths: Paths | Sequence[Sequence[int]]) -> Paths:
        """Take what is given as sequences, a flow each; what is already one stays as it is."""
        if isinstance(paths, Paths):
            return paths
        lengths = np.fromiter(map(len, paths), np.int64, len(paths))
        links = np.fromiter(chain.from_iterable(paths), np.int64, int(lengths.sum()))
        return cls(_starts(lengths), links)

    @classmethod
    def joined(cls, all_: Sequence[Paths]) -> Paths:
        """Return those of the first, then of the next."""
        starts = _starts(np.concatenate([one.lengths for one in all_]))
        return cls(starts, np.concatenate([one.links for one in all_]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """Links of each flow."""
        return np.diff(self.starts)

    def path(self, flow: int) -> Ints:
        """Return the links of one flow."""
        return self.links[self.starts[flow] : self.starts[flow + 1]]

    def take(self, flows: Ints) -> Paths:
        """Return those of these flows, in the order given."""
        lengths = self.lengths[flows]
        starts = _starts(lengths)
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return Paths(starts, self.links[np.repeat(self.starts[flows], lengths) + within])

    def checked(self, links: int) -> Paths:
        """Return itself; raises `ValueError` where it names a link that is none of so many."""
        if len(self.links) and not (self.links.min() >= 0 and self.links.max() < links):
            wrong = self.links[(self.links < 0) | (self.links >= links)][0]
            raise ValueError(f"there is no link {wrong}: they are 0 to {links - 1}")
        return self


def _starts(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
