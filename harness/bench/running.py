"""A running bench, live or emulated: the two differ only in who started what."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from drivers.tor.base import Route
from harness.bench.children import Children
from harness.bench.switches import ThreadedSwitch
from harness.bench.tors import SteerableTor, steer
from harness.clock import NS_PER_S, Clock
from harness.errors import HarnessError, InfrastructureError, UsageError
from harness.fabric.topology import Topology
from harness.model.bench import Bench, Switch, Tor
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
    tors: Mapping[str, SteerableTor]
    """Those that are steered."""
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
        """Apply the steering routes of each ToR; raises `SteeringFailed` once all were asked."""
        await steer(self.tors, wanted)

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
    switches: Mapping[str, Switch],
    tors: Mapping[str, Tor],
    agents: Sequence[str],
    keys_folder: Path,
    bind: str,
    children: Children,
    start_agents: Callable[[Link], None],
    clock: Clock,
) -> AsyncIterator[RunningBench]:
    """Open `switches` and `tors`, listen, have the agents started, and wait for all of them.

    Everything is closed again on every way out; `children` belong to the caller. Raises
    `InfrastructureError` for what does not open, `AgentsMissing` for who does not come.
    """
    units = {
        name: ThreadedSwitch(name, spec, topology.ours[name], places.transcript(name))
        for name, spec in switches.items()
    }
    racks = {name: SteerableTor(name, spec) for name, spec in tors.items()}
    async with _opening((*units.values(), *racks.values())) as opened:
        pair = keys.load(keys_folder, keys.COORDINATOR)
        allowed = keys.allow_list(keys_folder, agents)
        async with Link(bind=bind, pair=pair, agents=allowed, run=places.run.name) as link:
            try:
                _start_store(children, link.address.rpartition(":")[0])
                await opened  # before anyone is asked to come: a dead switch is told at once
                start_agents(link)
                wait_ns = round(bench.max_wait_s * NS_PER_S)
                hellos = await _unless_ended(children, link.ready(set(agents), wait_ns))
                store = await children.first_line("store")
                yield RunningBench(bench.world, topology, clock, link, hellos, units, racks, store)
            finally:
                await link.shutdown(SHUTDOWN_NS)


def _start_store(children: Children, host: str) -> None:
    argv = [sys.executable, "-m", "agents.store", "--host", host]
    children.start("store", argv, follow=True)


async def _unless_ended(children: Children, ready: Coroutine[Any, Any, T]) -> T:
    """Wait for those who were started to be ready; one that ends instead is told at once."""
    async with beside(children.watch()) as ended, beside(ready) as coming:
        await asyncio.wait({ended, coming}, return_when=asyncio.FIRST_COMPLETED)
        return await coming if coming.done() else await ended


class Device(Protocol):
    """What is opened at a bench's start, and closed at its end."""

    async def open(self) -> None:
        """Open it; every failure names it."""

    async def close(self) -> None:
        """Close it; safe where it never was open."""


@asynccontextmanager
async def _opening(devices: Sequence[Device]) -> AsyncIterator[asyncio.Task[None]]:
    """Open devices beside the body, which awaits that; close them when it is left."""
    try:
        async with beside(open_all(devices)) as opened:
            yield opened
    finally:
        await close_all(devices)


async def open_all(devices: Iterable[Device]) -> None:
    """Open all devices at once; every failure is shown, not only the first."""
    results = await asyncio.gather(*(device.open() for device in devices), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        bench_faults = [failure for failure in failures if not isinstance(failure, HarnessError)]
        if bench_faults:
            raise bench_faults[0]
        raise InfrastructureError("; ".join(str(failure) for failure in failures))


async def close_all(devices: Iterable[Device]) -> None:
    """Close all devices; a line that cannot be closed is no reason to leave the others open."""
    await asyncio.gather(*(device.close() for device in devices), return_exceptions=True)
