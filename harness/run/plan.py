"""What a run would do, in words: every step, circuit and device command; nothing is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drivers.base import EMPTY, Delta, Matching
from drivers.catalog import preview
from harness.fabric.circuits import plan_shape
from harness.fabric.links import Link, Plan
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.model.listing import FEW, few
from harness.model.scenario import Check, Collectives, Generate, Reconfigure, Rl, Scenario, Shift
from harness.run.fabric.plan import outlook_of, tell_fabrics
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.plan import requests_of, tell_generation, tell_step
from harness.run.rl.asked import TrainingAsked
from harness.run.rl.plan import loop_of, tell_loop, tell_training

COMMANDS_SHOWN = 2
"""Changes whose device commands are printed in full; the rest of a series repeats them."""


def plan_all(topology: Topology, scenario: Scenario) -> dict[str, Plan]:
    """Plan every shape of the scenario; raises `UsageError` naming the first that cannot be."""
    return {name: plan_shape(topology, name, shape) for name, shape in scenario.shapes.items()}


def tell_plan(
    bench: Bench,
    topology: Topology,
    scenario: Scenario,
    plans: Mapping[str, Plan],
    *,
    generation: GenerationAsked | None = None,
    training: TrainingAsked | None = None,
) -> Iterator[str]:
    """Yield the plan's lines: bench, shapes, what generates and trains, steps, checks.

    Commands are shown from an empty map; on the bench only the difference to what is found is sent.
    """
    yield f"question  {scenario.question}"
    yield f"bench     {bench.name} ({bench.world}): {_census(topology)}"
    yield from _devices(bench, topology)
    for name, plan in plans.items():
        yield f"shape     {name}: {_links(plan.links)}"
        for a, b in plan.unserved:
            yield f"  {a}-{b} stays electrical: no switch has a free uplink of both"
    if generation is not None:
        yield from tell_generation(generation, scenario)
    if training is not None:
        yield from tell_training(training, bench.world)
    yield "custody   snapshot " + (few(topology.switches) or "nothing: no switches")
    yield from _steps(bench, topology, scenario, plans, generation=generation, training=training)
    restored = "every switch to its snapshot, verified by read-back"
    if any(place.steered for place in topology.tors.values()):
        restored = f"every ToR to no route of ours, {restored}"
    yield "restore   " + (restored if topology.switches else "nothing: no switches")
    for check in scenario.checks:
        yield f"check     {_limit(check)}"
    yield "nothing was opened and nothing was sent"


def _devices(bench: Bench, topology: Topology) -> Iterator[str]:
    """Yield who is spoken to: ToRs that are steered, and switches; many that are alike at once."""
    alike: dict[str, list[str]] = {}
    for name, place in topology.tors.items():
        if place.steered:
            tor = bench.tors[name]
            at = f" at {tor.url}" if tor.url else f", {bench.world}"
            alike.setdefault(f"steered by {tor.driver}{at}", []).append(name)
    for name, switch in bench.switches.items():
        told = f"{switch.driver} at {switch.url}, ports {switch.ports}"
        alike.setdefault(told, []).append(name)
    for told, names in alike.items():
        for shown in names if len(names) <= FEW else (few(names),):
            yield f"  {shown}  {told}"


def _steps(
    bench: Bench,
    topology: Topology,
    scenario: Scenario,
    plans: Mapping[str, Plan],
    *,
    generation: GenerationAsked | None,
    training: TrainingAsked | None,
) -> Iterator[str]:
    """Yield each step, with what it sends from the circuits that are lit by then."""
    lit: frozenset[Link] = frozenset()
    for number, step in enumerate(scenario.steps):
        yield f"step {number}    {_title(step)}"
        if isinstance(step, Shift):
            yield from _change(bench, topology, lit, plans[step.shape].links)
            lit = plans[step.shape].links
        elif isinstance(step, Reconfigure):
            for i in range(min(step.count, COMMANDS_SHOWN)):
                shape = step.shapes[i % len(step.shapes)]
                yield f"  to {shape}:"
                yield from _change(bench, topology, lit, plans[shape].links)
                lit = plans[shape].links
            lit = plans[step.shapes[(step.count - 1) % len(step.shapes)]].links
        elif isinstance(step, Generate):
            yield from tell_step(step)
        elif isinstance(step, Rl) and generation is not None and training is not None:
            yield from tell_loop(step, generation, training)
            if step.fabrics:
                outlook = outlook_of(
                    topology, scenario, step, plans, generation=generation, training=training
                )
                yield from tell_fabrics(topology, step, outlook, training.spec.degrees)


def _census(topology: Topology) -> str:
    return (
        f"{len(topology.nodes)} nodes, {len(topology.tors)} ToRs,"
        f" {len(topology.switches)} switches, {len(topology.uplinks)} uplinks"
    )


def _links(links: frozenset[Link]) -> str:
    return ", ".join(str(link) for link in sorted(links)) or "no circuit"


def _title(step: Collectives | Shift | Reconfigure | Generate | Rl) -> str:
    match step:
        case Collectives():
            sizes, ops = ", ".join(step.sizes), ", ".join(step.ops)
            return f"collectives: {ops} at {sizes}, {step.iterations} iterations, {step.group}"
        case Shift():
            return f"shape: bring up {step.shape}"
        case Reconfigure():
            mode = "riding through" if step.ride_through else "draining"
            shapes = ", ".join(step.shapes)
            return f"reconfigure: {step.count} times through {shapes}, {mode} {step.op} {step.size}"
        case Generate():
            return f"generate: {requests_of(step)}"
        case Rl():
            return f"rl: {loop_of(step)}"


def _change(
    bench: Bench, topology: Topology, lit: frozenset[Link], wanted: frozenset[Link]
) -> Iterator[str]:
    """Yield the commands that each switch is sent, and how long it should stay dark."""
    for name, switch in bench.switches.items():
        delta = Delta.between(_map(topology, lit, name), _map(topology, wanted, name))
        if not delta:
            yield f"    {name}: no change, nothing is sent"
            continue
        kept = f", {len(delta.keep)} circuits stay lit" if delta.keep else ""
        emulated_ms = f"{switch.emulate.switch_ms:g} ms"
        dark = emulated_ms if bench.world == "emulated" else "as long as the unit takes"
        yield f"    {name}: dark for {dark}{kept}"
        for line in preview(switch.driver, delta):
            yield f"      {line}"


def _map(topology: Topology, links: frozenset[Link], switch: str) -> Matching:
    return topology.matching(links, switch) if links else EMPTY


def _limit(check: Check) -> str:
    over = f" / {check.ratio_to}" if check.ratio_to else ""
    bounds = [
        f"{sign} {limit:g}"
        for sign, limit in ((">=", check.at_least), ("<=", check.at_most))
        if limit is not None
    ]
    return f"{check.metric}{over} {check.stat} {' and '.join(bounds)}"
