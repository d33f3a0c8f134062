"""The requests that every arm of a comparison replays: immutable, the same lengths in each arm.

Two arms are comparable when their lengths are equal request by request; the digest, recorded with
each run, shows that they were. Lengths are in tokens, arrivals in ns after the step's first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One call of the model: what is added to the context before it, and what it answers."""

    prompt_tokens: int
    response_tokens: int


class ReplayRequest(msgspec.Struct, frozen=True):
    """One sample of one prompt: a whole trajectory where there are several turns."""

    id: str
    """``step-prompt-sample``."""
    step: int
    prompt: int
    """Within the step; requests that share it share their first turn's prompt."""
    sample: int
    turns: tuple[Turn, ...]
    arrival_ns: int = 0
    blocks: tuple[int, ...] = ()
    """Ids of the first prompt's blocks, in order; equal ids are the same tokens after the same."""
    batch: int = 0
    """Of an RL loop: for which of its batches it is asked. A workload's steps may come again."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the first turn's prompt."""
        return self.turns[0].prompt_tokens

    @property
    def response_tokens(self) -> int:
        """What the model generates, over all turns."""
        return sum(turn.response_tokens for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Length at the end: prompts, tool output and responses."""
        return sum(turn.prompt_tokens + turn.response_tokens for turn in self.turns)


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by step, and by arrival in a step, with their digest."""

    requests: tuple[ReplayRequest, ...]
    digest: str
    """SHA-256 (hex) of all that is replayed: equal digests are equal requests."""
    block_tokens: int = 0
    """Tokens in each of a request's `blocks`; 0 where there are none."""
    skipped: int = 0
    """Bad rows of a trace that were left out."""
    problems: tuple[str, ...] = ()
    """What was wrong with the first of them."""

    def step(self, step: int) -> tuple[ReplayRequest, ...]:
        """Return the requests of one step."""
        return tuple(request for request in self.requests if request.step == step)


def replay_of(
    requests: Iterable[ReplayRequest],
    *,
    block_tokens: int = 0,
    skipped: int = 0,
    problems: Iterable[str] = (),
) -> Replay:
    """Freeze requests and take their digest."""
    frozen = tuple(requests)
    return Replay(
        requests=frozen,
        digest=digest_of(frozen, block_tokens),
        block_tokens=block_tokens,
        skipped=skipped,
        problems=tuple(problems),
    )


def digest_of(requests: Iterable[ReplayRequest], block_tokens: int = 0) -> str:
    """Hash a line of text for each request: the same on every machine and version."""
    digest = hashlib.sha256(f"requests 1 {block_tokens}\n".encode())
    for r in requests:
        turns = " ".join(f"{turn.prompt_tokens}+{turn.response_tokens}" for turn in r.turns)
        blocks = " ".join(map(str, r.blocks))
        line = f"{r.id} {r.step} {r.prompt} {r.sample} {r.arrival_ns} {turns} | {blocks}\n"
        digest.update(line.encode())
    return digest.hexdigest()
