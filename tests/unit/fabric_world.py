"""The fabric's controller at work in virtual time, over a bench that is a truth.

At every instant the route of each pair of ToRs leads over the electrical path, or over an uplink
whose light arrives where it should. Otherwise the pair is *stranded*, which is noted with its begin
and end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from fabric_bench import bench, demand
from generation_bench import Events

from drivers.base import EMPTY, Applied, Delta, Identity, Matching
from drivers.errors import LinkLost, NoLight
from drivers.tor.base import Route
from harness.bench.base import Switched
from harness.clock import NS_PER_MS
from harness.errors import SteeringFailed
from harness.fabric.demand import Comm, Demand
from harness.fabric.links import Link, Uplink
from harness.fabric.topology import Topology
from harness.model.bench import Switch
from harness.model.fabric_rules import Arm
from harness.model.fabric_streams import FABRIC_STREAMS
from harness.model.scenario import Fabric, Rl, Scenario
from harness.run.fabric.circuits import GUARD_NS, SILENCE_NS
from harness.run.fabric.controller import Controller
from harness.run.fabric.opening import network
from harness.run.fabric.traffic import Part
from harness.run.hearing import HEAR_NS
from harness.run.session import Session
from harness.tasks import beside
from harness.virtual import VirtualClock, run_virtually
from harness.wire.asks import CommandFailed
from harness.wire.messages import (
    Beacons,
    Counters,
    Done,
    Failure,
    Heard,
    Message,
    ReadCounters,
    StartBeacons,
    StopBeacons,
)
from harness.wire.timesync import ClockFit

MESSAGE_NS = NS_PER_MS // 10
COMMAND_NS = NS_PER_MS
BEACON_NS = 5 * NS_PER_MS


@dataclass(eq=False)
class Unit:
    """A switch of the world: a `SwitchHandle`."""

    world: World
    name: str
    spec: Switch
    switching_ns: int
    typical_switch_ns: int = 0
    map: Matching = EMPTY
    errors: list[str] = field(default_factory=list)
    """Of the next calls, each once."""
    gone: str = ""
    """Why it answers nobody; its light stays as it is."""
    shuttered: bool = False
    """Whether no light leaves it, though it says that all is well."""
    stuck: set[int] = field(default_factory=set)
    """Egress ports without light, which it knows."""
    dull: set[int] = field(default_factory=set)
    """Egress ports without light, which it does not know."""
    dies_while_switching: bool = False
    wanted: list[tuple[int, Matching]] = field(default_factory=list)
    """What it was told to make, and when."""

    def fails(self) -> None:
        if self.gone or self.errors:
            raise LinkLost(self.gone or self.errors.pop(0))

    def reset(self) -> None:
        """Let it start anew: its map is empty, and the session is lost."""
        self.map, self.errors = EMPTY, ["the device closed the line"]
        self.world.note()

    async def identify(self) -> Identity:
        return Identity("v", "m", "s", "f", range(1, 99), range(1, 99))

    async def read(self) -> Matching:
        await self.world.clock.sleep_ns(COMMAND_NS)
        self.fails()
        return self.map

    async def prepare(self, wanted: Matching) -> None:
        await self.world.clock.sleep_ns(COMMAND_NS)

    async def apply(self, wanted: Matching) -> Applied:
        return (await self.switch(wanted)).applied

    async def switch(self, wanted: Matching) -> Switched:
        clock = self.world.clock
        self.wanted.append((clock.now_ns(), wanted))
        sent_ns = clock.now_ns()
        await clock.sleep_ns(COMMAND_NS)
        self.fails()
        before, delta = self.map, Delta.between(self.map, wanted)
        if not delta:
            return Switched(Applied(before, before, delta, sent_ns, sent_ns, sent_ns), None, 0)
        self.map = Matching(frozenset(delta.keep))
        self.world.note()
        await clock.sleep_ns(self.switching_ns)
        if self.dies_while_switching:
            self.gone = "it died"
        self.fails()
        self.map = wanted
        self.world.note()
        now_ns = clock.now_ns()
        dark = {port: -60.0 for _, port in delta.make if port in self.stuck}
        applied = Applied(before, wanted, delta, sent_ns, sent_ns, now_ns)
        return Switched(applied, None if dark else now_ns, 0, NoLight(dark) if dark else None)

    def leaves(self, entered: int) -> int | None:
        """Return where light that enters leaves."""
        if self.shuttered:
            return None
        out = next((egress for ingress, egress in self.map.circuits if ingress == entered), None)
        return None if out in self.stuck | self.dull else out


class Stranding(NamedTuple):
    """Traffic between two ToRs got nowhere for so long."""

    pair: tuple[str, str]
    begin_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / NS_PER_MS


class World:
    """A `Bench` whose ToRs have agents. What is to go wrong is said by its fields."""

    store = ""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.clock = topology, VirtualClock()
        spec = Switch(driver="polatis-scpi", url="tcp://10.0.0.5:5025", ports="1-98")
        self.units = {
            name: Unit(self, name, spec, topology.planes[name].switching_ns)
            for name in topology.switches
        }
        self.switches: Mapping[str, Any] = self.units
        self.hellos: Mapping[str, Any] = dict.fromkeys(topology.tors)
        self.ahead_ns = {tor: (i + 1) * 10**12 for i, tor in enumerate(topology.tors)}
        self.clocks = {
            tor: ClockFit(
                node=tor, offset_ns=ns, drift_ppb=0.0, at_ns=0, delay_ns=0, bound_ns=0, samples=1
            )
            for tor, ns in self.ahead_ns.items()
        }
        self.routes: dict[str, frozenset[Route]] = {tor: frozenset() for tor in topology.tors}
        self.steer_ns = NS_PER_MS // 10
        self.refusing: dict[str, str] = {}
        """ToRs that take no routes, and why."""
        self.unreachable: dict[str, str] = {}
        """ToRs that fail even where nothing is to change."""
        self.vanishing: set[str] = set()
        """ToRs that take their next routes, but cannot say so: from then on nobody reaches them."""
        self.steered: list[tuple[int, dict[str, frozenset[Route]]]] = []
        self.oversubscription: list[float | None] = []
        self.beacons: dict[str, frozenset[str]] = {}
        self.counted: dict[str, Counter[str]] = {tor: Counter() for tor in topology.tors}
        self.received: dict[str, Counter[str]] = {tor: Counter() for tor in topology.tors}
        self.told_ns: list[int] = []
        """When each row of the record was told."""
        self.strandings: list[Stranding] = []
        self._stranded: dict[tuple[str, str], int] = {}
        self._steering: set[str] = set()
        self._last: dict[str, str] = {}
        self._trunks = {(t.aggregation, t.to_core): (t.core, t.ingress) for t in topology.trunks}
        self._trunks |= {(t.core, t.egress): (t.aggregation, t.from_core) for t in topology.trunks}
        self.swap()

    # -- the truth ------------------------------------------------------------------------

    def swap(self, *pair: Uplink) -> None:
        """Let each of two uplinks be plugged in where the other one should be."""
        other = dict(zip(pair, reversed(pair), strict=True))
        self._plugged = {up: other.get(up, up) for up in self.topology.uplinks}
        self._hears = {(at.switch, at.egress): up for up, at in self._plugged.items()}

    def light(self, sender: Uplink) -> Uplink | None:
        """Return the uplink that hears another one."""
        at, entered = self._plugged[sender].switch, self._plugged[sender].ingress
        while (egress := self.units[at].leaves(entered)) is not None:
            if (at, egress) not in self._trunks:
                return self._hears.get((at, egress))
            at, entered = self._trunks[at, egress]
        return None

    def is_up(self, link: Link) -> bool:
        """Whether both ends of a link really hear each other."""
        return all(self.light(near) == far for near, far in link.ways)

    def astray(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of ToRs whose route leads nowhere."""
        uplinks = {(up.tor, up.device): up for up in self.topology.uplinks}
        of_prefix = {place.prefix: tor for tor, place in self.topology.tors.items()}
        of_prefix |= {f"{place.address}/32": place.tor for place in self.topology.nodes.values()}
        for tor, routes in self.routes.items():
            for route in routes:
                for hop in route.hops:
                    far = self.light(uplinks[tor, hop.device])
                    if far is None or (far.tor, far.address) != (of_prefix[route.prefix], hop.via):
                        yield tor, of_prefix[route.prefix]

    def note(self) -> None:
        """Note who is stranded from now on, and who is not any more."""
        now_ns, astray = self.clock.now_ns(), {*self.astray()}
        for pair in [pair for pair in self._stranded if pair not in astray]:
            self.strandings.append(Stranding(pair, self._stranded.pop(pair), now_ns))
        for pair in astray:
            self._stranded.setdefault(pair, now_ns)

    def stranded_ms(self) -> float:
        """Return the longest that traffic was stranded, up to now."""
        now_ns = self.clock.now_ns()
        still = [Stranding(pair, begin, now_ns) for pair, begin in self._stranded.items()]
        return max((one.ms for one in (*self.strandings, *still)), default=0.0)

    def carry(self, sent: Demand) -> None:
        """Count a demand at the ports that it takes."""
        for i, j in zip(*np.nonzero(sent.sent_bytes), strict=True):
            a, b = sent.tors[i], sent.tors[j]
            prefix = self.topology.tors[b].prefix
            route = next((r for r in self.routes[a] if r.prefix == prefix), None)
            self.counted[a][route.hops[0].device if route else "e0"] += sent.sent_bytes[i, j]
            self.received[b]["u0" if route else "e0"] += sent.sent_bytes[i, j]

    # -- a bench --------------------------------------------------------------------------

    async def steer(self, wanted: Mapping[str, frozenset[Route]]) -> None:
        assert self._steering.isdisjoint(wanted), "a ToR is steered by two at a time"
        self._steering |= {*wanted}
        self.steered.append((self.clock.now_ns(), dict(wanted)))
        failures = {}
        try:
            for tor, routes in wanted.items():
                await self.clock.sleep_ns(self.steer_ns)
                if tor in self.vanishing and self.routes[tor] != routes:
                    self.routes[tor], self.unreachable[tor] = routes, "no answer"
                    self.vanishing.remove(tor)
                    self.note()
                reason = self.unreachable.get(tor, "")
                if self.routes[tor] != routes:
                    reason = reason or self.refusing.get(tor, "")
                if reason:
                    failures[tor] = f"{tor}: {reason}"
                else:
                    self.routes[tor] = routes
                    self.note()
        finally:
            self._steering -= {*wanted}
        if failures:
            raise SteeringFailed(failures)

    async def electrical(self, oversubscription: float | None) -> None:
        self.oversubscription.append(oversubscription)

    async def news(self) -> Any:
        await asyncio.Event().wait()

    async def ask(self, agent: str, body: Message, reply: type[Any], timeout_ns: int) -> Any:
        await self.clock.sleep_ns(MESSAGE_NS)
        answer = await self._answer(agent, body)
        await self.clock.sleep_ns(MESSAGE_NS)
        if isinstance(answer, Failure):
            raise CommandFailed(type(body).__struct_config__.tag, {agent: answer})
        assert isinstance(answer, reply), f"{answer} is no {reply}"
        return answer

    async def ask_all(self, bodies: Mapping[str, Any], reply: type[Any], timeout_ns: int) -> Any:
        asks = [self.ask(agent, body, reply, timeout_ns) for agent, body in bodies.items()]
        return dict(zip(bodies, await asyncio.gather(*asks), strict=True))

    async def _answer(self, tor: str, body: Message) -> Message:
        now_ns = self.clock.now_ns() + self.ahead_ns[tor]
        match body:
            case StartBeacons():
                if tor in self.beacons:
                    return Failure(error="Busy", text="beacons are sent already")
                self.beacons[tor] = frozenset(body.devices)
                return Done(t_ns=now_ns)
            case ReadCounters():
                sent = {name: round(size) for name, size in self.counted[tor].items()}
                got = {name: round(size) for name, size in self.received[tor].items()}
                return Counters(sent_bytes=sent, received_bytes=got, t_ns=now_ns)
            case _ if tor not in self.beacons:
                return Failure(error="NoBeacons", text="no beacons were started on this node")
            case Heard():
                return await self._listen(tor, body)
            case StopBeacons():
                del self.beacons[tor]
                return Beacons(last={}, first_ns={}, gaps=(), lost={}, received={})
        raise AssertionError(body)

    async def _listen(self, tor: str, asked: Heard) -> Message:
        over_ns = self.clock.now_ns() + asked.wait_ns
        first_ns: dict[str, int] = {}
        while True:
            now_ns = self.clock.now_ns()
            await self.clock.sleep_ns(min(-now_ns % BEACON_NS, over_ns - now_ns))
            now_ns = self.clock.now_ns()
            heard = self._heard(tor)
            self._last |= {f"{tor}:{device}": far for device, far in heard.items()}
            for device, far in heard.items():
                if far == asked.expect.get(device):
                    first_ns.setdefault(device, now_ns + self.ahead_ns[tor])
            if first_ns.keys() >= asked.expect.keys() or now_ns >= over_ns:
                break
            await self.clock.sleep_ns(min(NS_PER_MS, over_ns - now_ns))
        ends = (end.partition(":") for end in self._last)
        last = {device: self._last[f"{tor}:{device}"] for at, _, device in ends if at == tor}
        return Beacons(last=last, first_ns=first_ns, gaps=(), lost={}, received={})

    def _heard(self, tor: str) -> dict[str, str]:
        """Return who is heard on each device of a ToR now."""
        sending = [up for up in self.topology.uplinks if up.device in self.beacons.get(up.tor, ())]
        heard = ((self.light(up), up) for up in sending)
        return {to.device: str(up) for to, up in heard if to is not None and to.tor == tor}


