"""Lengths of RL rollouts, drawn by law: the same seed gives the same requests on any machine.

Siblings and turns are tied by a Gaussian copula: a normal score is the weighted sum of a draw of
the prompt, one of the sample and one of the turn, and the law turns it into tokens, so correlation
does not touch the percentiles. Every quantity of every step has its own stream, in which prompt n
takes the n-th draw: adding steps, prompts or samples changes none that were there before.

NumPy keeps the raw output of `PCG64` and `SeedSequence` the same in all versions, but not what
`Generator` makes of it; so only raw bits are taken, and the transform is our own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate

from numpy.random import PCG64, SeedSequence

from harness.model.percentiles import LOG_MAX, Law, normal_score
from harness.model.replay import Replay, ReplayRequest, Turn, replay_of
from harness.model.workload import GeneratedWorkload


class Quantity(IntEnum):
    """What a stream is for. The numbers are part of what a seed means: never change one."""

    PROMPT_LENGTH = 0
    PROMPT_SCORE = 1
    SAMPLE_SCORE = 2
    TURN_SCORE = 3
    TURN_COUNT = 4
    TOOL_LENGTH = 5


def generate(workload: GeneratedWorkload) -> Replay:
    """Draw all requests of a workload that has passed its rules."""
    return replay_of(
        request for step in range(workload.steps) for request in _Step(workload, step).requests()
    )


class _Step:
    """The draws of one step; lists are indexed by prompt."""

    def __init__(self, workload: GeneratedWorkload, step: int) -> None:
        self.workload, self.step = workload, step
        self.law = Law.of(workload.response_tokens)
        growth = step * math.log1p(workload.growth_per_step)
        self.growth = math.exp(min(growth, LOG_MAX))
        siblings = workload.sibling_correlation
        turns = max(workload.turn_correlation, siblings)
        self.shares = (math.sqrt(siblings), math.sqrt(turns - siblings), math.sqrt(1 - turns))

    def requests(self) -> Iterator[ReplayRequest]:
        """Yield the step's requests, by prompt and then by sample."""
        law = Law.of(self.workload.prompt_tokens)
        prompts = [_whole(law.tokens(score)) for score in self.scores(Quantity.PROMPT_LENGTH)]
        shared = self.scores(Quantity.PROMPT_SCORE)
        samples = [self.sample(k, prompts, shared) for k in range(self.workload.samples)]
        for prompt in range(self.workload.prompts):
            for sample, turns in enumerate(samples):
                yield ReplayRequest(
                    id=f"{self.step}-{prompt}-{sample}",
                    step=self.step,
                    prompt=prompt,
                    sample=sample,
                    turns=turns[prompt],
                )

    def sample(
        self, sample: int, prompts: list[int], shared: list[float]
    ) -> list[tuple[Turn, ...]]:
        """Return the turns of one sample of every prompt."""
        of_prompt, of_sample, of_turn = self.shares
        own = self.scores(Quantity.SAMPLE_SCORE, sample)
        base = [of_prompt * a + of_sample * b for a, b in zip(shared, own, strict=True)]
        counts = self.turn_counts(sample)
        turns: list[list[Turn]] = [[] for _ in prompts]
        for turn in range(max(counts)):
            added = prompts if turn == 0 else self.tool_lengths(sample, turn)
            scores = self.scores(Quantity.TURN_SCORE, sample, turn)
            for prompt, (a, b) in enumerate(zip(base, scores, strict=True)):
                if turn < counts[prompt]:
                    response = self.response(a + of_turn * b)
                    turns[prompt].append(Turn(added[prompt], response))
        return [tuple(of) for of in turns]

    def response(self, score: float) -> int:
        """Return a response's length after growth and the cap."""
        return min(_whole(self.law.tokens(score) * self.growth), self.workload.cap_tokens)

    def turn_counts(self, sample: int) -> list[int]:
        """Return how many turns each prompt's sample has, 1 or more."""
        weights = self.workload.turn_weights
        if len(weights) == 1:
            return [1] * self.workload.prompts
        edges = list(accumulate(weights))
        draws = self.uniform(Quantity.TURN_COUNT, sample)
        return [bisect_right(edges, draw * edges[-1], hi=len(edges) - 1) + 1 for draw in draws]

    def tool_lengths(self, sample: int, turn: int) -> list[int]:
        """Return what the environment adds before a later turn."""
        law = Law.of(self.workload.tool_tokens)
        return [_whole(law.tokens(z)) for z in self.scores(Quantity.TOOL_LENGTH, sample, turn)]

    def scores(self, *name: int) -> list[float]:
        """Return one standard normal draw for each prompt from a named stream."""
        return [normal_score(draw) for draw in self.uniform(*name)]

    def uniform(self, *name: int) -> list[float]:
        """Return one draw in (0, 1), both ends excluded, for each prompt from a named stream."""
        seed = SeedSequence(self.workload.seed, spawn_key=(self.step, *name))
        raw = PCG64(seed).random_raw(self.workload.prompts)
        return [((bits >> 12) + 0.5) * 2.0**-52 for bits in raw.tolist()]


def _whole(tokens: float) -> int:
    return max(1, math.floor(tokens + 0.5))
