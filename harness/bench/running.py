"""A running bench, live or emulated: the two differ only in who started what."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drivers.errors import DriverError
from drivers.tor.base import Route, Tor
from harness.bench.children import Children
from harness.bench.switches import ThreadedSwitch
from harness.clock import NS_PER_S, Clock
from harness.errors import HarnessError, InfrastructureError, SteeringFailed, UsageError
from harness.fabric.topology import Topology
from harness.model.bench import Bench, Switch
from harness.tasks import beside
from harness.wire import keys
from harness.wire.link import Link
from harness.wire.messages import Hello, Message, Note
from harness.wire.timesync import ClockFit

if TYPE_CHECKING:  # it brings pyroute2, which a live bench need not wait for
    from harness.bench.electrical import ElectricalPath

R = TypeVar("R", bound=Message)
T = TypeVar("T")

SHUTDOWN_NS = 5 * NS_PER_S
"""For agents to stop their work and say so."""


@dataclass
class RunningBench:
    """A `Bench` (see `harness.bench.base`) over a link, open switches and steerable ToRs."""

    world: str
    topology: Topology
    clock: Clock
    link: Link
    hellos: Mapping[str, Hello]
    switches: Mapping[str, ThreadedSwitch]
    tors: Mapping[str, Tor]
    store: str
    electrical_path: ElectricalPath | None = None
    """Where it is ours to change: in an emulated network."""

    @property
    def clocks(self) -> Mapping[str, ClockFit]:
        """Per agent, the latest fit of its clock."""
        return self.link.clocks

    async def ask(self, agent: str, body: Message, reply: type[R], timeout_ns: int) -> R:
        """Send one command to one agent; see `Link.ask`."""
        return await self.link.ask(agent, body, reply, timeout_ns)

    async def ask_all(
        self, bodies: Mapping[str, Message], reply: type[R], timeout_ns: int
    ) -> dict[str, R]:
        """Ask several agents at once; see `Link.ask_all`."""
        return await self.link.ask_all(bodies, reply, timeout_ns)

    async def news(self) -> tuple[str, Note]:
        """Wait for the next unasked note."""
        return await self.link.notes.get()

    async def steer(self, wanted: Mapping[str, frozenset[Route]]) -> None:
        """Apply the steering routes of each ToR; raises `SteeringFailed` once all were asked.

        In turn and in this thread: over netlink a ToR takes some tens of microseconds, less than
        handing it to a thread would.
        """
        failures = {}
        for name, routes in wanted.items():
            try:
                self.tors[name].apply(routes)
            except DriverError as fault:
                failures[name] = str(fault) if name in str(fault) else f"{name}: {fault}"
        if failures:
            raise SteeringFailed(failures)

    async def electrical(self, oversubscription: float | None) -> None:
        """Change the rates of the electrical path; see `harness.bench.base`."""
        if self.electrical_path is None:
            raise UsageError(
                "an electrical path of another rate, such as an ideal one, exists only on an "
                "emulated bench whose circuits move packets"
            )
        try:
            await asyncio.to_thread(self.electrical_path.oversubscribe, oversubscription)
        except OSError as error:
            raise InfrastructureError(f"electrical path: {error}") from error


@dataclass(frozen=True)
class Places:
    """Where a run keeps what its bench writes."""

    run: Path
    logs: Path
    transcripts: Path

    def transcript(self, switch: str) -> Path:
        """Return the file for all that passes the line of `switch`."""
        return self.transcripts / f"{switch}.log"


@asynccontextmanager
async def join(
    bench: Bench,
    topology: Topology,
    places: Places,
    *,
    specs: Mapping[str, Switch],
    tors: Mapping[str, Tor],
    agents: Sequence[str],
    keys_folder: Path,
    bind: str,
    children: Children,
    start_agents: Callable[[Link], None],
    clock: Clock,
) -> AsyncIterator[RunningBench]:
    """Open the switches, listen, have the agents started, and wait for all of them.

    Everything is closed again on every way out; `children` belong to the caller. Raises
    `InfrastructureError` for what does not open, `AgentsMissing` for who does not come.
    """
    async with AsyncExitStack() as stack:
        switches = {
            name: ThreadedSwitch(name, spec, topology.ours[name], places.transcript(name))
            for name, spec in specs.items()
        }
        stack.push_async_callback(close_switches, switches)
        opening = await stack.enter_async_context(beside(open_switches(switches)))
        link = await stack.enter_async_context(
            Link(
                bind=bind,
                pair=keys.load(keys_folder, keys.COORDINATOR),
                agents=keys.allow_list(keys_folder, agents),
                run=places.run.name,
            )
        )
        stack.push_async_callback(link.shutdown, SHUTDOWN_NS)
        _start_store(children, link.address.rpartition(":")[0])
        await opening  # before anyone is asked to come: a dead switch is told at once
        start_agents(link)
        wait_ns = round(bench.max_wait_s * NS_PER_S)
        hellos = await _unless_ended(children, link.ready(set(agents), wait_ns))
        yield RunningBench(
            world=bench.world,
            topology=topology,
            clock=clock,
            link=link,
            hellos=hellos,
            switches=switches,
            tors=tors,
            store=await children.first_line("store"),
        )


def _start_store(children: Children, host: str) -> None:
    argv = [sys.executable, "-m", "agents.store", "--host", host]
    children.start("store", argv, follow=True)


async def _unless_ended(children: Children, ready: Coroutine[Any, Any, T]) -> T:
    """Wait for those who were started to be ready; one that ends instead is told at once."""
    async with beside(children.watch()) as ended, beside(ready) as coming:
        await asyncio.wait({ended, coming}, return_when=asyncio.FIRST_COMPLETED)
        return await coming if coming.done() else await ended


async def open_switches(switches: Mapping[str, ThreadedSwitch]) -> None:
    """Open all units at once; every failure is shown, not only the first."""
    results = await asyncio.gather(
        *(switch.open() for switch in switches.values()), return_exceptions=True
    )
    failures = [result for result in results if isinstance(result, BaseException)]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        bench_faults = [failure for failure in failures if not isinstance(failure, HarnessError)]
        if bench_faults:
            raise bench_faults[0]
        raise InfrastructureError("; ".join(str(failure) for failure in failures))


async def close_switches(switches: Mapping[str, ThreadedSwitch]) -> None:
    """Close all units; a line that cannot be closed is no reason to leave the others open."""
    await asyncio.gather(*(switch.close() for switch in switches.values()), return_exceptions=True)
