"""A law of lengths from its percentiles: ``{p50 = 465, p90 = 1041, p99 = 2711}``.

Between the points given, the logarithm of the length is linear in the normal score (the quantile
of the standard normal); beyond the outermost points the nearest line goes on. So two points are a
log-normal, more bend it where a log-normal does not fit, one alone is a constant, and the file
holds the very numbers that people publish. Pure; raises `ValueError` naming the percentile.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

LOG_MAX = math.log(1e12)
"""Where the law itself is cut off, far above any cap, so that no draw overflows."""

_NORMAL = NormalDist()
_KEY = re.compile(r"p(\d{1,2}(?:\.\d{1,6})?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Law:
    """Points of a law, rising: normal scores, and natural logarithms of lengths in tokens."""

    scores: tuple[float, ...]
    logs: tuple[float, ...]

    @classmethod
    def of(cls, percentiles: Mapping[str, float]) -> Law:
        """Build a law; raises `ValueError` where the percentiles are none, or fall as they rise."""
        if not percentiles:
            raise ValueError("empty; give at least one, such as p50 = 465")
        points = sorted((parse_percentile(key), key) for key in percentiles)
        for (low, low_key), (high, high_key) in pairwise(points):
            if low == high:
                raise ValueError(f"{low_key} and {high_key} are the same percentile")
            if percentiles[low_key] > percentiles[high_key]:
                raise ValueError(f"{low_key} is above {high_key}")
        if (shortest := percentiles[points[0][1]]) < 1:
            raise ValueError(f"{points[0][1]} is {shortest:g}; a length is 1 token or more")
        return cls(
            tuple(normal_score(rank) for rank, _ in points),
            tuple(math.log(percentiles[key]) for _, key in points),
        )

    def tokens(self, score: float) -> float:
        """Return the length at a normal score, in tokens, neither rounded nor capped."""
        scores, logs = self.scores, self.logs
        if len(scores) == 1:
            return math.exp(logs[0])
        i = min(max(bisect_right(scores, score), 1), len(scores) - 1)
        slope = (logs[i] - logs[i - 1]) / (scores[i] - scores[i - 1])
        return math.exp(min(logs[i - 1] + slope * (score - scores[i - 1]), LOG_MAX))


def parse_percentile(key: str) -> float:
    """Return the rank, in (0, 1), of ``p50``, ``p99.9``; raises `ValueError` on anything else."""
    found = _KEY.fullmatch(key)
    if not found or not float(found[1]) > 0:
        raise ValueError(f'{key!r} is no percentile such as p50 or "p99.9", above 0 and below 100')
    return float(found[1]) / 100


def normal_score(rank: float) -> float:
    """Return the quantile of the standard normal at a rank in (0, 1)."""
    return _NORMAL.inv_cdf(rank)
