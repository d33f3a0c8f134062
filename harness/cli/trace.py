"""``harness trace``: execution traces, checked at the door, and replayed on a bench's network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.cli.output import json_option, refuse_taken, show, write_new
from harness.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from harness.rlsim.tables import Table
    from harness.rlsim.traces.model import Trace

FILE = click.Path(path_type=Path)
F = TypeVar("F", bound=Callable[..., Any])


def reading_options(function: F) -> F:
    """Give a command what is said of a trace: FILE, its groups and its GPUs."""
    for option in (
        click.option(
            "--memory-gb-per-s",
            type=click.FloatRange(min=0, min_open=True),
            metavar="GB/S",
            help="Rate of a GPU's memory, for nodes that state bytes, not times.",
        ),
        click.option(
            "--tflop-per-s",
            type=click.FloatRange(min=0, min_open=True),
            metavar="TFLOP/S",
            help="Rate of a GPU, for nodes that state operations, not times.",
        ),
        click.option("--gpu", metavar="KIND", default="", help="Kind of its GPUs, such as h100."),
        click.option(
            "--groups", type=FILE, metavar="FILE", help="Ranks of a Chakra trace's process groups."
        ),
        click.argument("file", type=FILE),
    ):
        function = option(function)
    return function


def pairs_of(
    _: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """Read options ``KEY=VALUE``."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise UsageError(f"{parameter.opts[0]} {text}: expected {parameter.metavar}")
        found[key] = value
    return found


@click.group()
def trace() -> None:
    """Check execution traces and replay them: our JSON, or Chakra's protobuf and JSON.

    \b
    harness trace check scenarios/traces/overlap.json
    harness trace run scenarios/traces/overlap.json --bench scenarios/benches/sim-64.toml
    harness trace make step.json --profile scenarios/profiles/qwen2.5-14b-h800.toml --layout DP2TP4
    """


@trace.command()
@reading_options
@json_option
def check(
    *,
    file: Path,
    groups: Path | None,
    gpu: str,
    tflop_per_s: float | None,
    memory_gb_per_s: float | None,
    as_json: bool,
) -> None:
    """Check FILE, and tell what is in it; every problem is told at once.

    Of a Chakra trace, FILE is one of its files or what their names begin with.

    \b
    harness trace check scenarios/traces/overlap.json
    harness trace check scenarios/traces/pipeline.json --json
    """
    from harness.rlsim.traces.checks import checked  # noqa: PLC0415
    from harness.rlsim.traces.contents import contents, lines  # noqa: PLC0415

    found = contents(checked(_read(file, groups, gpu, tflop_per_s, memory_gb_per_s)))
    show(found, "\n".join(lines(found)), as_json=as_json)


