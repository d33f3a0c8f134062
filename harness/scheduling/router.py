"""Which instance does a request go to? A pure function of what is known at the moment.

To the least loaded one: where a request would wait least for each of its tokens. But a request
whose earlier turn was somewhere finds its KV there, so it goes back unless that instance is loaded
by a margin above the least (`STICKY_MARGIN`, `STICKY_REQUESTS`). Where its prompt's siblings went
only decides between equals: a prompt is soon computed, and siblings tend to be long together.
Only as many as have seats and KV, and a few more, are sent to an instance: the rest stays with the
coordinator, where a switch need not fetch them. How long a response will be is not looked at,
except to tell what an instance could never hold. Lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def route(wanted: Wanted, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return where to send a request; None: nowhere just now."""
    able = {
        candidate.name: candidate
        for candidate in candidates
        if _could(wanted, candidate) and candidate.takes(wanted.known_tokens)
    }
    if not able:
        return None
    least = min(able.values(), key=lambda c: (c.load, c.name != wanted.sibling))
    home = able.get(wanted.home)
    return home if home is not None and not _overloaded(home, least) else least


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
