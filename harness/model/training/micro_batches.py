"""Which samples of a step go to which data-parallel rank, and in which micro batch. Pure.

Every rank computes the same from the lengths alone. Longest first into the least filled (LPT):
over the ranks, then over each rank's micro batches, of which all ranks take equally many, the
fewest in which none is over its limit. The same number everywhere, because ranks meet in every
micro batch (all-to-all of experts, a pipeline's ends).
"""

from __future__ import annotations

from collections.abc import Sequence

Bins = tuple[tuple[int, ...], ...]
"""Indices of samples, by bin."""


def dealt(tokens: Sequence[int], ranks: int, limit_tokens: int) -> tuple[Bins, ...]:
    """Return by rank its micro batches, the longest first; each holds indices into `tokens`.

    A micro batch over the limit is of one sample. There is at least one; some may be empty.
    """
    shards = packed(tokens, range(len(tokens)), ranks)
    loads = [sum(tokens[i] for i in shard) for shard in shards]
    count = max(1, *(-(-load // limit_tokens) for load in loads))
    while True:
        batches = tuple(packed(tokens, shard, count) for shard in shards)
        longest = max(map(len, shards), default=0)
        if count >= longest or all(_fits(tokens, bins, limit_tokens) for bins in batches):
            return batches
        count += 1


def packed(tokens: Sequence[int], samples: Sequence[int], count: int) -> Bins:
    """Return `count` bins of these samples, the fullest first; each in the order of the samples."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for sample in sorted(samples, key=lambda i: (-tokens[i], i)):
        least = filled.index(min(filled))
        bins[least].append(sample)
        filled[least] += tokens[sample]
    order = sorted(range(count), key=lambda b: (-filled[b], b))
    return tuple(tuple(sorted(bins[b])) for b in order)


def _fits(tokens: Sequence[int], bins: Bins, limit_tokens: int) -> bool:
    return all(len(b) <= 1 or sum(tokens[i] for i in b) <= limit_tokens for b in bins)
