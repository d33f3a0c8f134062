"""``harness calibrate``: what a bench really does, as a file that paces and simulates it."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from harness import entry
from harness.cli.calibrate_run import run
from harness.cli.output import best_effort, json_option, refuse_taken, show, write_new
from harness.cli.progress import Progress
from harness.cli.runs import runs_option
from harness.errors import ExitCode, UsageError
from harness.model.calibration import STEPS_MIN, Grid, comparison
from harness.model.profile_text import profile_text
from harness.run.generation.calibrate import Calibrated
from harness.run.generation.calibration_asked import Wanted

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
STEPS = 20
TIMEOUT_S = 900.0


def numbers(_: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """Read ``1,4,16``: whole numbers from 1 up; each once, in order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", part) for part in parts):
        wanted = "expected a list of whole numbers from 1 up, such as 1,4,16"
        raise UsageError(f"--{param.name} {text}: {wanted}")
    return tuple(sorted({int(part) for part in parts}))


def axis(name: str, default: str, unit: str) -> Callable[[F], F]:
    """Give the command one axis of its grid."""
    return click.option(
        f"--{name}", callback=numbers, default=default, show_default=True, metavar=unit
    )


class RunFirst(click.Group):
    """A group whose command ``run`` need not be named: a first word that is no command is a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command's name before arguments that begin with none."""
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunFirst)
def calibrate() -> None:
    """Measure what a bench does: fit figures to its runs, or time its steps of generation.

    The word "run" may be left out: a first word that is no command is a run.

    \b
    harness calibrate run latest --out bench.toml --base scenarios/calibrations/h800.toml
    harness calibrate generation --bench lab.toml --model /models/Qwen2.5-14B --out profile.toml
    """


calibrate.add_command(run)


@calibrate.command()
@click.option(
    "--bench", "bench_path", type=FILE, required=True, metavar="FILE", help="What to measure on."
)
@click.option("--out", type=FILE, required=True, metavar="FILE", help="Profile to write.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--engine", type=click.Choice(["vllm", "paced"]), default="vllm", show_default=True)
@click.option(
    "--model",
    default="",
    metavar="DIR",
    help="Model folder on the nodes, for vllm; none: a tiny random model is made.",
)
@click.option(
    "--profile",
    "profile_path",
    type=FILE,
    metavar="FILE",
    help="Profile to start from: its tables of what is measured are replaced. paced runs by it.",
)
@click.option("--node", default="", help="Node to measure on; none: the first of a generate pod.")
@click.option(
    "--layouts",
    default="",
    metavar="L,L",
    help="Layouts of one instance, such as 1xTP1,1xTP2; none: TP 1, 2, 4 .. as far as they fit.",
)
@axis("batch", "1,4,16,32", "N,N")
@axis("context", "128,512,2048", "TOKENS,..")
@axis("prefill", "128,512,2048", "TOKENS,..")
@click.option(
    "--steps",
    type=click.IntRange(min=STEPS_MIN),
    default=STEPS,
    show_default=True,
    help="Decode steps a point; prompts are prefilled half as often.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Passed to vLLM's engine as it is; may be given several times.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="For each of: starting processes, building an engine, measuring a point.",
)
@runs_option
@json_option
def generation(
    *,
    out: Path,
    force: bool,
    batch: tuple[int, ...],
    context: tuple[int, ...],
    prefill: tuple[int, ...],
    layouts: str,
    options: tuple[str, ...],
    runs: Path,
    as_json: bool,
    **given: Any,
) -> int:
    """Measure how long steps of generation take on a bench, and write a latency profile.

    Of each layout, one instance at a time decodes batches and prefills prompts, alone on one node.
    Points that it has no room for are left out, with the reason.

    \b
    harness calibrate generation --bench bench.toml --out profile.toml
    harness calibrate generation --bench bench.toml --out profile.toml --layouts 1xTP1,1xTP2
    """
    refuse_taken(out, force=force)
    wanted = Wanted(
        **given,  # as they are
        grid=Grid(batch, context, prefill),
        layouts=tuple(layouts.replace(",", " ").split()),
        options=dict(map(_option, options)),
        command=shlex.join(["harness", *sys.argv[1:]]),
    )
    summary, found = entry.calibrate_generation(
        wanted, runs, Progress(sys.stderr if as_json else sys.stdout)
    )
    if found is None:
        return ExitCode.BUG if summary.exit_code is None else summary.exit_code
    write_new(out, profile_text(found.profile, _heading(found, summary.id)), force=force)
    with best_effort():
        text = "\n".join(["", *comparison(found.tables), "", f"written: {out}"])
        show(_as_json(found, out, summary.id), text, as_json=as_json)
    return ExitCode.PASSED


def _option(text: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``: a value that TOML knows is taken so, any other is a text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--option {text}: expected KEY=VALUE, such as enforce_eager=true")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        return key, value


def _heading(found: Calibrated, run: str) -> list[str]:
    """Return what the file opens with: what it is, and what its reader must know."""
    lines = [f"How fast {found.profile.model} generates: a latency profile."]
    lines += [f"Measured by harness calibrate; every step of every point is in run {run}."]
    for title, texts in (("Left out", found.left_out), ("Doubtful", found.doubts)):
        if any(texts.values()):
            told = [f"  {name}: {text}" for name, lines in texts.items() for text in lines]
            lines += ["", f"{title}:", *told]
    return lines


def _as_json(found: Calibrated, out: Path, run: str) -> dict[str, object]:
    return {
        "profile": str(out),
        "run": run,
        "model": found.profile.model,
        "tables": found.tables,
        "left_out": found.left_out,
        "doubts": found.doubts,
    }
