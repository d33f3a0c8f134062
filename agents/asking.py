"""One order to several children at once, which all must do; why, where they do not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agents.labour import Handler
from agents.pipe import Doing, WhereAreYou
from agents.seat import Seat, combine, settled
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError
from harness.wire.messages import Failure, Message

_NO_DEADLINE_NS = 600 * NS_PER_S
_POSITION_NS = 200 * NS_PER_MS
_BROKEN = ("RankDied", "RankFailed")


class OrderFailed(InfrastructureError):
    """An order that not every rank has done; `failure` is the answer to whoever asked.

    `breaks`: nothing is known any more of what the ranks hold; they are of no use.
    """

    def __init__(self, failure: Failure, *, breaks: bool) -> None:
        self.failure, self.breaks = failure, breaks
        super().__init__(failure.text)


def answering(verb: Handler) -> Handler:
    """Return a labour's handler: what failed is an answer, and a deadline there is in any case."""

    async def answer(asked: Message, deadline_ns: int) -> Message:
        try:
            return await verb(asked, deadline_ns or time.monotonic_ns() + _NO_DEADLINE_NS)
        except OrderFailed as error:
            return error.failure

    return answer


async def ask_all(orders: Mapping[Seat, Message], due_ns: int) -> list[Any]:
    """Ask each seat; return the answers in order. Raises `OrderFailed`, naming who is at fault."""
    replies = {seat: seat.ask(order, due_ns) for seat, order in orders.items()}
    late = await settled(list(replies.values()), due_ns)
    answers = [reply.result() for reply in replies.values() if reply.done()]
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    broken = [failure for failure in failures if failure.error in _BROKEN]
    if failures:  # a rank that broke is the cause; whoever refuses besides is not
        all_refuse = not broken and len(failures) == len(replies)
        raise OrderFailed(combine(broken or failures), breaks=not all_refuse)
    if late:
        name = next(iter(orders.values())).__struct_config__.tag
        behind = [seat for seat, reply in replies.items() if reply in late]
        text = f"{name} was not done in time: {await _whereabouts(behind)}"
        numbers = tuple(sorted(seat.number for seat in behind))
        failure = Failure(error="OrderExpired", text=text, ranks=numbers)
        raise OrderFailed(failure, breaks=True)
    return answers


async def _whereabouts(late: Sequence[Seat]) -> str:
    """Say what each of the late ranks is doing; their stacks go to their logs."""
    now_ns = time.monotonic_ns()
    replies = {seat: seat.ask(WhereAreYou(), now_ns + _POSITION_NS) for seat in late}
    await settled(list(replies.values()), now_ns + _POSITION_NS)
    words = []
    for seat, reply in replies.items():
        found = reply.result() if reply.done() else None
        if isinstance(found, Doing) and found.order:
            since_s = (now_ns - found.since_ns) / NS_PER_S
            words.append(f"{seat.name} is in {found.order} for {since_s:.1f} s (stacks in its log)")
        elif isinstance(found, Doing):
            words.append(f"{seat.name} waits for orders")
        else:
            words.append(f"{seat.name} does not answer")
    return "; ".join(words)
