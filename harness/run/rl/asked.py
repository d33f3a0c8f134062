"""What a run is asked to train with: the scenario's table `[training]`, laid out over nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.model.bench import Bench
from harness.model.degrees import Degrees, parse_degrees
from harness.model.placement import trainers_of
from harness.model.profile import Profile
from harness.model.scenario import Scenario, Training
from harness.model.training.trainer import TrainerSpec
from harness.run.generation.asked import GenerationAsked


@dataclass(frozen=True, kw_only=True)
class TrainingAsked:
    """The trainer, and the global ranks of each node that trains, in node order."""

    spec: TrainerSpec
    ranks_of: Mapping[str, tuple[int, ...]]


def ranks_of(training: Training, bench: Bench) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each node that trains, in order: as many as the layout has."""
    wanted, first = parse_degrees(training.layout).ranks, 0
    found: dict[str, tuple[int, ...]] = {}
    for name, there in trainers_of(training, bench).items():
        if here := min(there, wanted - first):
            found[name] = tuple(range(first, first + here))
        first += here
    return found


def training_asked(
    scenario: Scenario,
    bench: Bench,
    profile: Profile | None,
    generation: GenerationAsked | None,
) -> TrainingAsked | None:
    """Return what a scenario that was checked together with its bench asks for, if it trains."""
    training = scenario.training
    if training is None or generation is None:
        return None
    degrees: Degrees = parse_degrees(training.layout)
    spec = TrainerSpec(
        mode=training.mode,
        degrees=degrees,
        profile=(profile or generation.spec.profile) if training.mode == "paced" else None,
        model=training.model,
        seed=scenario.seed,
        speed=generation.spec.speed,
        flops_share=training.flops_share,
        bytes_scale=training.bytes_scale,
        micro_batch_tokens=training.micro_batch_tokens,
        learning_rate=training.learning_rate,
        clip=training.clip,
        temperature=generation.spec.temperature or 1.0,
    )
    return TrainingAsked(spec=spec, ranks_of=ranks_of(training, bench))
