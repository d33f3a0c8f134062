"""A bench in virtual time: the `Bench` that the orchestrator asks, over agents that are models.

An order takes the way of a message there and back, and what its verb takes in between. As a real
agent does, a simulated one goes on with an order that nobody waits for any longer; only who listens
is let go. What fails is told as `harness.wire.asks` tells it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from drivers.tor.base import Route
from harness import tasks
from harness.bench.base import SwitchHandle, TorHandle
from harness.bench.simulated.deadline import left_s, set_due
from harness.bench.simulated.generation import Generation
from harness.bench.simulated.network import Fabric
from harness.bench.simulated.porter import Porter
from harness.bench.simulated.racks import Racks
from harness.bench.simulated.ranks import Ranks
from harness.bench.simulated.training import Training
from harness.bench.simulated.units import Unit
from harness.bench.simulated.world import Labour, Verb, World
from harness.clock import NS_PER_US, Clock
from harness.errors import HarnessError
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.model.simulation import Calibration
from harness.wire.asks import Ask, CommandFailed, answers
from harness.wire.codec import kind_of
from harness.wire.generation import Watch
from harness.wire.messages import VERSION, Failure, Heard, Hello, Message, Note
from harness.wire.timesync import ClockFit
from harness.wire.training import WatchTraining

R = TypeVar("R", bound=Message)

LISTENING = (Watch, WatchTraining, Heard)
"""Who asks these only waits for news: nothing goes on without him."""
CUT_OFF_S = 1.0
"""As agents have it."""
LABOURS = (Generation, Training, Porter, Ranks)
"""Of each node's agent."""


