"""By when the order that is being done must be answered, for whoever does any part of it.

Real agents hand their deadline from verb to verb; here it goes along with the task of an order and
with all that this one begins. Who was asked by nobody has as long as he wants.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from harness.clock import NS_PER_S, Clock
from harness.model.advance import FOREVER_NS

_DUE_NS: ContextVar[int] = ContextVar("due_ns", default=FOREVER_NS)


def set_due(due_ns: int) -> None:
    """Have the order that this task does from now on answered by then."""
    _DUE_NS.set(due_ns)


def left_s(clock: Clock, at_most_ns: int = FOREVER_NS) -> float | None:
    """Return how long is left, and no longer than that; None: for ever."""
    left_ns = min(_DUE_NS.get() - clock.now_ns(), at_most_ns)
    return None if _DUE_NS.get() == at_most_ns == FOREVER_NS else max(0, left_ns) / NS_PER_S


def in_time(clock: Clock, at_most_ns: int = FOREVER_NS) -> asyncio.Timeout:
    """Return a limit on what is done within: it is over by the deadline, or after so long."""
    return asyncio.timeout(left_s(clock, at_most_ns))
