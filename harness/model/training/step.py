"""A paced training step beforehand: who takes which samples, what is sent and computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.model.profile import Profile
from harness.model.training.micro_batches import Bins, dealt
from harness.model.training.schedule import Schedule, schedule
from harness.model.training.traffic import Lengths, Traffic
from harness.model.training.trainer import TrainerSpec, flops_per_s


class Step(NamedTuple):
    """A whole step. `dealt`: indices of samples by rank of DP, then micro batch."""

    dealt: tuple[Bins, ...]
    schedule: Schedule


def step_of(spec: TrainerSpec, profile: Profile, tokens: Sequence[int]) -> Step:
    """Return the step on samples of these lengths. Raises `UsageError` as `flops_per_s` does."""
    shares = dealt(tokens, spec.degrees.dp, spec.micro_batch_tokens)
    batches = [
        [
            Lengths(sum(tokens[i] for i in batch), sum(tokens[i] ** 2 for i in batch))
            for batch in share
        ]
        for share in shares
    ]
    traffic, rate = Traffic(profile.shape, spec.degrees), flops_per_s(spec, profile)
    return Step(shares, schedule(traffic, batches, spec.bytes_scale, rate))
