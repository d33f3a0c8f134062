"""The harness's own errors, and the exit code each of them ends a command with.

A user's mistake or a broken bench is a `HarnessError` with one clear message; anything else that
escapes is a bug of ours (exit code 70) and keeps its traceback.
"""

from __future__ import annotations

import errno
from enum import IntEnum

MACHINE = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM,
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    }
)  # fmt: skip
"""`OSError.errno` that says what this machine lacks, not what we did wrong."""


class ExitCode(IntEnum):
    """What a command's exit status means. `RESTORE_FAILED` outranks all others."""

    PASSED = 0
    FAILED = 1
    USAGE = 2
    INFRASTRUCTURE = 3
    INTERRUPTED = 4
    RESTORE_FAILED = 5
    INCONCLUSIVE = 6
    NOTHING_RAN = 7
    BUG = 70


class HarnessError(Exception):
    """Root: carries the exit code."""

    exit_code: ExitCode = ExitCode.BUG


class UsageError(HarnessError):
    """The user's mistake, in a file or on the command line."""

    exit_code = ExitCode.USAGE


class BadFile(UsageError):
    """A file that does not say what it must: all its problems at once, each with its key path."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.path, self.problems = path, problems
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))


class InfrastructureError(HarnessError):
    """A device, an agent or the clock failed: the bench is at fault, not the thing measured."""

    exit_code = ExitCode.INFRASTRUCTURE


class AgentsMissing(InfrastructureError):
    """Agents that did not report in time; the message names them."""


class AgentLost(InfrastructureError):
    """An agent that stopped answering."""


class SteeringFailed(InfrastructureError):
    """ToRs that did not take their routes; all others have theirs. `failures`: why, by ToR."""

    def __init__(self, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__("; ".join(failures.values()))


class StepFailed(HarnessError):
    """What was to be measured failed on a sound bench: wrong data, an expired collective."""

    exit_code = ExitCode.FAILED


class RestoreFailed(HarnessError):
    """A switch could not be put back as it was found: a person is needed."""

    exit_code = ExitCode.RESTORE_FAILED


class NothingRan(HarnessError):
    """No step was performed."""

    exit_code = ExitCode.NOTHING_RAN


class Interrupted(HarnessError):
    """Ctrl-C or SIGTERM; the bench was restored."""

    exit_code = ExitCode.INTERRUPTED
