"""A synthetic task that can be verified: answer in the class that the prompt names.

Token ids fall into `CLASSES` classes of neighbours. The class of the prompt's last token is the
one to answer in; the reward is the share of the response that does. An untrained model is right by
chance, `CHANCE`, and a perfect one always: 1. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

CLASSES = 4
CHANCE = 1 / CLASSES


def class_of(token: int, vocab: int) -> int:
    """Return a token's class, in 0 .. `CLASSES` - 1."""
    return token * CLASSES // vocab


def reward(prompt: Sequence[int], response: Sequence[int], vocab: int) -> float:
    """Return the share of the response that is in the class of the prompt's last token.

    In [0, 1]; an empty response is worth nothing. Raises `ValueError` for an empty prompt.
    """
    if not prompt:
        raise ValueError("an empty prompt names no class: prompts need at least one token")
    wanted = class_of(prompt[-1], vocab)
    return sum(class_of(token, vocab) == wanted for token in response) / max(1, len(response))


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return how much better each response to one prompt is than all of them, in deviations.

    ``(r - mean) / (std + 1e-6)``, with the population's deviation (GRPO: Shao et al. 2024,
    DeepSeekMath, equation 3); 0 for each where all are alike, for they teach nothing.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    deviation = sqrt(sum((one - mean) ** 2 for one in rewards) / len(rewards))
    return [(one - mean) / (deviation + 1e-6) for one in rewards]
