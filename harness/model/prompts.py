"""Token ids for prompts and tool output: seeded, so that every arm of a comparison sends the same.

Requests that share a prompt share its tokens, and so do equal blocks of a trace: what an engine
may find in its prefix cache is what the workload says. Ids are in 3 .. vocab - 1: the lowest are
what models commonly keep for padding, begin and end. Only raw bits of `PCG64` are taken, which
NumPy keeps the same in all versions. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from numpy.random import PCG64, SeedSequence

from harness.model.replay import ReplayRequest

FIRST_ID = 3


class Kind(IntEnum):
    """What a stream of ids is for. The numbers are part of what a seed means: never change one."""

    PROMPT = 0
    BLOCK = 1
    TOOL = 2


@dataclass(frozen=True)
class Prompts:
    """The ids of a run. `block_tokens` is the length of the blocks that requests name, if any."""

    vocab: int
    seed: int = 0
    block_tokens: int = 0

    def __post_init__(self) -> None:
        if self.vocab <= FIRST_ID:
            raise ValueError(f"a vocabulary of {self.vocab} leaves no ids for prompts")

    def added(self, request: ReplayRequest, turn: int) -> tuple[int, ...]:
        """Return what is added to the context before a turn: the prompt, or tool output later."""
        count = request.turns[turn].prompt_tokens
        if turn:
            who = (request.step, request.prompt, request.sample, turn)
            return self._ids(count, Kind.TOOL, *who)
        ids: tuple[int, ...] = ()
        for block in request.blocks if self.block_tokens else ():
            ids += self._ids(self.block_tokens, Kind.BLOCK, block)
        ids = ids[:count]
        rest = self._ids(count - len(ids), Kind.PROMPT, request.step, request.prompt)
        return ids + rest

    def _ids(self, count: int, kind: Kind, *name: int) -> tuple[int, ...]:
        stream = PCG64(SeedSequence(self.seed, spawn_key=(kind, *name)))
        raw = stream.random_raw(count) >> 12
        return tuple((FIRST_ID + raw % (self.vocab - FIRST_ID)).tolist())
