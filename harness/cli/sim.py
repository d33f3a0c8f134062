"""``harness sim``: a scenario in the simulated world, in as little time as it takes to compute."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness import entry
from harness.cli.output import best_effort, json_option
from harness.cli.progress import Progress
from harness.cli.runs import exit_code_of, print_run, runs_option
from harness.model.load import load_bench
from harness.rlsim.bills import bill_of, bill_of_bench, network_of
from harness.rlsim.economics import tell_bill
from harness.rlsim.prices import load_power, load_prices
from harness.run.asked import Simulation

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("scenario", type=FILE)
@click.option("--bench", type=FILE, metavar="FILE", help="Bench file, instead of the scenario's.")
@click.option(
    "--calibration",
    type=FILE,
    metavar="FILE",
    help="What the bench takes its times from, instead of what its file names.",
)
@runs_option
@click.option("--strict", is_flag=True, help="End with 6 when a check is inconclusive.")
@click.option("--bill", is_flag=True, help="Also print what the bench's network costs, by line.")
@click.option("--quiet", is_flag=True, help="Tell the outcome only, not the way to it.")
@json_option
def sim(
    *,
    scenario: Path,
    bench: Path | None,
    calibration: Path | None,
    runs: Path,
    strict: bool,
    bill: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Simulate SCENARIO on a bench of models: the same orchestration, on a clock that jumps.

    The bench may be a simulated or an emulated one; nothing of it is started. The same files and
    seed give the same journal, byte for byte.

    \b
    harness sim scenarios/rl-simulated.toml
    harness sim scenarios/rl-simulated.toml --bench scenarios/benches/sim-2048.toml
    harness sim scenarios/rl-orchestrated.toml
    """
    telling = sys.stderr if as_json else sys.stdout
    summary = entry.run_scenario(
        scenario,
        bench,
        runs,
        simulation=Simulation(calibration),
        progress=None if quiet else Progress(telling),
    )
    with best_effort():
        print_run(summary, runs, as_json=as_json)
        if bill:
            click.echo("\n" + "\n".join(_bill(runs / summary.id / "bench.toml")), err=as_json)
    return exit_code_of(summary, strict=strict)


def _bill(bench_file: Path) -> list[str]:
    """Return the bill of a bench's network: of its design, if it is generated, or as it is cabled.

    Raises `UsageError` for a rate that nothing is priced at.
    """
    bench, prices, power = load_bench(bench_file), load_prices(), load_power()
    if bench.generated is not None:
        return tell_bill(bill_of(network_of(bench), prices, power))
    return tell_bill(bill_of_bench(bench, prices, power))
