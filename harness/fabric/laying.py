"""Which uplinks and trunks are free, and how circuits make room for one more. Pure.

ToRs and core switches are *vertices*, aggregation switches are *planes*: a plane holds pairs of
vertices, each vertex as often as it has uplinks (a core: trunks) there. A link between ToRs of one
plane is one such *hop*; between ToRs that share none it is two, ToR-core on a plane of the one and
core-ToR on a plane of the other. So both tiers are one problem, edge colouring, and where no plane
has room at both ends, hops swap two planes along a Kempe chain (alternating path) until one has.

On duplex fabrics a hop takes both fibres of its ports. Where every switch is simplex, links lead
one way, and a vertex has two *ends*: what it sends by, and what it gets by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product

from harness.errors import UsageError
from harness.fabric.links import Link, Trunk, Uplink
from harness.fabric.topology import Topology

Edge = tuple[int, int]
"""Two ToRs by index: the smaller first where duplex, the sender first where one-way."""
Slot = Uplink | Trunk
Part = tuple[Slot, int]
"""Of an uplink or a trunk, the side that a hop takes (see `Board.ends`)."""
CHAINS_MAX = 16
"""Pairs of planes tried for one hop; more help only where circuits stay that are in the way."""


class Hop:
    """Two ends on a plane (-1: on none); part of a line."""

    __slots__ = ("from_", "line", "plane", "to")

    def __init__(self, line: Line, from_: int, to: int) -> None:
        self.line, self.from_, self.to, self.plane = line, from_, to, -1


class Line:
    """A link to be: its edge, and one hop, or two over a core."""

    __slots__ = ("edge", "hops", "lit", "lit_on", "stays")

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.hops: tuple[Hop, ...] = ()
        self.lit: Link | None = None
        """The lit link that it is while it lies on the planes `lit_on`."""
        self.lit_on: tuple[int, ...] = ()
        self.stays = False
        """Whether it does not move to make room."""

    def unmoved(self) -> Link | None:
        """Return the lit link that it is, where it lies as it did."""
        return self.lit if tuple(hop.plane for hop in self.hops) == self.lit_on else None


class Board:
    """What lies where. Every change is logged, so that what was tried can be undone."""

    def __init__(
        self, topology: Topology, tors: Sequence[str], broken: frozenset[str] = frozenset()
    ) -> None:
        self.tors = tuple(tors)
        self.one_way = is_one_way(topology)
        cores = dict.fromkeys(trunk.core for trunk in topology.trunks)
        self._vertex_of = {name: k for k, name in enumerate((*self.tors, *cores))}
        self._cores = range(len(self.tors), len(self._vertex_of))
        self._plane_of = {name: k for k, name in enumerate(topology.switches)}
        self._slots: dict[tuple[int, int], list[Slot]] = {}
        """Whole uplinks and trunks, by the vertex and the plane that they join."""
        for slot in whole(topology, broken):
            self._slots.setdefault(self._home(slot), []).append(slot)
        ends, planes = 2 * len(self._vertex_of), len(self._plane_of)
        self._left = [[0] * planes for _ in range(ends)]
        self._at: list[list[list[Hop]]] = [[[] for _ in range(planes)] for _ in range(ends)]
        """Hops by end and plane."""
        self.wired = [0] * ends
        """Per end, the planes (as bits) in which it has ports at all."""
        for (vertex, plane), slots in self._slots.items():
            for end in (2 * vertex, 2 * vertex + 1)[: 1 + self.one_way]:
                self._left[end][plane] = len(slots)
                self.wired[end] |= 1 << plane
        self.free = list(self.wired)
        """Per end, the planes in which it has a port left."""
        self.lines: dict[Edge, list[Line]] = {}
        self.log: list[tuple[Hop, int]] = []

    def _home(self, slot: Slot) -> tuple[int, int]:
        """Return the vertex and the plane that an uplink or a trunk joins; -1 where unknown."""
        if isinstance(slot, Uplink):
            vertex, plane = slot.tor, slot.switch
        else:
            vertex, plane = slot.core, slot.aggregation
        return self._vertex_of.get(vertex, -1), self._plane_of.get(plane, -1)

    # -- edges and their ends ----------------------------------------------------------------------

    def edge(self, a: str, b: str) -> Edge:
        """Return the edge of a circuit from a to b."""
        i, j = self._vertex_of[a], self._vertex_of[b]
        return (i, j) if self.one_way or i < j else (j, i)

    def names(self, edge: Edge) -> tuple[str, str]:
        """Return the ToRs of an edge."""
        return self.tors[edge[0]], self.tors[edge[1]]

    def ends(self, a: int, b: int) -> tuple[int, int]:
        """Return the ends that a hop from vertex a to b takes."""
        return 2 * a, 2 * b + self.one_way

    def shares(self, edge: Edge) -> bool:
        """Whether both ToRs have whole uplinks on one switch: then they go over no core."""
        x, y = self.ends(*edge)
        return bool(self.wired[x] & self.wired[y])

    def possible(self, edge: Edge) -> bool:
        """Whether the cabling lets the two be joined, if all were free."""
        return self.shares(edge) or bool(self._over(edge, self.wired))

    def _over(self, edge: Edge, room: Sequence[int]) -> list[int]:
        """Return the cores that an edge may go over where ends have `room`; the widest first."""
        wide = []
        for core in self._cores:
            (a, up), (down, b) = self.ends(edge[0], core), self.ends(core, edge[1])
            if self.wired[a] & self.wired[up] and self.wired[down] & self.wired[b]:
                there, back = room[a] & room[up], room[down] & room[b]
                wide.append((-min(there.bit_count(), back.bit_count()), core))
        return [core for _, core in sorted(wide)]

    def core_ends(self, edge: Edge) -> Iterator[int]:
        """Yield the ends at the cores that an edge may go over."""
        for core in () if self.shares(edge) else self._over(edge, self.wired):
            yield self.ends(edge[0], core)[1]
            yield self.ends(core, edge[1])[0]

    def hops_at(self, end: int) -> Iterator[Hop]:
        """Yield the hops that take a port of this end."""
        for plane in _bits(self.wired[end]):
            yield from self._at[end][plane]

    # -- one line more or less ---------------------------------------------------------------------

    def place(self, edge: Edge) -> bool:
        """Lay one line more for an edge; others may swap planes. False: changed nothing."""
        x, y = self.ends(*edge)
        if not (self.free[x] and self.free[y]):
            return False
        if self.wired[x] & self.wired[y]:
            return self._lay(edge, ((x, y),))
        return any(
            self._lay(edge, (self.ends(edge[0], core), self.ends(core, edge[1])))
            for core in self._over(edge, self.free)
        )

    def _lay(self, edge: Edge, hops: Iterable[tuple[int, int]]) -> bool:
        """Lay a line of hops between these ends. False: changed nothing."""
        mark, line = len(self.log), Line(edge)
        line.hops = tuple([Hop(line, x, y) for x, y in hops])
        for hop in line.hops:
            plane = self._room(hop.from_, hop.to)
            if plane < 0:
                self.undo(mark)
                return False
            self._move(hop, plane)
        return True

    def keep(self, lit: Iterable[Link], most: Mapping[Edge, float], *, stay: bool) -> None:
        """Lay lit links as they lie: of each edge so many at most, and nothing broken or taken.

        Those that `stay` are not moved to make room.
        """
        taken: set[Part] = set()
        for link in sorted(lit, key=_ports):
            parts = _parts(link, self.one_way)
            used = {part for hop in parts for part in hop}
            if link.both == self.one_way or used & taken or not self._meet(parts):
                continue
            edge = self.edge(link.a.tor, link.b.tor)
            if len(self.lines.get(edge, ())) < most.get(edge, 0):
                taken |= used
                self._keep(Line(edge), link, parts, stay=stay)

    def _meet(self, parts: Sequence[tuple[Part, Part]]) -> bool:
        """Whether all parts are whole, those of a hop on one plane, and those at a core on one."""
        slots = [slot for hop in parts for slot, _ in hop]
        here = all(slot in self._slots.get(self._home(slot), ()) for slot in slots)
        homes = [(self._home(a), self._home(b)) for (a, _), (b, _) in parts]
        level = all(a[1] == b[1] for a, b in homes)
        joined = all(up[0] == down[0] for (_, up), (down, _) in pairwise(homes))
        return bool(parts) and here and level and joined

    def _keep(
        self, line: Line, link: Link, parts: Sequence[tuple[Part, Part]], *, stay: bool
    ) -> None:
        homes = [(self._home(a), self._home(b)) for (a, _), (b, _) in parts]
        line.lit, line.stays, line.lit_on = link, stay, tuple(plane for (_, plane), _ in homes)
        line.hops = tuple(Hop(line, *self.ends(a, b)) for (a, _), (b, _) in homes)
        for hop, plane in zip(line.hops, line.lit_on, strict=True):
            self._move(hop, plane)

    def remove(self, line: Line) -> None:
        """Take a line off the board."""
        for hop in line.hops:
            self._move(hop, -1)

    def undo(self, mark: int) -> None:
        """Undo all changes since the log had `mark` of them."""
        while len(self.log) > mark:
            self._put(*self.log.pop())

    def _move(self, hop: Hop, plane: int) -> None:
        self.log.append((hop, hop.plane))
        self._put(hop, plane)

    def _put(self, hop: Hop, plane: int) -> None:
        before, hop.plane = hop.plane, plane
        left, free, at = self._left, self.free, self._at
        for end in (hop.from_, hop.to):
            if before >= 0:
                at[end][before].remove(hop)
                left[end][before] += 1
                if left[end][before] == 1:
                    free[end] |= 1 << before
            if plane >= 0:
                at[end][plane].append(hop)
                left[end][plane] -= 1
                if left[end][plane] == 0:
                    free[end] &= ~(1 << plane)
        if (before < 0) != (plane < 0) and hop is hop.line.hops[0]:
            self.counted(hop.line, 1 if before < 0 else -1)

    def counted(self, line: Line, step: int) -> None:
        """Note that a line has come (`step` 1) or gone (-1)."""
        lines = self.lines.setdefault(line.edge, [])
        lines.append(line) if step > 0 else lines.remove(line)

    # -- making room -------------------------------------------------------------------------------

    def _room(self, x: int, y: int) -> int:
        """Return a plane in which both ends have a port left, after swaps if need be; or -1."""
        both = self.free[x] & self.free[y]
        if both:
            return _first(both)
        pairs = product(_bits(self.free[x] & self.wired[y]), _bits(self.free[y] & self.wired[x]))
        for _, (plane, other) in zip(range(CHAINS_MAX), pairs, strict=False):
            mark = len(self.log)
            if self._swap(y, plane, other) and self._left[x][plane] > 0 < self._left[y][plane]:
                return plane
            self.undo(mark)
        return -1

    def _swap(self, end: int, plane: int, other: int) -> bool:
        """Move a hop of `end` from `plane` to `other`, what is in its way back, and so on.

        False: the chain met a circuit that stays, or itself; its changes are to be undone.
        """
        met: set[int] = set()
        while True:
            hop = next((h for h in self._at[end][plane] if self._may_move(h, met, other)), None)
            if hop is None:
                return False
            met.add(id(hop))
            self._move(hop, other)
            end = hop.from_ + hop.to - end
            if self._left[end][other] >= 0:
                return True
            plane, other = other, plane

    def _may_move(self, hop: Hop, met: set[int], plane: int) -> bool:
        wired = self.wired[hop.from_] & self.wired[hop.to]
        return not hop.line.stays and id(hop) not in met and bool(wired >> plane & 1)

    # -- links -------------------------------------------------------------------------------------

    def links(self) -> frozenset[Link]:
        """Return what lies on the board; lit links that did not move are the same values."""
        lines = [line for lines in self.lines.values() for line in lines]
        same = {id(line): link for line in lines if (link := line.unmoved())}
        taken = {
            part for link in same.values() for hop in _parts(link, self.one_way) for part in hop
        }
        left: dict[tuple[int, int], list[Slot]] = {}
        made = [self._link(line, taken, left) for line in lines if id(line) not in same]
        return frozenset([*same.values(), *made])

    def _link(
        self, line: Line, taken: Collection[Part], left: dict[tuple[int, int], list[Slot]]
    ) -> Link:
        """Give a line the first uplinks and trunks that are not taken; `left`, by end and plane."""
        found: list[Slot] = []
        for hop in line.hops:
            for end in (hop.from_, hop.to):
                if (end, hop.plane) not in left:
                    slots, side = self._slots[end // 2, hop.plane], end % 2
                    there = [slot for slot in slots if not taken or (slot, side) not in taken]
                    left[end, hop.plane] = there[::-1]
                found.append(left[end, hop.plane].pop())
        a, *trunks, b = found
        return _link_of(a, trunks, b, both=not self.one_way)


def _link_of(a: Slot, trunks: Sequence[Slot], b: Slot, *, both: bool) -> Link:
    """Return the link between two uplinks; one that leads both ways starts at the lesser."""
    assert isinstance(a, Uplink)
    assert isinstance(b, Uplink)
    over = tuple(trunk for trunk in trunks if isinstance(trunk, Trunk))
    return Link(b, a, over[::-1]) if both and b < a else Link(a, b, over, both=both)


def is_one_way(topology: Topology) -> bool:
    """Return whether links lead one way: every switch is simplex. One duplex switch makes all so.

    A simplex switch carries both ways of a link just as well.
    """
    return bool(topology.planes) and not any(p.duplex for p in topology.planes.values())


def whole(topology: Topology, broken: frozenset[str]) -> Iterator[Slot]:
    """Yield the uplinks and trunks that are not broken, nor their switch.

    Raises `UsageError` where a name of `broken` is none of the topology's.
    """
    unknown = set(broken)
    slots: tuple[Slot, ...] = (*topology.uplinks, *topology.trunks)
    if not broken:
        yield from slots
        return
    for slot in slots:
        names = _names(slot)
        if broken.isdisjoint(names):
            yield slot
        unknown.difference_update(names)
    if unknown := unknown.difference(topology.switches):
        raise UsageError(
            f"broken: {min(unknown)!r} is no uplink, trunk or switch of this bench; expected "
            'such as "tor0:u1", "agg0:5" or "agg0"'
        )


def _names(slot: Slot) -> tuple[str, ...]:
    """Return what breaks an uplink or a trunk: its own names, and its switches."""
    if isinstance(slot, Uplink):
        return str(slot), slot.switch
    return str(slot), f"{slot.core}:{slot.ingress}", slot.aggregation, slot.core


def _parts(link: Link, one_way: bool) -> list[tuple[Part, Part]]:
    """Return the two slots of each hop, with the side that it takes of each."""
    to = int(one_way)
    if not link.trunks:
        return [((link.a, 0), (link.b, to))]
    if len(link.trunks) != 2:
        return []
    up, down = link.trunks
    return [((link.a, 0), (up, to)), ((down, 0), (link.b, to))]


def _ports(link: Link) -> tuple[str, ...]:
    """Order links by their ToR ports."""
    return link.a.tor, link.a.device, link.b.tor, link.b.device


def _first(planes: int) -> int:
    return (planes & -planes).bit_length() - 1


def _bits(planes: int) -> Iterator[int]:
    while planes:
        yield _first(planes)
        planes &= planes - 1
