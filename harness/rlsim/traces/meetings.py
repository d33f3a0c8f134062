"""Which nodes of different ranks are one communication: collectives, and sends with receives.

The n-th node of a group that a rank enters, by dependencies and then as they are listed, is the
n-th of all ranks of that list: so communicators count. The n-th send to a rank with a tag meets the
n-th receive there. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from harness.model.scenario import Op
from harness.rlsim.traces.graph import Graph, graph_of
from harness.rlsim.traces.model import (
    Collective,
    Program,
    Ranks,
    Recv,
    Send,
    Trace,
    communications,
    op_of,
    told,
    told_ranks,
)

NAMED_MAX = 8
"""Ranks or nodes that one message names."""
ALONE = -1
"""Instead of a meeting, of a node that meets nobody."""


class Seat(NamedTuple):
    """A node of a rank, by its place in the program."""

    rank: int
    place: int


@dataclass(eq=False, slots=True)
class Meeting:
    """One communication. `group` is "" for a send and its receive, which comes second."""

    number: int
    op: Op
    bytes: int
    group: str
    ranks: Ranks
    seats: tuple[Seat, ...]
    before: int = ALONE
    """The meeting of the same list that has to end first."""
    then: int = ALONE
    """The one after it."""


@dataclass
class Meetings:
    """All of a trace."""

    all: list[Meeting] = field(default_factory=list)
    at: dict[int, list[int]] = field(default_factory=dict)
    """By rank, for each place of its program: the meeting's number, or `ALONE`."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Laid:
    """A trace with its graphs and meetings; `problems` where ranks do not fit each other."""

    trace: Trace
    program: Mapping[int, Program]
    """By rank."""
    graph: Mapping[int, Graph]
    meetings: Meetings

    def told(self, seat: Seat) -> str:
        """Return how a message names a node of a rank."""
        return told(self.program[seat.rank].nodes[seat.place])


def lay(trace: Trace) -> Laid:
    """Return who meets whom; never raises, whatever is wrong with a trace."""
    program, graph = {}, {}
    for each in trace.programs:
        its = graph_of(each.nodes)
        for rank in each.ranks:
            program[rank], graph[rank] = each, its
    found = Meetings()
    for each in trace.programs:
        alone = [ALONE] * len(each.nodes)
        found.at |= {rank: alone.copy() for rank in each.ranks}
    _Matching(trace, graph, program, found).run()
    return Laid(trace, program, graph, found)


