"""How a failure is told on the terminal, and the exit code it ends with: the one place for both.

A user's mistake or a broken bench is one message without a traceback. Whatever nobody foresaw is a
bug of ours: it keeps its traceback and says so.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import click

from drivers.errors import DeviceFault, Misuse
from harness.errors import MACHINE, ExitCode, HarnessError

WORST_FIRST = (
    ExitCode.RESTORE_FAILED,
    ExitCode.BUG,
    ExitCode.INTERRUPTED,
    ExitCode.USAGE,
    ExitCode.INFRASTRUCTURE,
    ExitCode.FAILED,
    ExitCode.NOTHING_RAN,
    ExitCode.INCONCLUSIVE,
    ExitCode.PASSED,
)
"""Which code wins when several things failed at once. A switch left changed outranks all."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code that one error (not a group) stands for."""
    match error:
        case HarnessError():
            return error.exit_code
        case Misuse() | click.UsageError() | click.FileError() | click.BadParameter():
            return ExitCode.USAGE
        case DeviceFault():
            return ExitCode.INFRASTRUCTURE
        case OSError(errno=number) if number in MACHINE:
            return ExitCode.INFRASTRUCTURE
        case KeyboardInterrupt() | click.Abort():
            return ExitCode.INTERRUPTED
        case _:
            return ExitCode.BUG


def worst(codes: Iterator[ExitCode]) -> ExitCode:
    """Return the code that outranks the others."""
    return min(codes, key=WORST_FIRST.index)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what really happened: the leaves of an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def tell(error: BaseException) -> ExitCode:
    """Write what happened to standard error and return the exit code."""
    for leaf in leaves(error):
        _tell_one(leaf)
    return worst(exit_code(leaf) for leaf in leaves(error))


def _tell_one(error: BaseException) -> None:
    code = exit_code(error)
    if isinstance(error, click.ClickException):
        error.show()
    elif code is ExitCode.BUG:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        click.echo(
            "harness: this is a bug of ours, not your mistake: please report it with the lines "
            "above and the run folder",
            err=True,
        )
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo("harness: interrupted", err=True)
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"harness: {where}{error.strerror}", err=True)
    else:
        lines = [str(error) or type(error).__name__, *getattr(error, "__notes__", ())]
        click.echo("\n".join(f"harness: {line}" for line in lines), err=True)
