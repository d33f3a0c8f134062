"""What a rank asks of a trainer, and what it gives it: its groups. Pure, but for torch's types.

A trainer is made on every rank, in the same order; all of its methods are collective: every rank
calls the same one. It never catches what a broken group raises: the rank ends, and the labour says
why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness.model.degrees import Degrees
from harness.model.training.axes import Axis, Place
from harness.model.training.phase import Phase
from harness.wire.training import PhaseHappened, Sample


@dataclass(frozen=True)
class Groups:
    """This rank among all: its groups along each axis that has more than one rank.

    `members` are global ranks by axis, in group order; `handles` torch's process groups.
    """

    rank: int
    degrees: Degrees
    place: Place
    device: str
    members: Mapping[Axis, tuple[int, ...]] = field(default_factory=dict)
    handles: Mapping[Axis, Any] = field(default_factory=dict)
    all_members: Mapping[Axis, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Of every group along an axis: what a phase's `groups` lists."""


Tell = Callable[[PhaseHappened], None]
"""Given each phase's begin and its end, at once; cheap, from any thread."""


class StepDone(NamedTuple):
    """One step: tokens that this rank computed, and how long it computed and communicated."""

    tokens: int
    micro_batches: int
    compute_ns: int
    communicate_ns: int
    figures: dict[str, float]


class Trainer(Protocol):
    """One rank of a trainer."""

    parameters: int
    facts: Mapping[str, str]
    """What carries which parallelism: ``{"tp": "DTensor over gloo", ...}``."""

    def phases(self, tokens: Sequence[int]) -> tuple[Phase, ...]:
        """Return what a step on samples of these lengths will communicate, in order."""

    def step(self, version: int, samples: Sequence[Sample], tell: Tell) -> StepDone:
        """Learn from the samples: this rank takes its shard of them, and all ranks step once."""

    def publish(self, path: Path | None, writers: Sequence[int] = (0,)) -> None:
        """Gather the weights at the ranks `writers`: those are given a path, and write them there.

        Safetensors files that are alike, byte for byte.
        """

    def weights_bytes(self) -> int:
        """Return the size of the file that `publish` writes, about."""

    def keep(self, folder: Path) -> None:
        """Write this rank's training state into a folder: weights, optimizer, counters."""

    def load(self, folder: Path) -> None:
        """Read it; goes on as the one that wrote it would have."""


Make = Callable[..., Trainer]
"""``make(spec, groups)``."""
