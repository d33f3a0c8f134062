"""An emulated trainer: real collectives of a model's sizes, and computing that takes its time.

What is sent in a step, and in which order, is said by `harness.model.training`, from the shape of
the profile's model, and how long computing takes. Nothing is learned: weights of a version are what
`agents.training.contents` says, each rank holds its shard of them, and they are gathered over the
network when they are published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agents import weights_file
from agents.training.base import Groups, StepDone, Tell
from agents.training.contents import Words, words
from agents.training.exchange import Exchange
from agents.training.gathering import gather
from agents.training.groups import new_groups
from agents.training.pace import Pace
from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.model.busbw import counts
from harness.model.profile import Profile
from harness.model.training.axes import expert_copies, place_of
from harness.model.training.phase import Phase
from harness.model.training.schedule import DTYPE, Move
from harness.model.training.shards import layer_words, shard_of, weights_bytes
from harness.model.training.step import Step, step_of
from harness.model.training.trainer import TrainerSpec, facts, flops_per_s, profile_of
from harness.wire.training import PhaseHappened, Sample


def make(spec: TrainerSpec, groups: Groups) -> Paced:
    """Make one rank's trainer; collective. Raises `UsageError` for what cannot be split so."""
    return Paced(spec, profile_of(spec), groups)


class Paced:
    """`agents.training.base.Trainer`; see the module."""

    def __init__(self, spec: TrainerSpec, profile: Profile, groups: Groups) -> None:
        self._spec, self._groups = spec, groups
        self._flops_per_s = flops_per_s(spec, profile)
        self._profile = profile
        handles = {ranks: groups.handles[axis] for axis, ranks in groups.members.items()}
        if 1 < spec.degrees.ep < spec.degrees.dp:
            handles |= new_groups(expert_copies(spec.degrees), groups.rank)
        self._exchange = Exchange(groups.rank, groups.device, handles)
        self._planned: tuple[tuple[int, ...], Step] | None = None
        self._layers = layer_words(profile.shape, spec.bytes_scale)
        self._version = 0
        self._fill(0)
        self.parameters = profile.shape.parameters
        self.facts = facts(spec, profile)

    # -- a step --------------------------------------------------------------------------------

    def phases(self, tokens: Sequence[int]) -> tuple[Phase, ...]:
        """Return what a step on samples of these lengths will communicate, in order."""
        return tuple(move.phase for move in self._plan(tuple(tokens)).schedule.moves)

    def step(self, version: int, samples: Sequence[Sample], tell: Tell) -> StepDone:
        """Go through the step's phases, and compute in between; the weights are new then."""
        tokens = tuple(sample.prompt_tokens + sample.response_tokens for sample in samples)
        shares, plan = self._plan(tokens)
        pace, communicated_ns = Pace(), 0
        place = self._groups.place
        pace.compute(0, lambda: self._fill(version + 1))  # in the time of what follows
        for index, move in enumerate(plan.moves):
            ranks = next((g for g in move.phase.groups if self._groups.rank in g), None)
            if ranks is not None:
                told = _Teller(tell, version, index, move.phase, self._groups.rank)
                communicated_ns += self._communicate(pace, move, ranks, told)
        pace.compute(self._time_ns(plan.after.get((place.pp, place.dp), 0.0)))
        shard = shares[place.dp]
        return StepDone(
            tokens=sum(tokens[sample] for batch in shard for sample in batch),
            micro_batches=len(shard),
            compute_ns=pace.computed_ns,
            communicate_ns=communicated_ns,
            figures={"late_ms": pace.late_ns / 1e6},
        )

    def _communicate(self, pace: Pace, move: Move, ranks: tuple[int, ...], told: _Teller) -> int:
        """Compute and communicate as often as the phase says; return the time of the latter."""
        phase, place = move.phase, self._groups.place
        group = self._groups.members["pp"] if phase.op == "send_recv" else ranks
        gap_ns = self._time_ns(move.flops[place.pp, place.dp] / phase.times)
        spent_ns = 0
        for turn in range(phase.times):
            pace.compute(gap_ns)
            begin_ns = time.monotonic_ns()
            if turn == 0:
                told.begun(begin_ns)
            self._exchange.run(phase.op, ranks, phase.bytes, group)
            end_ns = time.monotonic_ns()
            spent_ns += end_ns - begin_ns
        told.ended(end_ns)
        return spent_ns

    def _time_ns(self, flops: float) -> int:
        return round(flops / self._flops_per_s * NS_PER_S)

    def _plan(self, tokens: tuple[int, ...]) -> Step:
        if self._planned is None or self._planned[0] != tokens:
            step = step_of(self._spec, self._profile, tokens)
            for move in step.schedule.moves:
                phase = move.phase
                row = counts(phase.op, phase.bytes, len(phase.groups[0]), DTYPE)
                self._exchange.reserve(row.sent, row.received)
            self._planned = tokens, step
        return self._planned[1]

    # -- weights -------------------------------------------------------------------------------

    def _fill(self, version: int) -> None:
        """Make this rank's shard of a version's weights."""
        places = shard_of(self._groups.place, self._spec.degrees, self._layers)
        self._shard = np.concatenate([words(self._spec.seed, version, part) for part in places])
        self._version = version

    def publish(self, path: Path | None, writers: Sequence[int] = (0,)) -> None:
        """Gather all shards at the ranks `writers`, which are given a path: to ``layer.N``."""
        import torch

        degrees, rank = self._spec.degrees, self._groups.rank
        places = [
            shard_of(place_of(n, degrees), degrees, self._layers) for n in range(degrees.ranks)
        ]
        shapes = [{f"shard {n}": (sum(map(len, parts)),)} for n, parts in enumerate(places)]
        shard = torch.from_numpy(self._shard.view(np.int64)).to(self._groups.device)
        shards = gather({f"shard {rank}": shard}, shapes, writers, rank, shard)
        if path is not None:
            found = [shards[f"shard {n}"].cpu().numpy().view(np.uint64) for n in range(len(places))]
            weights_file.write(path, self._tensors(places, found))

    def _tensors(
        self, places: Sequence[Sequence[range]], shards: Sequence[Words]
    ) -> list[weights_file.Tensor]:
        """Return all layers, a (words,) tensor each, of all ranks' shards and their places."""
        whole = np.empty(self._layers[-1].stop, np.uint64)
        for parts, shard in zip(places, shards, strict=True):
            begins = 0
            for part in parts:
                whole[part.start : part.stop] = shard[begins : begins + len(part)]
                begins += len(part)
        return [
            weights_file.Tensor(f"layer.{n}", "U64", (len(part),), whole[part.start : part.stop])
            for n, part in enumerate(self._layers)
        ]

    def weights_bytes(self) -> int:
        """Return the size of the file that `publish` writes, less its header."""
        return weights_bytes(self._layers)

    def keep(self, folder: Path) -> None:
        """Write this rank's shard and its version."""
        np.savez(self._kept(folder), shard=self._shard, version=np.int64(self._version))

    def load(self, folder: Path) -> None:
        """Read them back. Raises `UsageError` where a rank of other degrees has written them."""
        path = self._kept(folder)
        if not path.is_file():
            raise UsageError(f"{path} is not there: nothing was kept for this rank")
        with np.load(path) as kept:
            shard, version = kept["shard"], int(kept["version"])
        if shard.shape != self._shard.shape:
            raise UsageError(
                f"{path} holds {shard.size} words, this rank {self._shard.size}: other degrees, "
                "another model or another bytes_scale"
            )
        self._shard, self._version = shard, version

    def _kept(self, folder: Path) -> Path:
        return folder / f"rank{self._groups.rank}.npz"


class _Teller:
    """Tells one phase's begin and its end."""

    def __init__(self, tell: Tell, version: int, index: int, phase: Phase, rank: int) -> None:
        self._tell, self._begin_ns = tell, 0
        self._version, self._index, self._phase, self._rank = version, index, phase, rank

    def begun(self, at_ns: int) -> None:
        self._begin_ns = at_ns
        self.ended(0)

    def ended(self, at_ns: int) -> None:
        phase = self._phase
        self._tell(
            PhaseHappened(
                version=self._version,
                index=self._index,
                name=phase.name,
                op=phase.op,
                axis=phase.axis,
                bytes=phase.bytes,
                begin_ns=self._begin_ns,
                end_ns=at_ns,
                rank=self._rank,
            )
        )
