"""The command line: parse, call one function, turn its outcome into an exit code.

Commands live one module a noun and are imported when they are called, so ``harness --help``
answers at once and loads none of what a run needs. How a failure is told and which exit code it
ends with is decided in `harness.cli.failures`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import click

from harness.cli import failures
from harness.cli.output import fill_closed_streams

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("harness.cli.run:run", "Run a scenario on a bench."),
    "check": ("harness.cli.run:check", "Check a scenario and print its plan; send nothing."),
    "sim": ("harness.cli.sim:sim", "Simulate a scenario: the same orchestration, at any scale."),
    "sweep": ("harness.cli.sweep:sweep", "Simulate a scenario at many points, and compare."),
    "compare": ("harness.cli.compare:compare", "How far a simulation is off what was measured."),
    "trace": ("harness.cli.trace:trace", "Check execution traces, and replay them."),
    "calibrate": ("harness.cli.calibrate:calibrate", "Measure what a bench does."),
    "report": ("harness.cli.report:report", "Tell what a run found."),
    "recover": ("harness.cli.run:recover", "Put the switches of a killed run back."),
    "ocs": ("harness.cli.ocs:ocs", "Read and change an optical circuit switch."),
    "emulate": ("harness.cli.emulate:emulate", "Start an emulated switch to play with."),
    "keys": ("harness.cli.keys:keys", "Make the keys of coordinator and agents."),
    "doctor": ("harness.cli.doctor:doctor", "Tell what this machine can do."),
}
"""Name -> (where the command is, its first help line). Shown in this order."""


class Commands(click.Group):
    """A group whose commands are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None for a name that is not in the table."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}:{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 passed, 1 a check failed, 2 usage, 3 infrastructure, 4 interrupted "
    "and restored, 5 NOT restored, 6 inconclusive (--strict), 7 nothing ran, 70 a bug of ours.",
)
@click.version_option(package_name="orchestrl-harness", message="%(prog)s %(version)s")
def cli() -> None:
    """Time real optical reconfigurations under real collective traffic.

    \b
    harness run scenarios/quickstart.toml      emulated bench, under a minute
    harness check scenarios/quickstart.toml    the plan; nothing is sent
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `args` default to the process's own."""
    fill_closed_streams()
    try:
        outcome = cli.main(args=args, prog_name="harness", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        return failures.tell(error)
    return int(outcome or 0)
