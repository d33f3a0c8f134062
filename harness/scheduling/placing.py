"""Where the instances of hundreds of mixes sit, in numbers, and which of them are there. Pure.

`harness.model.placement` names every instance. A planner that compares mixes on a hundred nodes
asks only how many there are of each kind, in which order, and which are there already. So all mixes
are filled into the nodes at once, nodes that are made up alike are placed once, and an instance is
a number: of its node, its span of GPUs and its layout. Names follow where they are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np

from harness.model.layout import Layout, Mix
from harness.model.placement import place
from harness.scheduling.view import Instance, Ints

COUNTS = 8
"""So many ways to divide the GPUs between two kinds of instances are looked at, at most."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Instances of one layout within a mix: `at`, numbers of them in it; `there`: see below."""

    layout: Layout
    at: Ints
    there: Ints

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.at)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A mix on its nodes, seen from the instances that there are.

    In the order of nodes: `names`, the `kind` of each, and which instance it is of those that are
    `there`, -1 for a new one. `kept`: it is what there is.
    """

    kinds: tuple[Kind, ...]
    kind: Ints
    there: Ints
    kept: bool
    mix: Mix
    _seats: Ints
    _ground: Ground

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its instances."""
        return self._ground.names(self._seats)


class Ground:
    """The nodes of a pool, and the kinds of instances that may be on them.

    Every instance has a number, its seat.
    """

    def __init__(self, gpus_of: Mapping[str, int], kinds: Sequence[Layout]) -> None:
        self._gpus_of, self._kinds = gpus_of, kinds
        self._gpus = np.array([*gpus_of.values()], np.int64)
        self._nodes = (*gpus_of, "")  # the last one for names that do not begin with their node's
        self._node_at = {node: at for at, node in enumerate(self._nodes)}
        self._numbers: dict[tuple[str, Layout], int] = {}
        self._tails: list[str] = []
        self._made_up: dict[tuple[Mix, int], tuple[Ints, Ints]] = {}

    def candidates(self, instances: Sequence[Instance], *, three: bool) -> list[Candidate]:
        """Return the mixes worth a look, and last what there is, if it is of as few kinds."""
        placed = [(mix, *self._placed(mix, counts)) for mix, counts in self._mixes(three)]
        here = self._here(instances)
        index = np.full(len(self._tails) * len(self._nodes), -1)
        index[here] = np.arange(len(here))
        found = [self._candidate(*each, index) for each in placed]
        found = [one for one in found if not one.kept]
        mix = mix_of(instance.layout for instance in instances)
        if 0 < len(mix) <= 2 + three:
            layouts = [one_of(part) for part in mix]
            kind = np.array([layouts.index(each.layout) for each in instances])
            found.append(self._candidate(mix, kind, here, index))
        return found

    def names(self, seats: Ints) -> tuple[str, ...]:
        """Return the names of instances, by their seats."""
        numbers, nodes = np.divmod(seats, len(self._nodes))
        found = zip(nodes.tolist(), numbers.tolist(), strict=True)
        return tuple(self._nodes[node] + self._tails[number] for node, number in found)

    # -- inside ---------------------------------------------------------------------------------

    def _mixes(self, three: bool) -> list[tuple[Mix, Ints]]:
        """Return the mixes worth a look, and how many of each part a node has (parts, nodes).

        Every kind alone, every two that share the GPUs, or three.
        """
        found: list[tuple[Mix, Ints]] = []
        kinds = self._kinds
        for kind in kinds:
            alone = self._gpus // kind.gpus_per_instance
            if alone.sum():
                found.append((Mix((_times(kind, int(alone.sum())),)), alone[None]))
        for several in [*combinations(kinds, 2), *(combinations(kinds, 3) if three else ())]:
            found += self._shared(several)
        return found

    def _shared(self, kinds: Sequence[Layout]) -> list[tuple[Mix, Ints]]:
        """Return mixes of several kinds: so many of all but the first, which has what is left."""
        small, *larger = kinds
        rooms = [int((self._gpus // kind.gpus_per_instance).sum()) for kind in larger]
        counts = np.array([*product(*map(_spaced, rooms))], np.int64).reshape(-1, len(larger))
        if not len(counts):
            return []
        before, free = self._filled(larger[::-1], counts[:, ::-1])
        rest = (free // small.gpus_per_instance).sum(axis=1)
        fits = (before.sum(axis=2) == counts[:, ::-1]).all(axis=1) & (rest > 0)
        wanted = np.concatenate([rest[:, None], counts], axis=1)[fits]
        order = sorted(range(len(kinds)), key=lambda at: -kinds[at].gpus_per_instance)
        there, _ = self._filled([kinds[at] for at in order], wanted[:, order])
        there = there[:, np.argsort(order)]
        mixes = [Mix(map(_times, kinds, row)) for row in wanted.tolist()]
        for mix, counted in zip(mixes, there.sum(axis=2).tolist(), strict=True):
            if counted != [part.instances for part in mix]:
                place(mix, self._gpus_of)  # raises why it does not fit
        return list(zip(mixes, there, strict=True))

    def _filled(self, kinds: Sequence[Layout], wanted: Ints) -> tuple[Ints, Ints]:
        """Fill nodes with instances of these kinds, one after another: (mixes, kinds) wanted.

        Return how many each node has (mixes, kinds, nodes), and the GPUs left free (mixes, nodes).
        """
        free = np.tile(self._gpus, (len(wanted), 1))
        there = np.empty((*wanted.shape, len(self._gpus)), np.int64)
        for at, kind in enumerate(kinds):
            room = free // kind.gpus_per_instance
            before = np.cumsum(room, axis=1) - room
            there[:, at] = np.clip(wanted[:, at, None] - before, 0, room)
            free -= there[:, at] * kind.gpus_per_instance
        return there, free

    def _placed(self, mix: Mix, counts: Ints) -> tuple[Ints, Ints]:
        """Return the part and the seat of each instance, in the order of nodes."""
        columns = np.concatenate([counts, self._gpus[None]])
        edges = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        kinds, seats = [], []
        for first, end in pairwise([0, *edges.tolist(), len(self._gpus)]):
            alike = columns[:, first].tolist()
            parts = Mix(_times(part, count) for part, count in zip(mix, alike[:-1], strict=True))
            kind, number = self._node(parts, alike[-1])
            kinds.append(np.tile(kind, end - first))
            seats.append((number * len(self._nodes) + np.arange(first, end)[:, None]).ravel())
        return np.concatenate(kinds), np.concatenate(seats)

    def _node(self, parts: Mix, gpus: int) -> tuple[Ints, Ints]:
        """Return the parts of which a node's instances are, and their spans' numbers."""
        known = self._made_up.get((parts, gpus))
        if known is None:
            alone = Mix(part for part in parts if part.instances)
            layouts = [one_of(part) for part in parts]
            placed = place(alone, {"": gpus})[""]
            kind = np.array([layouts.index(each.layout) for each in placed], np.int64)
            number = np.array([self._number(each.name, each.layout) for each in placed], np.int64)
            known = self._made_up[parts, gpus] = kind, number
        return known

    def _number(self, tail: str, layout: Layout) -> int:
        """Return the number of an instance's span of GPUs, as its name tells it, and layout."""
        number = self._numbers.setdefault((tail, layout), len(self._tails))
        if number == len(self._tails):
            self._tails.append(tail)
        return number

    def _here(self, instances: Sequence[Instance]) -> Ints:
        """Return the seats of the instances that there are."""
        seats = []
        for each in instances:
            node = each.node if each.name.startswith(each.node) else ""
            number = self._number(each.name[len(node) :], each.layout)
            seats.append(number * len(self._nodes) + self._node_at[node])
        return np.array(seats, np.int64)

    def _candidate(self, mix: Mix, kind: Ints, seats: Ints, index: Ints) -> Candidate:
        there = index[seats]
        at_of = [np.flatnonzero(kind == part) for part in range(len(mix))]
        kinds = [Kind(one_of(part), at, there[at]) for part, at in zip(mix, at_of, strict=True)]
        kept = len(there) == (index >= 0).sum() and bool((there >= 0).all())
        return Candidate(tuple(kinds), kind, there, kept, mix, seats, self)


def mix_of(layouts: Iterable[Layout]) -> Mix:
    """Return the mix of these instances, the smallest ones first."""
    counts = Counter(layouts)
    ordered = sorted(counts, key=lambda layout: (layout.gpus_per_instance, str(layout)))
    return Mix(_times(layout, counts[layout]) for layout in ordered)


def one_of(layout: Layout) -> Layout:
    """Return the layout of one instance."""
    return _times(layout, 1)


def _times(layout: Layout, instances: int) -> Layout:
    return Layout(instances, layout.tp, layout.pp, layout.ep, layout.dp)


def _spaced(most: int) -> list[int]:
    """Return numbers from 1 to `most`, all of them or few that grow."""
    if most <= COUNTS:
        return list(range(1, most + 1))
    return sorted({round(float(x)) for x in np.geomspace(1, most, COUNTS)})
