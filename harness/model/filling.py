"""Scenarios that fill any bench: ``*xTP2`` is as many instances as fit, ``DP*TP8`` as many shards.

A star stands for a number that follows from the GPUs of the bench, once one is chosen; likewise
``prompts_per_gpu``, the requests of a step. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from harness.errors import UsageError
from harness.model.bench import Bench
from harness.model.degrees import parse_degrees
from harness.model.layout import parse_layout
from harness.model.placement import gpus_of, trainers_of
from harness.model.scenario import Generate, Generation, Rl, Scenario
from harness.model.workload import GeneratedWorkload, Workload

_INSTANCES = re.compile(r"\*x(?=[A-Z])")
_SHARDS = re.compile(r"DP\*")


def filled(scenario: Scenario, bench: Bench | None = None) -> Scenario:
    """Return the scenario with numbers for its stars: those of the bench; without one, 1.

    Raises `UsageError`, naming the key, where not one instance, or shard, fits.
    """
    generation, training = scenario.generation, scenario.training
    if generation is not None:
        steps = tuple(
            _step(f"steps[{i}]", step, generation, bench) for i, step in enumerate(scenario.steps)
        )
        scenario = msgspec.structs.replace(
            scenario,
            steps=steps,
            generation=msgspec.structs.replace(
                generation,
                layout=_layout("generation.layout", generation.layout, generation, bench),
                pool=_layouts("generation.pool", generation.pool, generation, bench),
            ),
        )
    if training is not None and _SHARDS.search(training.layout):
        there = sum(trainers_of(training, bench).values()) if bench else None
        layout = _shards(training.layout, there)
        scenario = msgspec.structs.replace(
            scenario, training=msgspec.structs.replace(training, layout=layout)
        )
    return scenario


def filling(workload: Workload, generation: Generation, bench: Bench) -> Workload:
    """Return the workload with as many prompts a step as `prompts_per_gpu` says, where it does."""
    if not generation.prompts_per_gpu or not isinstance(workload, GeneratedWorkload):
        return workload
    gpus = sum(gpus_of(generation, bench).values())
    prompts = max(1, round(generation.prompts_per_gpu * gpus))
    return msgspec.structs.replace(workload, prompts=prompts)


def _step(where: str, step: Any, generation: Generation, bench: Bench | None) -> Any:
    """Return a step with numbers for the stars of its layouts or policies."""
    if isinstance(step, Generate):
        key, texts = "layouts", step.layouts
    elif isinstance(step, Rl):
        key, texts = "policies", step.policies
    else:
        return step
    return msgspec.structs.replace(
        step, **{key: _layouts(f"{where}.{key}", texts, generation, bench)}
    )


def _layouts(
    where: str, texts: Iterable[str], generation: Generation, bench: Bench | None
) -> tuple[str, ...]:
    return tuple(_layout(f"{where}[{i}]", text, generation, bench) for i, text in enumerate(texts))


def _layout(where: str, text: str, generation: Generation, bench: Bench | None) -> str:
    """Return a layout, or a policy that holds on to one, with a number of instances."""
    star = _INSTANCES.search(text)
    if star is None:
        return text
    if bench is None:
        return _INSTANCES.sub("1x", text)
    form = re.split(r"[/+]", text[star.end() :])[0]
    try:
        size = parse_layout(f"1x{form}").gpus_per_instance
    except ValueError:
        return _INSTANCES.sub("1x", text)  # what is wrong with it is told by who reads it
    found = gpus_of(generation, bench)
    fits = sum(gpus // size for gpus in found.values())
    if not fits:
        most = max(found.values(), default=0)
        raise UsageError(
            f"{where}: {text!r}: an instance of {size} GPUs fits on no node of bench "
            f"{bench.name!r} that generates; they have {most} GPUs at most"
        )
    return _INSTANCES.sub(f"{fits}x", text)


def _shards(text: str, ranks: int | None) -> str:
    """Return degrees of training with a number for DP: all of the ranks there are; None: 1."""
    one = _SHARDS.sub("DP1", text)
    if ranks is None:
        return re.sub(r"EP\d+", "", one)  # which divides the DP that is to come
    try:
        size = parse_degrees(re.sub(r"EP\d+", "", one)).ranks
    except ValueError:
        return one
    if ranks < size:
        raise UsageError(
            f"training.layout: {text!r} takes {size} ranks or more; the bench has {ranks} that "
            "train"
        )
    return _SHARDS.sub(f"DP{ranks // size}", text)
