"""A request in one engine: what it is, where it stands, and what is told about it.

Lengths are tokens; `response_tokens` is known to the engine because lengths are replayed
(``ignore_eos`` with ``max_tokens``), and is not for policies to see. Times are integer ns of the
clock that the caller advances. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Status = Literal[
    "waiting", "prefilling", "decoding", "preempted", "finished", "aborted", "exported"
]
Verb = Literal["admit", "decode", "preempt", "finish", "abort", "export"]

MOVES: dict[tuple[Status, Verb], Status] = {
    ("waiting", "admit"): "prefilling",
    ("preempted", "admit"): "prefilling",
    ("prefilling", "decode"): "decoding",
    ("prefilling", "finish"): "finished",  # a response of one token: prefill gives the first
    ("decoding", "finish"): "finished",
    ("prefilling", "preempt"): "preempted",
    ("decoding", "preempt"): "preempted",
    ("waiting", "abort"): "aborted",
    ("prefilling", "abort"): "aborted",
    ("decoding", "abort"): "aborted",
    ("preempted", "abort"): "aborted",
    ("waiting", "export"): "exported",
    ("prefilling", "export"): "exported",
    ("decoding", "export"): "exported",
    ("preempted", "export"): "exported",
}
"""All that can become of a request; whatever is missing here cannot."""


@dataclass(slots=True, eq=False)
class Request:
    """A request's state in one engine. While it decodes, its counts of tokens stand still.

    Then they are as of `joined_beat`, and the beats of the engine since are to be added:
    `harness.model.batching.settle` does it.
    """

    id: str
    prompt_tokens: int
    response_tokens: int
    arrived_ns: int
    place: int
    status: Status = "waiting"
    produced_tokens: int = 0
    computed_tokens: int = 0
    joined_beat: int = 0
    version_first: int | None = None
    version_last: int | None = None
    preemptions: int = 0
    first_token_ns: int | None = None

    @property
    def known_tokens(self) -> int:
        """Prompt and response so far: what must be in KV, but for the last, to decode."""
        return self.prompt_tokens + self.produced_tokens

    def move(self, verb: Verb) -> None:
        """Change the status by the table of moves."""
        self.status = MOVES[self.status, verb]


class Carried(msgspec.Struct, frozen=True):
    """A request as it leaves one engine and can enter another: all of it, with partial output.

    `kv_tokens` is how many of its tokens had their KV there: what a transfer would carry.
    """

    id: str
    prompt_tokens: int
    response_tokens: int
    arrived_ns: int
    produced_tokens: int = 0
    kv_tokens: int = 0
    version_first: int | None = None
    version_last: int | None = None
    preemptions: int = 0
    first_token_ns: int | None = None


class Event(msgspec.Struct, frozen=True):
    """What happened to one request at the end of a step, or by a command."""

    what: Literal["admitted", "first_token", "preempted", "finished"]
    at_ns: int
    request: Carried


def carried(request: Request) -> Carried:
    """Return a settled request as a value."""
    return Carried(
        id=request.id,
        prompt_tokens=request.prompt_tokens,
        response_tokens=request.response_tokens,
        arrived_ns=request.arrived_ns,
        produced_tokens=request.produced_tokens,
        kv_tokens=request.computed_tokens,
        version_first=request.version_first,
        version_last=request.version_last,
        preemptions=request.preemptions,
        first_token_ns=request.first_token_ns,
    )
