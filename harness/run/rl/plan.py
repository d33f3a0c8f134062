"""What a run would train, and under which policies, in words; nothing is opened. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from harness.model.bench import World
from harness.model.layout import Mix
from harness.model.listing import first
from harness.model.placement import place
from harness.model.scenario import Rl
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.plan import placed_text
from harness.run.rl.asked import TrainingAsked
from harness.run.rl.edges import children_of, edges_of, sources_of
from harness.scheduling.policies import Policy, parse_policy

ORDER = {"in_order": "in the order they were asked", "first_ready": "whichever is complete first"}
OVER_AGE = {"wait": "waited for", "drop": "dropped and generated anew"}
ACROSS = {
    "continue": "go on with their KV",
    "recompute": "go on with KV computed anew",
    "finish": "end first under the old ones",
}
ROUTING = {
    "assigned": "requests get an instance when their batch begins",
    "least_loaded": "requests go where there is room",
}


def training_notes(asked: TrainingAsked | None, world: World) -> tuple[str, ...]:
    """Return what a reader of the run must know first: what of training is paced."""
    return () if asked is None else (f"training is {trainer_of(asked, world)}",)


def trainer_of(asked: TrainingAsked, world: World) -> str:
    """Return by what is trained: ``paced by the GPU of ...``, or real."""
    spec = asked.spec
    if spec.profile is None:
        model = spec.model or "the tiny model that vLLM makes"
        return f"real, of {model}: its rewards are real, its speed says nothing of larger models"
    times = f", {spec.speed:g} times as fast" if spec.speed != 1 else ""
    collectives = "models" if world == "simulated" else "real"
    return (
        f"paced: computing takes what {spec.profile.model} takes on {spec.profile.gpu.name} at "
        f"{100 * spec.flops_share:g} % of its peak{times} (emulated accelerator); collectives are "
        f"{collectives}, with {100 * spec.bytes_scale:g} % of the bytes"
    )


def tell_training(asked: TrainingAsked, world: World) -> Iterator[str]:
    """Yield the trainer, and which ranks are where."""
    yield f"train     {trainer_of(asked, world)}"
    ranks = first(f"{node} {_ranks(numbers)}" for node, numbers in asked.ranks_of.items())
    yield f"  {asked.spec.degrees}: {ranks}"


def loop_of(step: Rl) -> str:
    """Return what an rl step is about: ``4 steps of 64 prompts, samples up to 1 version old``."""
    prompts = f"{step.prompts_per_step} prompts" if step.prompts_per_step else "all prompts"
    versions = "1 version" if step.staleness_max == 1 else f"{step.staleness_max} versions"
    policies = "1 policy" if len(step.policies) == 1 else f"each of {len(step.policies)} policies"
    policies += f", over {', '.join(step.fabrics)}" if step.fabrics else ""
    steps = "1 step" if step.steps == 1 else f"{step.steps} steps"
    return f"{steps} of {prompts}, samples up to {versions} old, under {policies}"


def tell_loop(step: Rl, generation: GenerationAsked, training: TrainingAsked) -> Iterator[str]:
    """Yield what happens in one rl step: policies, batches, the way of weights, both loops."""
    policies = [parse_policy(text) for text in step.policies]
    for policy in policies:
        yield f"  {policy.name}: {'; '.join(_does(policy, generation))}"
    yield (
        f"  batches train {ORDER[step.order]}; what would get too old is {OVER_AGE[step.over_age]}"
    )
    yield (
        f"  weights: {path_of(step, generation, training)}, in buckets of {step.bucket}, up to "
        f"{step.sync_retries + 1} attempts; running requests {ACROSS[step.across_sync]}"
    )
    if any(policy.plans for policy in policies):
        yield (
            f"  planner: looks every {step.replan_s:g} s; switches by {step.strategy} where that "
            f"saves {step.gain_min_pct:g} % of the time left, beyond its cost"
        )
    if any(policy.balances for policy in policies):
        yield (
            f"  balancer: looks every {step.balance_ms:g} ms; moves up to "
            f"{step.moves_per_s_max:g} requests a second"
        )
    for index, fault in enumerate(step.sync_faults):
        if fault:
            yield f"  fault: the sync after step {index} is made to be a {fault}"


def path_of(step: Rl, generation: GenerationAsked, training: TrainingAsked) -> str:
    """Return the way of new weights: ``t0 > g0 > g1``, or else who sends to whom."""
    receivers = tuple(generation.gpus_of)
    sources = sources_of(tuple(training.ranks_of), receivers, step.sync)
    edges = edges_of(sources, receivers, step.sync)
    if step.sync == "chain":
        return first((*sources, *receivers), between=" > ")
    senders = dict.fromkeys(sender for sender, _ in edges)
    return first(f"{node} > {', '.join(children_of(node, edges))}" for node in senders)


def _does(policy: Policy, generation: GenerationAsked) -> Iterator[str]:
    """Yield where a policy begins, and what it does then."""
    if policy.first is not None:
        yield _placed(policy.first, generation)
    elif policy.name == "best_static":
        yield "the layout that does best in simulation, with the true lengths"
    yield ROUTING[policy.routing]
    if policy.plans:
        yield "layouts are planned"
    if policy.balances:
        yield "requests move"
    if policy.knows:
        yield "it is told how long responses will be"


def _placed(mix: Mix, generation: GenerationAsked) -> str:
    return placed_text(place(mix, generation.gpus_of))


def _ranks(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {numbers[0]}-{numbers[-1]}"
