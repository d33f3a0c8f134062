"""A small simulated bench without its nodes' agents: units, network, ToRs, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import structs

from drivers.tor.base import Route
from harness.bench.simulated.network import Fabric
from harness.bench.simulated.racks import Racks
from harness.bench.simulated.units import Unit
from harness.bench.simulated.world import Flow, World
from harness.clock import NS_PER_MS
from harness.fabric.links import Link, Uplink
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, EmulatedTor, EmulatedUnit, Links, Node, Switch, Tor
from harness.model.simulation import Control, Figure, Network
from harness.virtual import VirtualClock, run_virtually
from harness.wire.asks import CommandFailed
from harness.wire.messages import Failure, Message
from harness.wire.timesync import ClockFit

T = TypeVar("T")

PORTS = 8
MB_PER_S = 100.0
"""What a port and a circuit carry of payload: a share of 0.8 of 1000 Mbit/s."""
READ_MS, CHANGE_MS, SWITCH_MS, LIGHT_MS, STEER_MS = 0.5, 0.6, 25.0, 0.4, 0.1


def figure(value: float) -> Figure:
    return Figure(value=value, source="chosen")


NETWORK = Network(link_share=figure(0.8), electrical_share=figure(0.4), latency_us=figure(0.0))
CONTROL = Control(
    message_us=figure(200.0), steer_us=figure(STEER_MS * 1e3), read_ms=figure(READ_MS),
    switch_ms=figure(CHANGE_MS), light_ms=figure(LIGHT_MS),
)  # fmt: skip


def bench(
    tors: int = 4,
    *,
    nodes: int = 2,
    planes: int = 2,
    core: bool = False,
    links: Links | None = None,
    emulate: Mapping[str, EmulatedUnit] | None = None,
    steering: Mapping[str, EmulatedTor] | None = None,
    **switch: Any,
) -> Bench:
    """ToRs ``t0``, ...: one uplink on each plane ``agg0``, ...; nodes ``t0.0``, ...

    With `core`, even and odd ToRs have a plane each, joined by two trunks through ``core``.
    """
    names = [f"t{i}" for i in range(tors)]
    units = [*(f"agg{k}" for k in range(planes)), *(["core"] if core else [])]
    cables = {
        f"{name}:u{k + 1}": f"agg{i % 2 if core else k}:{i // 2 + 1 if core else i + 1}"
        for i, name in enumerate(names)
        for k in range(1 if core else planes)
    }
    if core:
        cables |= {f"agg{k}:{5 + n}": f"core:{1 + 2 * k + n}" for k in range(2) for n in range(2)}
    return Bench(
        name="small",
        world="simulated",
        nodes={f"{tor}.{k}": Node(tor=tor) for tor in names for k in range(nodes)},
        tors={
            name: Tor(uplinks=planes, driver="netlink",
                      emulate=(steering or {}).get(name, EmulatedTor()))
            for name in names
        },
        switches={
            name: Switch(
                driver="polatis-scpi", url="tcp://10.0.0.5:5025", ports=f"1-{2 * PORTS}",
                power_averaging=switch.get("power_averaging", 1),
                tier="core" if name == "core" else "aggregation",
                emulate=(emulate or {}).get(name, EmulatedUnit(ports=PORTS, switch_ms=SWITCH_MS)),
            )
            for name in units
        },
        cables=cables,
        links=links or Links(),
    )  # fmt: skip


def broken(**faults: Any) -> EmulatedUnit:
    """A unit with these faults."""
    return structs.replace(EmulatedUnit(ports=PORTS, switch_ms=SWITCH_MS), **faults)


@dataclass(eq=False)
class Figures:
    """The part of a `Calibration` that a network needs."""

    network: Network
    control: Control
    one_machine: bool = False


class Small:
    """A `Bench` whose only agents are those of ToRs."""

    store = ""

    def __init__(
        self,
        made: Bench,
        seed: int = 0,
        network: Network = NETWORK,
        *,
        one_machine: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        self.topology = topology_of(made)
        figures: Any = Figures(network, CONTROL, one_machine)
        self.fabric = Fabric(made, self.topology, figures, self.clock)
        self.world = World(made, self.topology, self.clock, figures, self.fabric, seed)
        self.units = {name: Unit(self.world, name) for name in self.topology.switches}
        self.fabric.units = self.units
        self.racks = Racks(self.world, self.fabric)
        self.switches: Mapping[str, Any] = self.units
        self.hellos: Mapping[str, Any] = dict.fromkeys(self.topology.tors)
        self.clocks = {
            tor: ClockFit(
                node=tor, offset_ns=0, drift_ppb=0.0, at_ns=0, delay_ns=0, bound_ns=0, samples=1
            )
            for tor in self.topology.tors
        }
        self.told_ns: list[int] = []
        """When each row of a record was told."""
        self.turns: list[tuple[float, str, str]] = []
        """When, in ms, an uplink's light came to arrive at another one, or nowhere."""
        self.fabric.light.listeners.append(self._turned)

    def _turned(self, senders: Sequence[Uplink]) -> None:
        far = self.fabric.light.far
        self.turns += [(self.now_ms(), str(up), str(far(up) or "")) for up in senders]

    async def steer(self, wanted: Mapping[str, frozenset[Route]]) -> None:
        await self.racks.steer(wanted)

    async def electrical(self, oversubscription: float | None) -> None:
        self.fabric.electrical(oversubscription)

    def now_ms(self) -> float:
        return self.clock.now_ns() / NS_PER_MS

    async def sleep_ms(self, ms: float) -> None:
        await self.clock.sleep_ns(round(ms * NS_PER_MS))

    # -- asking ---------------------------------------------------------------------------

    async def ask(self, agent: str, body: Message, reply: type[T], timeout_ns: int = 0) -> T:
        answer = await self.racks.labours[agent].verbs()[type(body)](body)
        if isinstance(answer, Failure):
            raise CommandFailed("asked", {agent: answer})
        assert isinstance(answer, reply)
        return answer

    async def ask_all(self, bodies: Mapping[str, Any], reply: type[T], timeout_ns: int = 0) -> Any:
        asks = [self.ask(agent, body, reply, timeout_ns) for agent, body in bodies.items()]
        return dict(zip(bodies, await asyncio.gather(*asks), strict=True))

    async def news(self) -> Any:
        await asyncio.Event().wait()

    # -- circuits -------------------------------------------------------------------------

    def link(self, a: str, b: str, plane: int = 0, *, both: bool = True) -> Link:
        """The link of two ToRs over one plane."""
        ends = [self.topology.uplink(tor, f"agg{plane}") for tor in (a, b)]
        assert ends[0] is not None
        assert ends[1] is not None
        return Link(ends[0], ends[1], (), both)

    async def switch(self, *links: Link) -> None:
        """Bring these up, and no others, and wait for their light."""
        lit = frozenset(links)
        changes = (
            unit.switch(self.topology.matching(lit, name)) for name, unit in self.units.items()
        )
        await asyncio.gather(*changes)

    async def lead_over(self, *links: Link) -> None:
        """Steer over these, and no others."""
        await self.steer(self.topology.routes(frozenset(links)))

    def uplink(self, name: str) -> Uplink:
        return next(up for up in self.topology.uplinks if str(up) == name)

    # -- traffic --------------------------------------------------------------------------

    async def takes_ms(self, *flows: Flow) -> float:
        """Send flows and return how long that took."""
        begun_ms = self.now_ms()
        await self.fabric.carry(flows)
        return self.now_ms() - begun_ms

    def crossed(self, tor: str) -> tuple[dict[str, int], dict[str, int]]:
        """Whole bytes of payload that a ToR's devices sent, and got: those that did."""
        sent, got = (
            {name: round(size) for name, size in each.items() if round(size)}
            for each in self.fabric.crossed(tor)
        )
        return sent, got


def play(
    body: Callable[[Small], Coroutine[Any, Any, T]], made: Bench | None = None, **small: Any
) -> T:
    """Run a body on a small bench, to its end."""

    async def main() -> T:
        there = Small(made or bench(), **small)
        try:
            return await body(there)
        finally:
            there.fabric.close()

    return run_virtually(main())


def flows(size_mb: float, *pairs: str) -> list[Flow]:
    """Flows of so many MB by ``t0.0>t1.0``."""
    return [Flow(*pair.split(">"), size_mb * 1e6) for pair in pairs]