@trace.command()
@reading_options
@click.option("--bench", type=FILE, metavar="FILE", required=True, help="Bench to replay it on.")
@click.option(
    "--calibration",
    type=FILE,
    metavar="FILE",
    help="What times are taken from, instead of what the bench file names.",
)
@click.option(
    "--pod", type=click.Choice(["train", "generate"]), help="Place ranks on this role's nodes only."
)
@click.option(
    "--circuits",
    type=click.Choice(["dark", "ring", "pairs"]),
    default="dark",
    show_default=True,
    help="Circuits that are lit throughout.",
)
@click.option(
    "--speed",
    "speeds",
    multiple=True,
    callback=pairs_of,
    metavar="NODE=SHARE",
    help="A node computes so many times as fast as the trace says, such as n3=0.8.",
)
@click.option(
    "--nccl-tests",
    "logs",
    multiple=True,
    callback=pairs_of,
    metavar="OPERATION=FILE",
    help="Measured times: what nccl-tests printed of this operation.",
)
@click.option("--timeline", type=FILE, metavar="FILE", help="Write a timeline for Perfetto.")
@click.option("--force", is_flag=True, help="Write over a timeline that is there.")
@json_option
def run(
    *,
    file: Path,
    groups: Path | None,
    gpu: str,
    tflop_per_s: float | None,
    memory_gb_per_s: float | None,
    bench: Path,
    calibration: Path | None,
    pod: Any,
    circuits: Any,
    speeds: dict[str, str],
    logs: dict[str, str],
    timeline: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Replay FILE on the network of a bench, ranks placed on its GPUs in order.

    Ends with 1 where something could not run, and says what blocked it.

    \b
    harness trace run scenarios/traces/overlap.json --bench scenarios/benches/sim-64.toml
    harness trace run scenarios/traces/pipeline.json --bench scenarios/benches/sim-64.toml --json
    """
    from harness.rlsim.traces.checks import checked  # noqa: PLC0415
    from harness.rlsim.traces.findings import replayed  # noqa: PLC0415
    from harness.rlsim.traces.ground import ground_of  # noqa: PLC0415
    from harness.rlsim.traces.outcome import lines  # noqa: PLC0415
    from harness.rlsim.traces.timeline import chunks  # noqa: PLC0415

    if timeline is not None:
        refuse_taken(timeline, force=force)
    laid = checked(_read(file, groups, gpu, tflop_per_s, memory_gb_per_s))
    ground = ground_of(
        bench,
        calibration,
        pod=pod,
        circuits=circuits,
        speeds={node: _share(node, text) for node, text in speeds.items()},
        tables=_tables(logs),
    )
    replay, outcome = replayed(laid, ground, keep_spans=timeline is not None)
    if timeline is not None:
        write_new(timeline, "".join(chunks(replay)), force=force)
    show(outcome, "\n".join(lines(outcome)), as_json=as_json)
    return ExitCode.PASSED if outcome.end == "finished" else ExitCode.FAILED


@trace.command()
@click.argument("out", type=FILE)
@click.option(
    "--profile", type=FILE, metavar="FILE", required=True, help="Latency profile of the model."
)
@click.option(
    "--layout", metavar="DEGREES", required=True, help="How it is split, such as DP2TP4PP2."
)
@click.option("--samples", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Each.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@json_option
def make(
    *,
    out: Path,
    profile: Path,
    layout: str,
    samples: int,
    tokens: int,
    force: bool,
    as_json: bool,
) -> None:
    """Write a trace of one step of our own trainer to OUT, as a sample to start from.

    \b
    harness trace make step.json --profile scenarios/profiles/qwen2.5-14b-h800.toml --layout DP2TP4
    """
    from harness.model.degrees import parse_degrees  # noqa: PLC0415
    from harness.model.load import load_profile  # noqa: PLC0415
    from harness.model.training.trainer import TrainerSpec, profile_of  # noqa: PLC0415
    from harness.rlsim.traces.checks import checked  # noqa: PLC0415
    from harness.rlsim.traces.contents import contents, lines  # noqa: PLC0415
    from harness.rlsim.traces.json_trace import dump  # noqa: PLC0415
    from harness.rlsim.traces.making import made  # noqa: PLC0415

    refuse_taken(out, force=force)
    try:
        degrees = parse_degrees(layout)
    except ValueError as error:
        raise UsageError(f"--layout: {error}") from error
    spec = TrainerSpec(
        mode="paced", degrees=degrees, profile=load_profile(profile), bytes_scale=1.0
    )
    step = made(spec, profile_of(spec), [tokens] * samples)
    write_new(out, dump(step), force=force)
    found = contents(checked(replace(step, where=str(out))))
    show(found, "\n".join(lines(found)), as_json=as_json)


def _read(
    file: Path,
    groups: Path | None,
    gpu: str,
    tflop_per_s: float | None,
    memory_gb_per_s: float | None,
) -> Trace:
    from harness.rlsim.traces.model import Gpu  # noqa: PLC0415
    from harness.rlsim.traces.reading import read  # noqa: PLC0415

    said = Gpu(gpu, (tflop_per_s or 0.0) * 1e12, (memory_gb_per_s or 0.0) * 1e9)
    return read(file, groups).on(said)


def _share(node: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"--speed {node}={text}: expected a number, such as 0.8") from error


def _tables(logs: dict[str, str]) -> tuple[Table, ...]:
    from typing import get_args  # noqa: PLC0415

    from harness.model.scenario import Op  # noqa: PLC0415
    from harness.rlsim.tables import read_logs  # noqa: PLC0415

    for op in logs:
        if op not in get_args(Op):
            raise UsageError(f"--nccl-tests {op}=...: expected one of {', '.join(get_args(Op))}")
    return read_logs({op: Path(path) for op, path in logs.items()})  # type: ignore[misc]  # checked above