@dataclass
class _Matching:
    trace: Trace
    graph: Mapping[int, Graph]
    program: Mapping[int, Program]
    found: Meetings

    def run(self) -> None:
        """Fill `found`."""
        entries: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        ends: dict[tuple[int, int, int], tuple[list[Seat], list[Seat]]] = {}
        for program in self.trace.programs:
            self._enter(program, entries, ends)
        for group, by_rank in entries.items():
            self._group(group, by_rank)
        for way, (sends, recvs) in ends.items():
            self._pair(way, sends, recvs)

    def _enter(
        self,
        program: Program,
        entries: dict[str, dict[int, tuple[int, ...]]],
        ends: dict[tuple[int, int, int], tuple[list[Seat], list[Seat]]],
    ) -> None:
        """Sort the communications of a program's ranks, in the order in which they are entered."""
        ranks = [rank for rank in program.ranks if self.program[rank] is program]
        if not ranks:
            return
        nth = {at: n for n, at in enumerate(self.graph[ranks[0]].order)}
        listed = [(at, node) for at, node in communications(program.nodes) if at in nth]
        listed.sort(key=lambda one: nth[one[0]])
        by_group: dict[str, list[int]] = defaultdict(list)
        for at, node in listed:
            if isinstance(node, Collective):
                by_group[node.group].append(at)
                continue
            for rank in ranks:
                way = (rank, node.peer) if isinstance(node, Send) else (node.peer, rank)
                both = ends.setdefault((*way, node.tag), ([], []))
                both[isinstance(node, Recv)].append(Seat(rank, at))
        for group, places in by_group.items():
            entries[group] |= dict.fromkeys(ranks, tuple(places))

    # -- collectives -----------------------------------------------------------------------------

    def _group(self, group: str, by_rank: Mapping[int, tuple[int, ...]]) -> None:
        lists = self.trace.lists(group)
        if lists is None:
            known = ", ".join(self.trace.groups) or "none is named"
            self._wrong(f"{told_ranks(sorted(by_rank))}: no group {group!r}; there are: {known}")
            return
        inside = {rank for ranks in lists for rank in ranks}
        if outside := [rank for rank in sorted(by_rank) if rank not in inside]:
            rank = outside[0]
            node = told(self.program[rank].nodes[by_rank[rank][0]])
            self._wrong(f"{told_ranks(outside)}: {node}: not in group {group!r}")
        for ranks in lists:
            there = all(rank in self.program for rank in ranks)  # else that is told of the group
            if there and any(rank in by_rank for rank in ranks):
                self._list(group, ranks, by_rank)

    def _list(self, group: str, ranks: Ranks, by_rank: Mapping[int, tuple[int, ...]]) -> None:
        """Match what the ranks of one list enter, the n-th with the n-th."""
        rows = [by_rank.get(rank, ()) for rank in ranks]
        of_one_program = all(row is rows[0] for row in rows)
        before = ALONE
        for n, places in enumerate(zip_longest(*rows)):
            if not (of_one_program or self._alike(group, ranks, n, places)):
                return
            seats = tuple(map(Seat, ranks, places))
            before = self._meet(self._node(seats[0]), group, ranks, seats, before)

    def _alike(self, group: str, ranks: Ranks, n: int, places: Sequence[int | None]) -> bool:
        """Tell whether the ranks enter the same; say so where they do not."""
        where = f"group {group!r} of {told_ranks(ranks)}: the {_nth(n)} that is entered"
        entered = [
            (rank, self._node(Seat(rank, at)))
            for rank, at in zip(ranks, places, strict=True)
            if at is not None
        ]
        if len(entered) < len(ranks):
            rank, node = entered[0]
            missing = [rank for rank, at in zip(ranks, places, strict=True) if at is None]
            self._wrong(
                f"{where}: {told(node)} of rank {rank} ({_what(node)})"
                f" is not entered by {told_ranks(missing)}"
            )
            return False
        first = entered[0][1]
        op, size = op_of(first), first.bytes
        if all(op_of(node) == op and node.bytes == size for _, node in entered):
            return True
        kinds: dict[str, list[tuple[int, str]]] = {}
        for rank, node in entered:
            kinds.setdefault(_what(node), []).append((rank, told(node)))
        said = "; ".join(
            f"{told_ranks([rank for rank, _ in those])}: {what}, {those[0][1]}"
            for what, those in list(kinds.items())[:NAMED_MAX]
        )
        self._wrong(f"{where} differs, so that it would never end: {said}")
        return False

    # -- from one to one -------------------------------------------------------------------------

    def _pair(self, way: tuple[int, int, int], sends: list[Seat], recvs: list[Seat]) -> None:
        source, target, tag = way
        if source == target or not {source, target} <= self.program.keys():
            self._nobody(way, sends, recvs)
            return
        said = f"from rank {source} to rank {target} with tag {tag}"
        for send, recv in zip(sends, recvs, strict=False):
            sent, got = self._node(send), self._node(recv)
            if sent.bytes != got.bytes:
                self._wrong(
                    f"{said}: rank {source} {told(sent)} sends {sent.bytes} bytes,"
                    f" rank {target} {told(got)} receives {got.bytes}"
                )
            self._meet(sent, "", (source, target), (send, recv), ALONE)
        counts = f"({len(sends)} sent, {len(recvs)} received)"
        for other, left in (("receives", sends[len(recvs) :]), ("sends", recvs[len(sends) :])):
            if left:
                nodes = [f"rank {seat.rank} {told(self._node(seat))}" for seat in left[:NAMED_MAX]]
                if len(left) > NAMED_MAX:
                    nodes.append(f"... {len(left) - NAMED_MAX} more")
                self._wrong(f"{said}: nobody {other} what is in {', '.join(nodes)} {counts}")

    def _nobody(
        self, way: tuple[int, int, int], sends: Sequence[Seat], recvs: Sequence[Seat]
    ) -> None:
        for seat in (*sends, *recvs):
            peer = way[1] if seat in sends else way[0]
            why = "is its own peer" if peer == seat.rank else f"its peer is rank {peer}, not there"
            self._wrong(f"rank {seat.rank}: {told(self._node(seat))}: {why}")

    # -- both --------------------------------------------------------------------------------------

    def _node(self, seat: Seat) -> Collective | Send | Recv:
        node = self.program[seat.rank].nodes[seat.place]
        assert isinstance(node, Collective | Send | Recv)
        return node

    def _meet(
        self,
        node: Collective | Send | Recv,
        group: str,
        ranks: Ranks,
        seats: tuple[Seat, ...],
        before: int,
    ) -> int:
        number = len(self.found.all)
        meeting = Meeting(number, op_of(node), node.bytes, group, ranks, seats, before)
        self.found.all.append(meeting)
        if before != ALONE:
            self.found.all[before].then = number
        for rank, place in seats:
            self.found.at[rank][place] = number
        return number

    def _wrong(self, text: str) -> None:
        self.found.problems.append(text)


def _what(node: Collective | Send | Recv) -> str:
    return f"{op_of(node)} of {node.bytes} bytes"


def _nth(n: int) -> str:
    number = n + 1
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def unmet(laid: Laid) -> Iterator[Seat]:
    """Yield communications that meet nobody: who waits in them waits for ever."""
    for rank, program in laid.program.items():
        for place, _ in communications(program.nodes):
            if laid.meetings.at[rank][place] == ALONE:
                yield Seat(rank, place)
