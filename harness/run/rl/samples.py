"""Batches to ask for, made from a workload; and what a trainer is given of those that are done."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.errors import UsageError
from harness.model.replay import Replay, ReplayRequest
from harness.model.reward import advantages, reward
from harness.model.scenario import Rl
from harness.run.generation.ledger import Entry, Ledger
from harness.run.rl.rollouts import Group
from harness.wire.training import Sample

Batch = list[list[ReplayRequest]]
"""By prompt, its samples."""


def batches_of(replay: Replay, step: Rl) -> list[Batch]:
    """Return `step.steps` batches; the workload's steps are repeated in turn.

    Then the same prompts come again, as in another epoch; `batch` tells them apart. Raises
    `UsageError` where a workload step has fewer prompts than asked.
    """
    by_step: dict[int, dict[int, list[ReplayRequest]]] = {}
    for request in replay.requests:
        by_step.setdefault(request.step, {}).setdefault(request.prompt, []).append(request)
    there = [list(prompts.values()) for _, prompts in sorted(by_step.items())]
    if not there:
        raise UsageError("the workload has no requests to train on")
    wanted = step.prompts_per_step or min(map(len, there))
    if (least := min(map(len, there))) < wanted:
        raise UsageError(f"prompts_per_step = {wanted}: a step of the workload has {least}")
    return [
        [
            [msgspec.structs.replace(r, batch=k, arrival_ns=0) for r in samples]
            for samples in there[k % len(there)][:wanted]
        ]
        for k in range(step.steps)
    ]


def named(prefix: str, samples: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    """Return samples of one prompt with ids of their own: a run knows every request by its id."""
    return [
        msgspec.structs.replace(sample, id=f"{prefix}/{sample.prompt}-{sample.sample}")
        for sample in samples
    ]


def learned_from(groups: Sequence[Group], ledger: Ledger, base: int) -> list[Sample]:
    """Return samples with rewards, and advantages within each group; 0 where tokens have no ids.

    `base` is what engines call version 0.
    """
    return [sample for group in groups for sample in _samples(group, ledger, base)]


def _samples(group: Group, ledger: Ledger, base: int) -> list[Sample]:
    entries = [ledger.entries[id_] for id_ in group.ids]
    gained = [_reward(entry, ledger) for entry in entries]
    prompt = f"{group.batch}/{group.requests[0].prompt}"
    return [
        _sample(entry, prompt, value, advantage, base)
        for entry, value, advantage in zip(entries, gained, advantages(gained), strict=True)
    ]


def _reward(entry: Entry, ledger: Ledger) -> float:
    if ledger.prompts is None:
        return 0.0
    return reward(entry.prompt, entry.output, ledger.prompts.vocab)


def _sample(entry: Entry, group: str, value: float, advantage: float, base: int) -> Sample:
    return Sample(
        id=entry.id,
        group=group,
        prompt_tokens=entry.known_tokens - entry.total_tokens,
        response_tokens=entry.total_tokens,
        reward=value,
        advantage=advantage,
        version_first=(entry.version_oldest or 0) - base,
        version_last=(entry.version_last or 0) - base,
        prompt=tuple(entry.prompt),
        response=tuple(entry.output),
    )


def flat(batches: Sequence[Batch]) -> list[list[ReplayRequest]]:
    """Return each batch's requests, all prompts together."""
    return [[request for samples in batch for request in samples] for batch in batches]
