"""How far ranks got, and who waits for whom where they get no further. Pure.

Run through without any time, this finds what would never end, whatever the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.rlsim.traces.meetings import ALONE, Laid, Meeting, Seat, unmet
from harness.rlsim.traces.model import told_ranks

NAMED_MAX = 12
"""Meetings, or steps of a circle, that are named."""


class Standing:
    """Counts what each node still waits for, and who has come to each meeting."""

    def __init__(self, laid: Laid) -> None:
        self.laid = laid
        self.waits = {rank: list(graph.waits) for rank, graph in laid.graph.items()}
        self.came = [0] * len(laid.meetings.all)
        self.is_over = [False] * len(laid.meetings.all)
        self.left = {rank: len(program.nodes) for rank, program in laid.program.items()}
        """Nodes of each rank that have not ended."""

    def first(self) -> Iterator[tuple[int, int]]:
        """Yield the nodes that wait for none: rank and place."""
        for rank, graph in self.laid.graph.items():
            yield from ((rank, at) for at, count in enumerate(graph.waits) if not count)

    def end(self, rank: int, place: int) -> list[int]:
        """End a node; return the places of its rank's nodes that wait for none any more."""
        self.left[rank] -= 1
        waits, ready = self.waits[rank], []
        for follower in self.laid.graph[rank].followers[place]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
        return ready

    def enter(self, number: int) -> bool:
        """Come to a meeting; tell whether it can begin."""
        self.came[number] += 1
        return self.can_begin(number)

    def can_begin(self, number: int) -> bool:
        """Tell whether all have come, and the meeting before it is over."""
        meeting = self.laid.meetings.all[number]
        all_came = self.came[number] == len(meeting.seats)
        return all_came and (meeting.before == ALONE or self.is_over[meeting.before])

    def close(self, number: int) -> bool:
        """End a meeting, though none of its nodes yet; tell whether the one after it can begin."""
        self.is_over[number] = True
        then = self.laid.meetings.all[number].then
        return then != ALONE and self.can_begin(then)


def run_through(laid: Laid) -> Standing:
    """Return how far ranks get if nothing takes any time."""
    standing = Standing(laid)
    ready = list(standing.first())
    while ready:
        rank, place = ready.pop()
        number = laid.meetings.at[rank][place]
        if number == ALONE:
            ready += [(rank, follower) for follower in standing.end(rank, place)]
            continue
        begins = standing.enter(number)
        while begins:
            meeting = laid.meetings.all[number]
            for seat in meeting.seats:
                ready += [(seat.rank, follower) for follower in standing.end(*seat)]
            begins, number = standing.close(number), meeting.then
    return standing


# -- in words --------------------------------------------------------------------------------------


class _Wait(NamedTuple):
    """Who waits, in which node, for whom."""

    seat: Seat
    meeting: Meeting
    missing: int
    """A rank that has not come."""


def deadlock(laid: Laid) -> Iterator[str]:
    """Yield what would never end although everyone has somebody to meet: who waits for whom.

    Nothing where nodes that meet nobody, or a rank's own cycle, are to blame: that is told of them.
    """
    if _is_alike(laid):
        return
    standing = run_through(laid)
    if not any(standing.left.values()) or next(unmet(laid), None) is not None:
        return
    if any(len(graph.order) < len(graph.waits) for graph in laid.graph.values()):
        return
    circle = _circle(standing)
    steps = [
        f"rank {wait.seat.rank} waits in {laid.told(wait.seat)} for rank {wait.missing}"
        for wait in circle[:NAMED_MAX]
    ]
    if len(circle) > NAMED_MAX:
        steps.append(f"... ({len(circle) - NAMED_MAX} more)")
    ranks = [rank for rank, left in standing.left.items() if left]
    yield (
        f"a deadlock, in which {told_ranks(sorted(ranks))} would wait for ever: {', '.join(steps)}"
    )


def _is_alike(laid: Laid) -> bool:
    """Tell whether all ranks do the same and none sends to another one.

    Then all come to their collectives in one order, that of the program, and none waits for ever.
    """
    alike = len(laid.trace.programs) == 1 and next(unmet(laid), None) is None
    return alike and all(meeting.group for meeting in laid.meetings.all)


def _circle(standing: Standing) -> list[_Wait]:
    """Return who waits for whom, round in a circle."""
    meetings = standing.laid.meetings.all
    meeting = next(m for m in meetings if 0 < standing.came[m.number] < len(m.seats))
    path: list[_Wait] = []
    at: dict[int, int] = {}
    while meeting.number not in at:
        at[meeting.number] = len(path)
        wait = _waiting(standing, meeting)
        path.append(wait)
        meeting = meetings[_holding(standing, wait.missing, meeting)]
    return path[at[meeting.number] :]


def _waiting(standing: Standing, meeting: Meeting) -> _Wait:
    """Return one who has come to a meeting, and one who has not."""
    came: list[Seat] = []
    missing: list[Seat] = []
    for seat in meeting.seats:
        (missing if standing.waits[seat.rank][seat.place] else came).append(seat)
    return _Wait(came[0], meeting, missing[0].rank)


def _holding(standing: Standing, rank: int, meeting: Meeting) -> int:
    """Return the meeting, not full, that a rank must leave before it comes to another one."""
    laid, came = standing.laid, standing.came
    before: dict[int, int] = {}
    for earlier, followers in enumerate(laid.graph[rank].followers):
        if not _ended(standing, rank, earlier):
            before |= dict.fromkeys(followers, earlier)
    place = _place(meeting, rank)
    while True:
        while standing.waits[rank][place]:
            place = before[place]
        meeting = laid.meetings.all[laid.meetings.at[rank][place]]
        if came[meeting.number] < len(meeting.seats):
            return meeting.number
        place = _place(laid.meetings.all[meeting.before], rank)  # it is not its turn


def _place(meeting: Meeting, rank: int) -> int:
    return next(seat.place for seat in meeting.seats if seat.rank == rank)


def _ended(standing: Standing, rank: int, place: int) -> bool:
    """Tell whether a node has ended; with time left out, all but meetings end when they begin."""
    number = standing.laid.meetings.at[rank][place]
    return not standing.waits[rank][place] and (number == ALONE or standing.is_over[number])