class SimulatedBench:
    """See the module, and `harness.bench.base`."""

    store = "simulated"

    def __init__(self, world: World, fabric: Fabric) -> None:
        self.world, self.topology, self.clock = world, world.topology, world.clock
        self._fabric = fabric
        self.switches: Mapping[str, SwitchHandle] = fabric.units
        self._racks = Racks(world, fabric)
        self.tors: Mapping[str, TorHandle] = self._racks.handles
        self._labours: list[Labour] = []
        self._verbs: dict[str, Mapping[type[Message], Verb]] = {}
        for node in world.topology.nodes:
            self._employ(node, [labour(world, node) for labour in LABOURS])
        for tor, labour in self._racks.labours.items():
            self._employ(tor, [labour])
        self.hellos = dict.fromkeys(self._verbs, _hello())
        self.clocks = {agent: _in_step(agent) for agent in self._verbs}
        self._half_ns = round(world.figures.control.message_us.value * NS_PER_US / 2)
        self._seq = 0
        self._at_work: set[asyncio.Task[Message]] = set()

    def _employ(self, agent: str, labours: list[Labour]) -> None:
        self._labours += labours
        self._verbs[agent] = {kind: verb for each in labours for kind, verb in each.verbs().items()}

    # -- asking -----------------------------------------------------------------------------

    async def ask(self, agent: str, body: Message, reply: type[R], timeout_ns: int) -> R:
        """Send one command to one agent; see `harness.bench.base`."""
        return (await self.ask_all({agent: body}, reply, timeout_ns))[agent]

    async def ask_all(
        self, bodies: Mapping[str, Message], reply: type[R], timeout_ns: int
    ) -> dict[str, R]:
        """Ask several agents at once; see `harness.bench.base`."""
        asks = [self._ask(agent, body, reply, timeout_ns) for agent, body in bodies.items()]
        try:
            if len(asks) == 1:
                return {asks[0].agent: await asks[0].future}
            await answers(asks, self.clock.now_ns)
            return {ask.agent: ask.future.result() for ask in asks}
        finally:
            await tasks.end(ask.future for ask in asks)  # type: ignore[misc]  # they are tasks

    def _ask(self, agent: str, body: Message, reply: type[Message], timeout_ns: int) -> Ask:
        self._seq += 1
        now_ns = self.clock.now_ns()
        asking = asyncio.create_task(self._answered(agent, body, reply, timeout_ns))
        kind = kind_of(body)
        return Ask(self._seq, agent, kind, b"", reply, asking, now_ns, now_ns + timeout_ns)

    async def _answered(self, agent: str, body: Message, reply: type[R], timeout_ns: int) -> R:
        """Return the answer; raises what the real link raises."""
        kind = kind_of(body)
        await self.clock.sleep_ns(self._half_ns)
        set_due(self.clock.now_ns() + timeout_ns)
        verb = self._verbs[agent].get(type(body))
        if verb is None:
            raise HarnessError(f"{agent}: nobody on a simulated bench knows {kind}")
        answer = await self._done(agent, verb, body)
        await self.clock.sleep_ns(self._half_ns)
        if isinstance(answer, Failure):
            raise CommandFailed(kind, {agent: answer})
        if not isinstance(answer, reply):
            raise HarnessError(f"{agent} answered {kind} with {kind_of(answer)}")
        return answer

    async def _done(self, agent: str, verb: Verb, body: Message) -> Message:
        """Do what is asked; who does something does it to its end, whoever still waits."""
        if isinstance(body, LISTENING):
            return await _do(verb, body, self.clock)
        doing = asyncio.create_task(_do(verb, body, self.clock), name=f"{agent}: {kind_of(body)}")
        self._at_work.add(doing)
        doing.add_done_callback(self._ended)
        return await asyncio.shield(doing)

    def _ended(self, doing: asyncio.Task[Message]) -> None:
        self._at_work.discard(doing)
        if not doing.cancelled():
            doing.exception()  # seen: whoever asked may be gone

    async def news(self) -> tuple[str, Note]:
        """Wait for the next unasked note of an agent."""
        return await self.world.notes.get()

    # -- the network ------------------------------------------------------------------------

    async def steer(self, wanted: Mapping[str, frozenset[Route]]) -> None:
        """Make these the steering routes of these ToRs; raises `SteeringFailed`."""
        await self._racks.steer(wanted)

    async def electrical(self, oversubscription: float | None) -> None:
        """Change the rates of the electrical path; see `harness.bench.base`."""
        self._fabric.electrical(oversubscription)

    async def close(self) -> None:
        """End all that still goes on."""
        await tasks.end(self._at_work)
        for labour in self._labours:
            labour.close()
        self._fabric.close()


async def _do(verb: Verb, body: Message, clock: Clock) -> Message:
    """Answer; a failure that is raised is one that is answered, as real agents have it.

    Who is still at work a while after the deadline is cut off.
    """
    left = left_s(clock)
    limit = asyncio.timeout(left if left is None else left + CUT_OFF_S)
    try:
        async with limit:
            return await verb(body)
    except TimeoutError:
        if not limit.expired():
            raise
        return Failure(error="Expired", text=f"{kind_of(body)} was not done at its deadline")
    except HarnessError as error:
        return Failure(error=type(error).__name__, text=str(error))


def _hello() -> Hello:
    return Hello(version=VERSION, host="a model", pid=0, gpus=0, interfaces=(), facts={})


def _in_step(agent: str) -> ClockFit:
    """Return the fit of a clock that is the coordinator's own."""
    return ClockFit(
        node=agent, offset_ns=0, drift_ppb=0.0, at_ns=0, delay_ns=0, bound_ns=0, samples=1
    )


@asynccontextmanager
async def open_simulated(
    bench: Bench, topology: Topology, figures: Calibration, clock: Clock, seed: int
) -> AsyncIterator[SimulatedBench]:
    """Make a bench of models; must be entered on a virtual loop."""
    fabric = Fabric(bench, topology, figures, clock)
    world = World(bench, topology, clock, figures, fabric, seed)
    fabric.units = {name: Unit(world, name) for name in topology.switches}
    running = SimulatedBench(world, fabric)
    try:
        yield running
    finally:
        await running.close()
