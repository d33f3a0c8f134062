"""What a calibration is asked, as given on the command line, with its files read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.model.bench import Bench
from harness.model.calibration import Grid
from harness.model.layout import Layout, parse_layout
from harness.model.load import load_bench, load_profile, load_shape
from harness.model.schema import did_you_mean
from harness.run.generation.calibrate import CalibrationAsked
from harness.wire.generation import EngineSpec

SEQUENCES_MAX = 256
STEP_MAX_TOKENS = 2048
"""What engines are built for, at least: as scenarios do unless they say otherwise."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The command line; see `harness.cli.calibrate`."""

    bench_path: Path
    engine: Literal["paced", "vllm"]
    grid: Grid
    steps: int
    timeout_s: float
    command: str
    model: str = ""
    profile_path: Path | None = None
    node: str = ""
    layouts: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None


def load_calibration(wanted: Wanted) -> tuple[Bench, CalibrationAsked]:
    """Read the files. Raises `BadFile` or `UsageError` with what is wrong; opens nothing."""
    if wanted.engine == "paced":
        if wanted.profile_path is None:
            raise UsageError("--engine paced runs by a latency profile: give it with --profile")
        if wanted.model or wanted.options:
            raise UsageError("--model and --option are for --engine vllm")
    bench = load_bench(wanted.bench_path)
    node = _node(bench, wanted)
    known = load_profile(wanted.profile_path) if wanted.profile_path else None
    model = wanted.model
    if model and bench.launcher != "manual":  # the nodes are here
        model = str(Path(model).expanduser().resolve())
        load_shape(model)  # what is wrong with it is told before anything is opened
    paced = wanted.engine == "paced"
    return bench, CalibrationAsked(
        spec=EngineSpec(
            engine=wanted.engine,
            profile=known if paced else None,
            model=model,
            options=dict(wanted.options or {}),
            sequences_max=max(SEQUENCES_MAX, *wanted.grid.batch),
            step_max_tokens=max(STEP_MAX_TOKENS, *wanted.grid.prefill_tokens),
        ),
        node=node,
        gpus=bench.nodes[node].gpus or bench.nodes[node].emulated_gpus,
        layouts=_layouts(wanted.layouts),
        grid=wanted.grid,
        steps=wanted.steps,
        timeout_ns=round(wanted.timeout_s * NS_PER_S),
        origin=f"{wanted.command} ({version('orchestrl-harness')}), bench {bench.name}",
        known=known,
    )


def _node(bench: Bench, wanted: Wanted) -> str:
    """Return the node to measure on, which has GPUs or may find some."""
    if wanted.node and wanted.node not in bench.nodes:
        guess = did_you_mean(wanted.node, bench.nodes)
        raise UsageError(f"--node {wanted.node}: {wanted.bench_path} has no such node{guess}")
    pods = [name for name, node in bench.nodes.items() if node.pod == "generate"]
    if not wanted.node and not pods:
        raise UsageError(
            f'{wanted.bench_path}: no node has pod = "generate"; say which to measure with --node'
        )
    name = wanted.node or pods[0]
    node = bench.nodes[name]
    if bench.world == "emulated" and not node.emulated_gpus:
        raise UsageError(
            f"{wanted.bench_path}: nodes.{name}.emulated_gpus: missing; an emulated node has no "
            "GPUs of its own, say how many stand for one each"
        )
    return name


def _layouts(names: tuple[str, ...]) -> tuple[Layout, ...]:
    layouts = []
    for name in names:
        try:
            layout = parse_layout(name)
        except ValueError as error:
            raise UsageError(f"--layouts: {error}") from error
        if layout.instances != 1:
            raise UsageError(f"--layouts: {name}: one instance is measured at a time: 1x..")
        layouts.append(layout)
    return tuple(dict.fromkeys(layouts))
