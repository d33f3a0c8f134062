"""How response lengths spread: the figures by which RL workloads are published and compared.

Percentiles are interpolated linearly. Sigmas are of the natural logarithm: `sigma` over all, and
by prompt group `within` (mean of the groups' standard deviations) and `between` (standard deviation
of the groups' means). Standard deviations divide by n, so sigma**2 is the mean square of the
groups' deviations plus between**2 where groups are of one size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from harness.model.replay import ReplayRequest


@dataclass(frozen=True, slots=True)
class Spread:
    """Lengths in tokens; `tail_min` and `tail_max` are the extremes of max/mean over the steps."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    sigma: float
    within: float
    between: float
    tail_min: float
    tail_max: float
    at_max: float
    """Share of the responses that have the greatest length: those at the cap, where there is one"""


def spread_of(requests: Iterable[ReplayRequest], *, by_turn: bool = False) -> Spread:
    """Measure whole responses, or each turn's by itself. Raises `ValueError` on no requests."""
    steps: defaultdict[int, list[int]] = defaultdict(list)
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for request in requests:
        turns = [turn.response_tokens for turn in request.turns]
        lengths = turns if by_turn else [sum(turns)]
        steps[request.step] += lengths
        groups[request.step, request.prompt] += lengths
    if not steps:
        raise ValueError("no requests: nothing to measure")
    every = np.array([length for step in steps.values() for length in step])
    logs = [np.log(group) for group in groups.values()]
    tails = [max(step) / (sum(step) / len(step)) for step in steps.values()]
    p50, p90, p99 = np.percentile(every, [50, 90, 99])
    return Spread(
        n=len(every),
        mean=float(every.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=int(every.max()),
        sigma=float(np.log(every).std()),
        within=float(np.mean([group.std() for group in logs])),
        between=float(np.std([group.mean() for group in logs])),
        tail_min=min(tails),
        tail_max=max(tails),
        at_max=float((every == every.max()).mean()),
    )