# -- an arm over it --------------------------------------------------------------------------------

NOTICED_MS = (GUARD_NS + SILENCE_NS) / NS_PER_MS + 10
"""Within which the guard has steered off what went dark; the rest is for messages."""
CHANGING_MS = HEAR_NS / NS_PER_MS + NOTICED_MS
"""The same in a change that waits in vain for others."""
DEFAULT = Fabric()
BYTES = 20e6
"""Takes 640 ms over the electrical path of a ToR, 160 ms over a circuit."""


class Told(Events):
    """A record; the world knows when each of its rows was told."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def event(self, stream: str, data: Mapping[str, object]) -> None:
        super().event(stream, data)
        self.world.told_ns.append(self.world.clock.now_ns())


def session_on(world: World, fabric: Fabric = DEFAULT, plans: Any = None) -> Session:
    scenario = Scenario(question="?", steps=(Rl(fabrics=("rfabric",)),), fabric=fabric)
    there: Any = world
    return Session(bench=there, scenario=scenario, record=Told(world), plans=plans or {})


@asynccontextmanager
async def running(session: Session, fabric: Any = "rfabric") -> AsyncIterator[Controller]:
    """An arm, with those who carry out and watch; they must live to its end."""
    async with network(session, Arm("orchestrl", fabric), 0) as controller:
        assert controller is not None
        async with beside(controller.tend()) as tending, beside(controller.guard()) as guarding:
            yield controller
            for task in (tending, guarding):
                if task.done() and controller.follows:
                    task.result()
                    raise AssertionError("it ended before its arm")


def at_rest(session: Session) -> None:
    """The session tells the truth: what is lit is up, and routes are those of it."""
    world: Any = session.bench
    assert all(world.is_up(each) for each in session.lit)
    assert world.routes == world.topology.routes(session.lit)


def is_down(session: Session) -> None:
    world: Any = session.bench
    assert not session.lit
    assert not any(world.routes.values())
    assert not any(len(unit.map) for unit in world.units.values())
    assert not world.beacons


def part(topology: Topology, kind: str = "train", gap_ms: float = 0.0, **sent: float) -> Part:
    """A part of one communication."""
    return Part(kind, (Comm(kind, "dp", demand(topology, **sent), gap_ms * NS_PER_MS),))


def train_and_sync(topology: Topology) -> list[Part]:
    """Two parts that want different circuits, 640 ms each over the electrical path."""
    return [
        part(topology, t0_t1=BYTES, t1_t0=BYTES),
        part(topology, "sync", t0_t2=BYTES, t1_t3=BYTES),
    ]


async def goes(
    world: World, controller: Controller, parts: Sequence[Part], idle_ms: float, took_ms: float
) -> None:
    """A step: announced, then each part after so long, for so long."""
    controller.expect(parts)
    for this, after in zip(parts, [*parts[1:], None], strict=True):
        await world.clock.sleep_ns(round(idle_ms * NS_PER_MS))
        async with controller.during(this):
            await world.clock.sleep_ns(round(took_ms * NS_PER_MS))
            for comm in this.comms:
                world.carry(comm.whole)
        if after is not None:
            controller.reached(after.kind)


def play(
    body: Callable[[World, Controller], Coroutine[Any, Any, None]],
    topology: Topology | None = None,
    arm: Any = "rfabric",
    fabric: Fabric = DEFAULT,
    stranded_ms: float = 0.0,
    plans: Any = None,
    *,
    agents: bool = True,
) -> tuple[World, Events]:
    """Run a body in an arm; afterwards all is down, and nobody was stranded for longer."""

    async def main() -> tuple[World, Events]:
        world = World(topology or bench())
        world.hellos = world.hellos if agents else {}
        session = session_on(world, fabric, plans)
        async with running(session, arm) as controller:
            await body(world, controller)
        world.note()
        assert world.stranded_ms() <= stranded_ms, world.strandings
        is_down(session)
        record: Any = session.record
        for stream, row in record:
            assert row.keys() == FABRIC_STREAMS[stream].keys()
        return world, record

    return run_virtually(main())


def changes(events: Events) -> list[str]:
    return [row["kind"] for row in events.of("fabric_change") if row["kind"] != "end"]


def actions(events: Events) -> list[str]:
    return [row["action"] for row in events.of("fabric")]


def pairs(rows: Sequence[str]) -> set[str]:
    return {each.partition("@")[0] for each in rows}
