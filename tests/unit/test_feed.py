"""The requests of a step: once as they arrived, then repeated under ids of their own."""

from __future__ import annotations

from harness.model.replay import ReplayRequest, Turn
from harness.scheduling.feed import Feed


def feed(*arrivals_ns: int) -> Feed:
    requests = [
        ReplayRequest(
            id=f"0-{i}-0", step=0, prompt=i, sample=0, turns=(Turn(1, 1),), arrival_ns=arrival_ns
        )
        for i, arrival_ns in enumerate(arrivals_ns)
    ]  # fmt: skip
    return Feed(requests, 7, 1000)


def test_requests_come_when_they_arrived_and_as_there_are_seats() -> None:
    coming = feed(0, 0, 50)
    assert [r.id for r in coming.due(1, 1000, repeat=False)] == ["7.0/0-0-0"]
    assert coming.next_ns(1000) is None  # the next one is here, and only wants a seat
    assert [r.id for r in coming.due(5, 1000, repeat=True)] == ["7.0/0-1-0"]
    assert coming.next_ns(1000) == 1050
    assert not coming.over
    assert [r.prompt for r in coming.due(5, 1050, repeat=False)] == [2]
    assert coming.over
    assert coming.next_ns(1050) is None


def test_they_are_repeated_only_while_asked_and_each_has_its_own_id() -> None:
    coming = feed(0, 10**9)
    coming.due(2, 10**10, repeat=False)
    assert coming.due(2, 10**10, repeat=False) == []
    again = coming.due(3, 10**10, repeat=True)
    assert [r.id for r in again] == ["7.1/0-0-0", "7.1/0-1-0", "7.2/0-0-0"]
    assert len(set(coming.ids)) == len(coming.ids) == 5
