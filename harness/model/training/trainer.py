"""Which trainer runs, and what a paced one is: what it can be split into, and how fast it is. Pure.

A paced trainer computes for the time that the profile's GPU needs for its operations at
`flops_share` of its peak, divided by `speed`, and sends `bytes_scale` of the model's bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from harness.errors import UsageError
from harness.model.degrees import Degrees
from harness.model.profile import Profile
from harness.model.shape import ModelShape


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which trainer runs: the same for all of its ranks.

    `paced` needs `profile`. `real` trains the decoder of `shape`; its first weights are those of
    `model`, a directory on the node, or follow from `seed` as the engine's tiny model does.
    """

    mode: Literal["paced", "real"]
    degrees: Degrees
    profile: Profile | None = None
    shape: ModelShape | None = None
    model: str = ""
    seed: int = 0
    speed: float = 1.0
    """paced: computing takes 1 / speed of the profile's time."""
    flops_share: float = 0.4
    bytes_scale: float = 1e-3
    micro_batch_tokens: int = 16384
    learning_rate: float = 6e-3
    clip: float = 0.2
    temperature: float = 1.0
    """At which responses are drawn."""


def profile_of(spec: TrainerSpec) -> Profile:
    """Return the profile that a trainer is paced by. Raises `UsageError` for what cannot be."""
    if spec.profile is None:
        raise UsageError("the paced trainer needs a latency profile")
    if problems := misfits(spec.profile.shape, spec.degrees):
        raise UsageError("; ".join(problems))
    return spec.profile


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
