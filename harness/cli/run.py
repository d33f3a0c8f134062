"""``harness run``, ``check`` and ``recover``: a scenario on a bench, its plan, and its undoing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import click

from harness import entry
from harness.cli.output import best_effort, json_option, show, write_new
from harness.cli.progress import Progress
from harness.cli.runs import exit_code_of, print_run, runs_option
from harness.errors import ExitCode, UsageError
from harness.fabric.drawing import draw
from harness.model.scenario import Engine
from harness.run.asked import load
from harness.run.fabric.plan import panels

FILE = click.Path(path_type=Path)

bench_option = click.option(
    "--bench", type=FILE, metavar="FILE", help="Bench file, instead of the scenario's own."
)
engine_option = click.option(
    "--engine",
    type=click.Choice(get_args(Engine)),
    help="What generates, instead of the scenario's engine.",
)


@click.command()
@click.argument("scenario", type=FILE)
@bench_option
@engine_option
@runs_option
@click.option(
    "--max-wait",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds to wait for the agents, instead of the bench file's max_wait_s.",
)
@click.option(
    "--resume",
    metavar="RUN",
    help="Go on from the last checkpoint of this run's RL loop, with the same scenario.",
)
@click.option("--strict", is_flag=True, help="End with 6 when a check is inconclusive.")
@json_option
def run(
    *,
    scenario: Path,
    bench: Path | None,
    engine: Engine | None,
    runs: Path,
    max_wait: float | None,
    resume: str | None,
    strict: bool,
    as_json: bool,
) -> int:
    """Run SCENARIO on a bench, tell it as it happens, and put the switches back.

    Ctrl-C once stops in order and restores; twice stops hard, for `harness recover`. With --json
    the summary (run.json) goes to standard output and the telling to standard error.

    \b
    harness run scenarios/quickstart.toml
    harness run scenarios/quickstart.toml --bench my-lab.toml --max-wait 120
    harness run scenarios/parallelism-switch.toml --engine vllm
    harness run scenarios/rl-async.toml --resume latest
    """
    summary = entry.run_scenario(
        scenario,
        bench,
        runs,
        engine=engine,
        max_wait_s=max_wait,
        resume=resume,
        progress=Progress(sys.stderr if as_json else sys.stdout),
    )
    with best_effort():
        print_run(summary, runs, as_json=as_json)
    return exit_code_of(summary, strict=strict)


@click.command()
@click.argument("scenario", type=FILE)
@bench_option
@engine_option
@click.option(
    "--picture",
    type=FILE,
    metavar="FILE.svg",
    help="Also draw the bench with the circuits of each shape and phase; written over if there.",
)
@json_option
def check(
    scenario: Path, bench: Path | None, engine: Engine | None, picture: Path | None, as_json: bool
) -> None:
    """Check SCENARIO against its bench and print the plan; nothing is opened and nothing is sent.

    \b
    harness check scenarios/quickstart.toml
    harness check scenarios/parallelism-switch.toml --engine vllm
    harness check scenarios/rfabric-phases.toml --picture circuits.svg
    """
    if picture is not None and picture.suffix != ".svg":
        raise UsageError(f"{picture}: the picture is an SVG; give a name that ends in .svg")
    plan = entry.plan_text(scenario, bench, engine)
    if picture is not None:
        asked = load(scenario, bench, engine)
        write_new(picture, draw(asked.topology, panels(asked)), force=True)
    show({"scenario": str(scenario), "plan": plan.splitlines()}, plan, as_json=as_json)


@click.command()
@click.argument("run", default="latest")
@runs_option
@json_option
def recover(run: str, runs: Path, as_json: bool) -> int:
    """Put the switches of a killed run back as it found them; the latest run by default.

    Only ports that the run's bench file calls ours are touched. Ends with 5 where a switch could
    not be restored: a person is needed then.

    \b
    harness recover
    harness recover runs/latest
    """
    restored = entry.recover(run, runs)
    text = "\n".join(f"{switch}: {outcome}" for switch, outcome in restored.items())
    with best_effort():
        show(restored, text or "nothing to restore", as_json=as_json)
    return ExitCode.PASSED
