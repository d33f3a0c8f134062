"""When is an instance given up, and may it be started again? Pure.

An instance that has work and gets nothing done, neither a token nor a piece of a prefill, hangs:
its processes live, so nobody else tells. Its requests continue elsewhere and it is built anew, but
not for ever: what hangs again and again is broken.
"""

from __future__ import annotations

from typing import NamedTuple

RESTARTS_MAX = 2
"""Of one instance in one run; then it stays out."""


class Life(NamedTuple):
    """Since when an instance has been busy without getting further than `work_tokens`."""

    work_tokens: int
    since_ns: int


def look(life: Life | None, *, busy: bool, work_tokens: int, now_ns: int) -> Life:
    """Return the sign of life after another look; `work_tokens` were made or prefilled in all."""
    if life is None or not busy or work_tokens != life.work_tokens:
        return Life(work_tokens, now_ns)
    return life


def stalled(life: Life, now_ns: int, stall_ns: int) -> bool:
    """Whether it got nowhere for `stall_ns`."""
    return now_ns - life.since_ns >= stall_ns


def may_restart(restarts: int) -> bool:
    """Whether an instance that was started again `restarts` times may be once more."""
    return restarts < RESTARTS_MAX
