"""What a run is asked to generate with: the scenario's table `[generation]` with its files read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.model.bench import Bench
from harness.model.generation_rules import GenerationFiles
from harness.model.layout import Layout, parse_layout
from harness.model.placement import gpus_of
from harness.model.replay import Replay
from harness.model.scenario import Scenario
from harness.model.shape import ModelShape
from harness.model.workload import Workload
from harness.wire.generation import EngineSpec


@dataclass(frozen=True, kw_only=True)
class GenerationAsked:
    """The engine, what is up first, the requests, and the GPUs of each node, in node order."""

    spec: EngineSpec
    layout: Layout
    replay: Replay
    gpus_of: Mapping[str, int]
    pool: tuple[Layout, ...] = ()
    """Layouts that are built beforehand, for the strategy `pool`."""
    shape: ModelShape | None = None
    """The model's; None where only the nodes know it."""
    emulated: tuple[str, ...] = ()
    """Nodes whose GPUs are emulated: they compute on the CPU, if at all."""
    workload: Workload | None = None
    """Where the requests come from."""
    link_bytes_per_s: float = 125e6
    """Of the data network between nodes: for the first estimates of what a move takes."""


def asked_of(
    scenario: Scenario, bench: Bench, files: GenerationFiles | None
) -> GenerationAsked | None:
    """Return what a scenario that was checked together with its bench asks for, if it generates."""
    generation = scenario.generation
    if generation is None or files is None:
        return None
    paced = generation.engine == "paced"
    found = gpus_of(generation, bench)
    return GenerationAsked(
        spec=EngineSpec(
            engine=generation.engine,
            profile=files.profile if paced else None,
            bytes_scale=generation.bytes_scale,
            model="" if paced else generation.model,
            options=dict(generation.vllm_options),
            sequences_max=generation.sequences_max,
            step_max_tokens=generation.step_max_tokens,
            kv_max_tokens=generation.kv_max_tokens,
            seed=scenario.seed,
            temperature=generation.temperature,
            speed=generation.speed if paced else 1.0,
        ),
        layout=parse_layout(generation.layout),
        replay=files.replay,
        gpus_of=found,
        pool=tuple(map(parse_layout, generation.pool)),
        shape=files.shape,
        workload=files.workload,
        emulated=tuple(name for name in found if not bench.nodes[name].gpus),
        link_bytes_per_s=bench.links.link_mbit_per_s * 1e6 / 8,
    )


def notes(asked: GenerationAsked | None) -> tuple[str, ...]:
    """Return what a reader of the run must know first: what is paced, and what is emulated."""
    if asked is None:
        return ()
    left_out = rows_left_out(asked.replay)
    return (f"generation is {engine_of(asked)}", *((left_out,) if left_out else ()))


def rows_left_out(replay: Replay) -> str:
    """Return how many bad rows of a trace are not replayed, and what is wrong with the first."""
    if not replay.skipped:
        return ""
    rows = "1 bad row" if replay.skipped == 1 else f"{replay.skipped:,} bad rows"
    return f"{rows} of the trace left out, the first: {replay.problems[0]}"


def engine_of(asked: GenerationAsked) -> str:
    """Return by what is generated: ``paced by the latency profile of ...``."""
    profile = asked.spec.profile
    if profile is not None:
        times = f", {asked.spec.speed:g} times as fast" if asked.spec.speed != 1 else ""
        return (
            f"paced by the latency profile of {profile.model} on {profile.gpu.name}{times} "
            f"(emulated accelerator); {100 * asked.spec.bytes_scale:g} % of weights and KV are "
            "held and sent"
        )
    model = asked.spec.model or "a tiny random model"
    on_cpu = f", on the CPU of {', '.join(asked.emulated)}: its speed says nothing of GPUs"
    return f"by vLLM, with {model}{on_cpu if asked.emulated else ''}"
