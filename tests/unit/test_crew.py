"""An instance's orders and grants, with a seat that only notes what it is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NamedTuple

from agents.generation.crew import Crew
from agents.generation.orders import Stepped, Steps
from harness.clock import NS_PER_S
from harness.model.placement import Instance
from harness.wire.generation import UpdateWeights, WeightsUpdated
from harness.wire.messages import Message


class Asked(NamedTuple):
    body: Message
    due_ns: int
    reply: asyncio.Future[Message]


class Noted:
    """In place of a seat: what it is asked waits in a queue to be answered."""

    name, number = "rank of GPU 0", 0

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()

    def ask(self, body: Message, due_ns: int) -> asyncio.Future[Message]:
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(Asked(body, due_ns, reply))
        return reply


def crew(seat: Any) -> Crew:
    instance = Instance(name="i", gpus=(0,), tp=1, pp=1, dp=1)
    ports: Any = SimpleNamespace(ports=range(9, 12))
    return Crew(instance, [seat], ports, lockstep=True, changed=lambda: None)


def test_steps_granted_behind_an_order_have_their_time_after_it() -> None:
    async def test() -> None:
        seat = Noted()
        found = crew(seat)
        found._awake = True
        found._grant()
        first, second = [await seat.asked.get() for _ in range(2)]
        assert isinstance(first.body, Steps)
        assert isinstance(second.body, Steps)
        far_ns = first.due_ns + 1000 * NS_PER_S
        update = UpdateWeights(instances=("i",), version=1)
        ordered = asyncio.create_task(found.order(update, far_ns))
        order = await seat.asked.get()
        assert order.body == update
        first.reply.set_result(Stepped(steps=1, elapsed_ns=1, more=True))
        behind = await seat.asked.get()
        assert isinstance(behind.body, Steps)
        assert behind.due_ns > far_ns, "weights may take long; steps behind them are not late"
        order.reply.set_result(WeightsUpdated(spans=(), moved_bytes=0))
        await ordered
        assert not found.dead

    asyncio.run(test())
