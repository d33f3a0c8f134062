"""Which instance does a request go to? By what is known at the moment, and nothing else.

To the least loaded one: where a request would wait least for each of its tokens. But a request
whose earlier turn was somewhere finds its KV there, so it goes back unless that instance is loaded
by a margin above the least (`STICKY_MARGIN`, `STICKY_REQUESTS`). Where its prompt's siblings went
only decides between equals: a prompt is soon computed, and siblings tend to be long together.
Only as many as have seats and KV, and a few more, are sent to an instance: the rest stays with the
coordinator, where a switch need not fetch them. How long a response will be is not looked at,
except to tell what an instance could never hold. Lengths in tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

STICKY_MARGIN = 0.25
"""Of the least load: by how much more an instance may be loaded and still be preferred."""
STICKY_REQUESTS = 2
"""By how many requests more than the least loaded it may always have: next to nothing in a step."""
WAITING_MAX = 4
"""Requests that may wait at an instance without a seat or KV: so that a seat never stays empty."""


@dataclass(slots=True)
class Candidate:
    """An instance as the router sees it.

    `requests` were sent there and have not ended; of them, `waiting` wait, or were sent since it
    was last told how many do. `tokens_per_s`: of all its requests together, with one more.
    """

    name: str
    accepting: bool
    requests: int
    waiting: int
    sequences_max: int
    kv_free_tokens: int
    length_max_tokens: int
    tokens_per_s: float

    @property
    def load(self) -> float:
        """Seconds that each request here would wait for a token, with one more."""
        return (self.requests + 1) / self.tokens_per_s

    def takes(self, known_tokens: int) -> bool:
        """Whether it accepts one more, which begins with `known_tokens`."""
        return self.seats(known_tokens) or (self.accepting and self.waiting < WAITING_MAX)

    def seats(self, known_tokens: int) -> bool:
        """Whether it has a seat for it, and KV."""
        seated = self.requests < self.sequences_max and known_tokens <= self.kv_free_tokens
        return self.accepting and seated


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is known of a request: `length_tokens` at its longest, `home` where its last turn was.

    `sibling`: where one was sent last. `only`: the one instance that it is assigned to, "" for any.
    `refused`: instances that would not have it, and why.
    """

    known_tokens: int
    length_tokens: int
    home: str = ""
    sibling: str = ""
    only: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)


class Router:
    """Where requests go, one after the other, as long as nothing else changes the candidates.

    The least loaded one is at hand at any time: a fleet of a thousand instances costs a request
    no more than one of ten.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self.candidates = list(candidates)
        self._at = {candidate.name: at for at, candidate in enumerate(self.candidates)}
        self._by_load = [(candidate.load, at) for at, candidate in enumerate(self.candidates)]
        heapq.heapify(self._by_load)

    def __getitem__(self, name: str) -> Candidate | None:
        at = self._at.get(name)
        return None if at is None else self.candidates[at]

    @property
    def is_full(self) -> bool:
        """Whether no candidate takes even the shortest request."""
        return self._least(lambda candidate: candidate.takes(1)) is None

    def route(self, wanted: Wanted) -> Candidate | None:
        """Return where to send a request; None: nowhere just now."""

        def is_able(candidate: Candidate) -> bool:
            return _could(wanted, candidate) and candidate.takes(wanted.known_tokens)

        def able(name: str) -> Candidate | None:
            candidate = self[name]
            return candidate if candidate is not None and is_able(candidate) else None

        if wanted.only:
            return able(wanted.only)
        least = self._least(is_able)
        if least is None:
            return None
        sibling, home = able(wanted.sibling), able(wanted.home)
        if sibling is not None and sibling.load <= least.load:
            least = sibling
        return home if home is not None and not _overloaded(home, least) else least

    def replace(self, candidate: Candidate) -> None:
        """Take a candidate as it is now: with one request more, and no less loaded than before."""
        at = self._at[candidate.name]
        self.candidates[at] = candidate
        heapq.heappush(self._by_load, (candidate.load, at))

    def _least(self, is_wanted: Callable[[Candidate], bool]) -> Candidate | None:
        """Return the first by load that is wanted; what can take nothing any more is let go."""
        found: Candidate | None = None
        passed: list[tuple[float, int]] = []
        while self._by_load:
            load, at = self._by_load[0]
            candidate = self.candidates[at]
            if load == candidate.load and candidate.takes(1):
                if is_wanted(candidate):
                    found = candidate
                    break
                passed.append((load, at))
            heapq.heappop(self._by_load)
        for entry in passed:
            heapq.heappush(self._by_load, entry)
        return found


def seat(wanted: Wanted, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the least loaded one in which a request would not wait; None: it would in all."""
    able = (c for c in candidates if _could(wanted, c) and c.seats(wanted.known_tokens))
    return min(able, key=lambda candidate: candidate.load, default=None)


def nowhere(wanted: Wanted, candidates: Sequence[Candidate]) -> str:
    """Return why a request can run in none of these, now or later; "" where it can."""
    if not candidates or any(_could(wanted, candidate) for candidate in candidates):
        return ""
    if wanted.refused:
        return "; ".join(f"{name}: {reason}" for name, reason in wanted.refused.items())
    longest = max(candidates, key=lambda candidate: candidate.length_max_tokens)
    return (
        f"{wanted.length_tokens} tokens with its response; {longest.name}, which holds the "
        f"longest requests, takes {longest.length_max_tokens}"
    )


def _overloaded(home: Candidate, least: Candidate) -> bool:
    more = home.requests - least.requests > STICKY_REQUESTS
    return more and home.load > least.load * (1 + STICKY_MARGIN)


def _could(wanted: Wanted, candidate: Candidate) -> bool:
    fits = wanted.length_tokens <= candidate.length_max_tokens
    meant = wanted.only in {"", candidate.name}
    return fits and meant and candidate.name not in wanted.refused
