"""What the agent process asks of the work it carries: ranks, beacons, later engines.

A labour answers a literal set of commands. Its handlers run concurrently, each as a task of its
own (a `Hold` is answered while a `Resume` is pending), and repeated commands never reach them:
the agent answers those from memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from harness.wire.messages import Message, Note

Notify = Callable[[Note], None]
"""Send unasked news to the coordinator. May be called from any thread; never blocks."""

Handler = Callable[[Any, int], Awaitable[Message]]
"""``await handler(command, deadline_ns)``: answer a command by the deadline.

`command` is of the type that the handler is registered for. `deadline_ns` is on this node's
monotonic clock (``time.monotonic_ns()``), 0 for none; a handler may use it up to the end ("or at
the deadline"), the coordinator leaves the answer time to travel. A handler that is still at work
one second later is cancelled and the answer is ``Failure("Expired")``.

What fails in a way that the protocol names is *returned* as a `Failure` (with its ranks). A raised
`HarnessError` becomes a `Failure` with its class name; any other exception one named ``Bug``.
"""


class Labour(Protocol):
    """One kind of work on this node, built as ``Labour(notify)`` on the event loop's thread."""

    def commands(self) -> dict[type[Message], Handler]:
        """Return who answers what; read once, when the agent starts."""

    async def close(self) -> None:
        """Stop everything and verify that it is gone; called once, on every orderly way out.

        Pending handlers were cancelled before. Bounded by the agent: what is not done in 5 s is
        ended by `kill_now`.
        """

    def kill_now(self) -> None:
        """Kill what was started, by recorded process group, without the event loop.

        Called from the watchdog's thread when the coordinator is lost and the loop does not come
        to its end; must not block, wait, or take a lock that the loop may hold. The process exits
        right after. Must be harmless when nothing runs or all was killed already.
        """
