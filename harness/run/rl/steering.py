"""What a policy needs before its loop begins: costs, the first layout, the pilot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.model.layout import Layout, Mix
from harness.model.policies import BEST_STATIC
from harness.model.replay import ReplayRequest
from harness.model.workload import GeneratedWorkload
from harness.rlsim.fleet import Hardware
from harness.rlsim.search import best_static
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.fleet import Fleet
from harness.run.rl.pilot import GUESS_S, Pilot
from harness.scheduling.compute import Compute
from harness.scheduling.migration import Costs, estimates_of
from harness.scheduling.policies import Policy, smallest

if TYPE_CHECKING:  # a loop is steered by what is made here
    from harness.run.rl.loop import Loop

TENSOR_DEGREES = (1, 2, 4, 8)
"""What is tried where no profile says what is feasible: engines refuse what they cannot do."""


def compute_of(asked: GenerationAsked, fleet: Fleet | None = None) -> Compute:
    """Return the cost model: by the profile, or by what engines have shown so far."""
    spec = asked.spec
    if spec.profile is not None:
        return Compute.of(
            spec.profile,
            sequences_max=spec.sequences_max,
            step_max_tokens=spec.step_max_tokens,
            kv_max_tokens=spec.kv_max_tokens,
            speed=spec.speed,
        )
    most = max(asked.gpus_of.values())
    layouts = [Layout(1, tp=tp) for tp in TENSOR_DEGREES if tp <= most]
    seen = fleet.speeds.seen if fleet is not None else {}
    capacity = min(
        (p.capacity.blocks * p.capacity.block_tokens for p in fleet.places.values())
        if fleet is not None
        else (),
        default=spec.kv_max_tokens or 2**20,
    )
    return Compute.measured(
        layouts, seen, sequences_max=spec.sequences_max, kv_capacity_tokens=capacity
    )


def first_layout(
    policy: Policy,
    asked: GenerationAsked,
    compute: Compute,
) -> Mix:
    """Return what is up before the loop begins; a policy that plans changes it at once, untimed."""
    if policy.first is not None:
        return policy.first
    if policy.balances and not policy.plans:
        return smallest(compute, asked.gpus_of)
    return Mix((asked.layout,))


def searched(
    policy: Policy, asked: GenerationAsked, batches: Sequence[Sequence[ReplayRequest]]
) -> Policy:
    """Return the policy with what must be searched for: layout and routing of `best_static`.

    All static layouts are simulated, with the true lengths of the run.
    """
    if policy.name == BEST_STATIC and asked.spec.profile is not None:
        hardware = Hardware(
            profile=asked.spec.profile,
            gpus_of=asked.gpus_of,
            sequences_max=asked.spec.sequences_max,
            step_max_tokens=asked.spec.step_max_tokens,
            kv_max_tokens=asked.spec.kv_max_tokens,
        )
        return best_static(batches, hardware, cap_tokens=cap_of(asked))
    return policy


def cap_of(asked: GenerationAsked) -> int:
    """Return the longest that a trajectory's output may get: by the workload, or its longest."""
    if isinstance(asked.workload, GeneratedWorkload):
        return asked.workload.cap_tokens * len(asked.workload.turn_weights)
    return max(request.response_tokens for request in asked.replay.requests)


def turns_of(asked: GenerationAsked) -> int:
    """Return how many turns a trajectory may have: by the workload, or at most."""
    if isinstance(asked.workload, GeneratedWorkload):
        return len(asked.workload.turn_weights)
    return max(len(request.turns) for request in asked.replay.requests)


def _coming(loop: Loop) -> list[int]:
    """Return how many requests each batch has that follows those that were asked for."""
    batches = loop.batches[loop.rollouts.asked : loop.step.steps]
    return [sum(map(len, batch)) for batch in batches]


def pilot_of(loop: Loop, asked: GenerationAsked, compute: Compute) -> Pilot:
    """Return the pilot that flies a loop's policy."""
    spec = asked.spec
    costs = Costs(estimates_of(spec.profile, spec.bytes_scale, asked.link_bytes_per_s))
    return Pilot(
        fleet=loop.fleet,
        step=loop.step,
        number=loop.number,
        policy=loop.policy,
        compute=compute,
        costs=costs,
        cap_tokens=cap_of(asked),
        turns_max=turns_of(asked),
        name=loop.name,
        coming=lambda: _coming(loop),
        entries=lambda: list(loop.open.values()),
        history=loop.seen_history,
        pace=loop.pace,
        guess_s=GUESS_S / spec.speed,
    )
