"""What later turns of open trajectories will compute: contexts, without a prefix cache. Pure.

Each turn after the first has its whole context computed: prompt, and all turns and tool output
before it. How many turns a trajectory takes is not known before it ends, but past ones tell how
much those of about its length had computed in all. A trajectory whose length is expected computes
what is missing from that. Before any has ended, it is taken to have half of the turns that it may
have, each of which adds a prompt like the first. Tokens.
"""

from __future__ import annotations

import numpy as np

from harness.scheduling.view import Finished, Floats, Ints, View

KINDS = 16
"""Into so many past trajectories are divided, by length."""


def later_tokens(view: View, remaining: Floats) -> Floats:
    """Return the contexts that later turns of each open request compute, given what remains.

    All are 0 where nobody knows: no turns are told.
    """
    if view.truth_recomputes is not None:
        return view.truth_recomputes.astype(np.float64)
    return _missing(view, view.requests.produced + remaining, view.requests.recomputed)


def fresh_tokens(view: View, lengths: Floats) -> Floats:
    """Return the contexts that later turns compute of trajectories of these lengths, not begun."""
    return _missing(view, lengths, np.zeros(len(lengths), np.int64))


def _missing(view: View, lengths: Floats, recomputed: Ints | None) -> Floats:
    told = [batch for batch in view.history if batch.recomputed is not None and len(batch.length)]
    if recomputed is None:
        return np.zeros(len(lengths))
    if not told:
        prompts = view.requests.context - view.requests.produced
        each = np.median(prompts) * (view.turns_max + 3) / 4 + lengths / 2 if len(prompts) else 0.0
        return np.asarray(np.maximum(0.0, (view.turns_max - 1) / 2 * each - recomputed))
    kinds, in_all = _by_length(told)
    return np.asarray(np.maximum(0.0, np.interp(lengths, kinds, in_all) - recomputed))


def _by_length(told: list[Finished]) -> tuple[Floats, Floats]:
    """Return the mean length of each kind, rising, and the mean of what it computed."""
    known = [(batch.length, batch.recomputed) for batch in told if batch.recomputed is not None]
    length, recomputed = (np.concatenate(column) for column in zip(*known, strict=True))
    order = np.argsort(length, kind="stable")
    kinds = np.array_split(order, min(KINDS, len(order)))
    means = np.array([(length[rows].mean(), recomputed[rows].mean()) for rows in kinds])
    return means[:, 0], means[:, 1]
