"""What a batch of responses teaches: GRPO's loss, clipped, one mean over all tokens of responses.

Token t of a response is to become likelier by its sample's advantage A: with the ratio r of its
probability now to that before, the loss is ``-min(r A, clip(r, 1 - c, 1 + c) A)`` (Schulman et al.
2017, arXiv 1707.06347, equation 7; Shao et al. 2024, arXiv 2402.03300), averaged over the tokens of
the whole batch, not response by response (DAPO: Yu et al. 2025, arXiv 2503.14476, equation 12).
There is no KL term. *Before* is when the token was drawn, where samples say its log-probability:
so stale samples are weighted by their importance, within the clip. Where they do not, it is the
weights of now: as a batch gets one step, its ratios are 1 and the gradient is the plain policy
gradient. Imports torch: import it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.wire.training import Sample

SUMS = ("loss", "entropy", "clipped")
"""What is added up over tokens, in this order."""


class Batch(NamedTuple):
    """Samples as tensors, one a row, padded on the right; rows without a sample teach nothing."""

    tokens: Tensor
    """``[rows, length]`` of ids."""
    answers: Tensor
    """``[rows, length - 1]``, 1.0 where the next token is one of the response's."""
    advantages: Tensor
    """``[rows, 1]``."""
    before: Tensor
    """``[rows, length - 1]``, log-probabilities as the answers were drawn; NaN: not known."""

    def rows(self, chosen: Tensor) -> Batch:
        """Return some rows."""
        return Batch(*(part[chosen] for part in self))


def collate(samples: Sequence[Sample | None], length: int, device: str) -> Batch:
    """Lay samples out in rows; None is an empty row."""
    tokens = torch.zeros(len(samples), length, dtype=torch.int64)
    answers = torch.zeros(len(samples), length - 1)
    advantages = torch.zeros(len(samples), 1)
    before = torch.full_like(answers, torch.nan)
    for row, sample in enumerate(samples):
        if sample is not None:
            ids = (*sample.prompt, *sample.response)
            tokens[row, : len(ids)] = torch.tensor(ids)
            spoken = slice(len(sample.prompt) - 1, len(ids) - 1)
            answers[row, spoken] = 1.0
            advantages[row] = sample.advantage
            if sample.log_probs:
                before[row, spoken] = torch.tensor(sample.log_probs)
    return Batch(*(part.to(device) for part in (tokens, answers, advantages, before)))


def loss(logits: Tensor, batch: Batch, clip: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the loss summed over tokens, to differentiate, and the `SUMS`, ``[3]``."""
    likely = (logits[:, :-1] / temperature).log_softmax(-1)
    now = likely.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    before = torch.where(batch.before.isnan(), now.detach(), batch.before)
    ratio = (now - before).exp()
    gains = ratio * batch.advantages
    kept = torch.minimum(gains, ratio.clamp(1 - clip, 1 + clip) * batch.advantages)
    total = -(kept * batch.answers).sum()
    with torch.no_grad():
        entropy = -(likely.exp() * likely).sum(-1)
        sums = [total, (entropy * batch.answers).sum(), ((kept < gains) * batch.answers).sum()]
    return total, torch.stack(sums)
