"""An emulated trainer: real collectives of a model's sizes, and computing that takes its time.

What is sent in a step, and in which order, is said by `agents.training.schedule`, from the shape of
the profile's model; all bytes are scaled by `bytes_scale`. Computing takes the time that the
profile's GPU needs for its operations at `flops_share` of its peak, divided by `speed`. Nothing is
learned: weights of a version are what `agents.training.contents` says, each rank holds its shard of
them, and they are gathered over the network when they are published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agents import weights_file
from agents.training.axes import expert_copies, place_of
from agents.training.base import Groups, Place, StepDone, Tell
from agents.training.contents import WORD_BYTES, Words, layer_words, words
from agents.training.exchange import Exchange
from agents.training.gathering import gather
from agents.training.groups import new_groups
from agents.training.micro_batches import dealt
from agents.training.pace import Pace
from agents.training.schedule import DTYPE, Move, Schedule, schedule, stages
from agents.training.traffic import Lengths, Traffic
from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.model.busbw import counts
from harness.model.degrees import Degrees
from harness.model.profile import Profile
from harness.model.shape import ModelShape
from harness.wire.training import Phase, PhaseHappened, Sample, TrainerSpec


def make(spec: TrainerSpec, groups: Groups) -> Paced:
    """Make one rank's trainer; collective. Raises `UsageError` for what cannot be split so."""
    if spec.profile is None:
        raise UsageError("the paced trainer needs a latency profile")
    if problems := misfits(spec.profile.shape, spec.degrees):
        raise UsageError("; ".join(problems))
    return Paced(spec, spec.profile, groups)


def misfits(shape: ModelShape, degrees: Degrees) -> list[str]:
    """Return why a model cannot be trained on these degrees; none: it can."""
    problems = []
    if shape.heads % degrees.tp:
        problems.append(f"TP {degrees.tp} does not divide the {shape.heads} heads")
    if degrees.pp > shape.layers:
        problems.append(f"PP {degrees.pp} is more than the {shape.layers} layers")
    if degrees.ep > 1 and (not shape.experts or shape.experts % degrees.ep):
        problems.append(f"EP {degrees.ep} does not divide the {shape.experts} experts")
    return problems


def flops_per_s(spec: TrainerSpec, profile: Profile) -> float:
    """Return what one rank computes in a second. Raises `UsageError` where nobody knows."""
    peak = profile.gpu.peak_tflop_per_s
    if peak is None:
        raise UsageError(f"the profile of {profile.model} has no gpu.peak_tflop_per_s to train by")
    return peak.value * 1e12 * spec.flops_share * spec.speed


class Paced:
    """`agents.training.base.Trainer`; see the module."""

    def __init__(self, spec: TrainerSpec, profile: Profile, groups: Groups) -> None:
        self._spec, self._groups, self._shape = spec, groups, profile.shape
        self._flops_per_s = flops_per_s(spec, profile)
        self._traffic = Traffic(profile.shape, spec.degrees)
        handles = {ranks: groups.handles[axis] for axis, ranks in groups.members.items()}
        if 1 < spec.degrees.ep < spec.degrees.dp:
            handles |= new_groups(expert_copies(spec.degrees), groups.rank)
        self._exchange = Exchange(groups.rank, groups.device, handles)
        self._planned: tuple[tuple[int, ...], Schedule] | None = None
        self._layers = layer_words(profile.shape, spec.bytes_scale)
        self._version = 0
        self._fill(0)
        self.parameters = profile.shape.parameters
        self.facts = facts(spec, profile)

    # -- a step --------------------------------------------------------------------------------

    def phases(self, tokens: Sequence[int]) -> tuple[Phase, ...]:
        """Return what a step on samples of these lengths will communicate, in order."""
        return tuple(move.phase for move in self._plan(tuple(tokens)).moves)

    def step(self, version: int, samples: Sequence[Sample], tell: Tell) -> StepDone:
        """Go through the step's phases, and compute in between; the weights are new then."""
        tokens = tuple(sample.prompt_tokens + sample.response_tokens for sample in samples)
        plan = self._plan(tokens)
        pace, communicated_ns = Pace(), 0
        place = self._groups.place
        pace.compute(0, lambda: self._fill(version + 1))  # in the time of what follows
        for index, move in enumerate(plan.moves):
            ranks = next((g for g in move.phase.groups if self._groups.rank in g), None)
            if ranks is not None:
                told = _Teller(tell, version, index, move.phase, self._groups.rank)
                communicated_ns += self._communicate(pace, move, ranks, told)
        pace.compute(self._time_ns(plan.after.get((place.pp, place.dp), 0.0)))
        shard = self._dealt(tokens)[place.dp]
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

    def _dealt(self, tokens: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return dealt(tokens, self._spec.degrees.dp, self._spec.micro_batch_tokens)

    def _plan(self, tokens: tuple[int, ...]) -> Schedule:
        if self._planned is None or self._planned[0] != tokens:
            batches = [
                [
                    Lengths(sum(tokens[i] for i in batch), sum(tokens[i] ** 2 for i in batch))
                    for batch in shard
                ]
                for shard in self._dealt(tokens)
            ]
            plan = schedule(self._traffic, batches, self._spec.bytes_scale, self._flops_per_s)
            for move in plan.moves:
                phase = move.phase
                row = counts(phase.op, phase.bytes, len(phase.groups[0]), DTYPE)
                self._exchange.reserve(row.sent, row.received)
            self._planned = tokens, plan
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
        return self._layers[-1].stop * WORD_BYTES

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


def shard_of(place: Place, degrees: Degrees, layers: Sequence[range]) -> list[range]:
    """Return which words a rank holds: of each layer of its stage, its part over TP and DP."""
    parts, mine = degrees.tp * degrees.dp, place.tp * degrees.dp + place.dp
    own = stages(len(layers), degrees.pp)[place.pp]
    return [
        range(
            layers[n].start + len(layers[n]) * mine // parts,
            layers[n].start + len(layers[n]) * (mine + 1) // parts,
        )
        for n in own
    ]


def facts(spec: TrainerSpec, profile: Profile) -> dict[str, str]:
    """Say that nothing is learned here, and what carries which parallelism."""
    share = f"{100 * spec.flops_share:g} % of its peak"
    told = {
        "trainer": f"paced by the profile of {profile.model}: nothing is learned",
        "computes": f"an emulated {profile.gpu.name} at {share}, {spec.speed:g} times as fast",
        "bytes": f"{spec.bytes_scale:g} of the model's",
        "order": "GPipe; nothing overlaps",
    }
    carries = {
        "dp": "all_gather of parameters, reduce_scatter of gradients, once a step (FSDP2's ZeRO-2)",
        "tp": "all_reduce, twice a layer each way",
        "pp": "send and recv between stages",
        "ep": "all_to_all, twice a layer each way",
    }
    degrees = {axis: getattr(spec.degrees, axis) for axis in carries}
    return told | {axis: carries[axis] for axis, degree in degrees.items() if degree > 1}
