"""One run of the fabric's controller, drawn from a seed: bench, traffic, and what goes wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from fabric_bench import bench
from fabric_world import NOTICED_MS, Told, World, at_rest, running, session_on

from drivers.base import EMPTY
from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.demand import Comm, Demand
from harness.fabric.topology import Topology, topology_of
from harness.model.fabric_streams import FABRIC_STREAMS
from harness.model.generated import Numbers, bench_of
from harness.model.scenario import Fabric
from harness.run.fabric.controller import Controller
from harness.run.fabric.traffic import Part
from harness.run.hearing import HEAR_NS
from harness.seeds import seeded
from harness.tasks import beside

TWO_TIERS = Numbers(
    roles=("train", "generate"), tors_per_pod=2, nodes_per_tor=2, uplinks_per_tor=2,
    aggregation_planes=2, core_planes=1, trunks_per_pod=2, link_gbit_per_s=1.0,
)  # fmt: skip
FAULTS = (
    "stuck", "dull", "shuttered", "gone", "reset", "dies", "swapped", "refusing", "unreachable",
    "busy",
)  # fmt: skip
BUSY_MS = 60
LONGEST_MS = HEAR_NS / NS_PER_MS + 2 * NOTICED_MS + BUSY_MS
"""A change that waits in vain, and a look before and after."""


class Ended(NamedTuple):
    """What came of a run."""

    world: World
    events: Told
    happened: list[str]
    stiff: set[str]
    """ToRs that refused at some time."""


def topology_from(chance: random.Random) -> Topology:
    """A bench of one tier or two."""
    tors, planes = chance.choice(((4, 1), (4, 2), (5, 3), (3, 2), (0, 0)))
    if not tors:
        return topology_of(bench_of(TWO_TIERS))
    return bench(tors, planes=planes, switching_ms=[chance.choice((5.0, 25.0, 60.0))] * planes)


def parts_from(chance: random.Random, topology: Topology) -> list[Part]:
    """The traffic of a step: a few pairs of ToRs that send much."""
    names, parts = tuple(topology.tors), []
    for kind in ("train", "gather", "sync")[: chance.randint(1, 3)]:
        comms = []
        for _ in range(chance.randint(1, 3) if kind == "train" else 1):
            sent = np.zeros((len(names),) * 2)
            for _ in range(chance.randint(0, 4)):
                sent[chance.sample(range(len(names)), 2)[0], chance.randrange(len(names))] = (
                    chance.choice((1e4, 5e6, 2e7, 1e8))
                )
            gap_ns = chance.choice((0, 30, 120)) * NS_PER_MS
            comms.append(Comm(kind, "dp", Demand(kind, names, sent), float(gap_ns)))
        parts.append(Part(kind, tuple(comms)))
    return parts


async def works(
    world: World, controller: Controller, parts: Sequence[Part], chance: random.Random
) -> None:
    """Announce a step, and make it; a rank may die in it, and it is announced again."""
    controller.expect(parts)
    if chance.random() < 0.2:
        await world.clock.sleep_ns(chance.randint(0, 60) * NS_PER_MS)
        controller.expect(parts)
    for this, after in zip(parts, [*parts[1:], None], strict=True):
        await world.clock.sleep_ns(chance.choice((0, 1, 20, 120, 400)) * NS_PER_MS)
        with suppress(RankDiedError):
            await makes(world, controller, this, chance)
        if after is not None:
            controller.reached(after.kind)


class RankDiedError(Exception):
    """Raised in the middle of a part."""


async def makes(world: World, controller: Controller, this: Part, chance: random.Random) -> None:
    """Send a part of a step."""
    async with controller.during(this):
        for number, comm in enumerate(this.comms):
            took_ms = chance.choice((1, 30, 300))
            await world.clock.sleep_ns(round(comm.gap_ns) + took_ms * NS_PER_MS)
            world.carry(comm.whole)
            controller.reached(this.kind, number + 1)
        if chance.random() < 0.1:
            raise RankDiedError


def breaks(world: World, fault: str, chance: random.Random) -> str:
    """Let something go wrong; return where."""
    unit = world.units[chance.choice(tuple(world.units))]
    uplinks = world.topology.by_switch[unit.name] or world.topology.uplinks
    tor = chance.choice(tuple(world.topology.tors))
    match fault:
        case "stuck" | "dull":
            getattr(unit, fault).add(chance.choice(uplinks).egress)
        case "shuttered":
            unit.shuttered = True
        case "gone":
            unit.gone, unit.shuttered = "no answer", True
        case "reset":
            unit.reset()
        case "dies":
            unit.dies_while_switching = True
        case "swapped":
            world.swap(*chance.sample(world.topology.uplinks, 2))
        case "refusing" | "unreachable":
            getattr(world, fault)[tor] = "it says no"
            return tor
        case "busy":
            loop: Any = asyncio.get_running_loop()
            loop.busy(chance.randint(1, BUSY_MS) * NS_PER_MS)
    return unit.name


def mends(world: World) -> None:
    """Have switches and ToRs answer again."""
    world.refusing.clear()
    world.unreachable.clear()
    for unit in world.units.values():
        unit.dies_while_switching = False
        if unit.gone:  # it starts anew
            unit.gone, unit.shuttered, unit.map = "", False, EMPTY
    world.note()


async def trouble(world: World, chance: random.Random, ended: Ended) -> None:
    """Let something go wrong, now and then; some of it is mended."""
    for _ in range(chance.randint(0, 3)):
        await world.clock.sleep_ns(chance.randint(0, 1500) * NS_PER_MS)
        fault = chance.choice(FAULTS)
        where = breaks(world, fault, chance)
        world.note()
        ended.happened.append(f"{world.clock.now_ns() / 1e6:.1f} ms: {fault} at {where}")
        if fault in ("refusing", "unreachable"):
            ended.stiff.add(where)
    await world.clock.sleep_ns(chance.randint(0, 3000) * NS_PER_MS)
    mends(world)


async def run(seed: int) -> Ended:
    """Run a seed to its end; what must always hold is asserted."""
    chance = seeded(seed, "a run of the fabric")
    world = World(topology_from(chance))
    world.steer_ns = chance.choice((20_000, 300_000, 5_000_000))
    fabric = Fabric(
        rule=chance.choice(("gain", "window")),
        gain_min_pct=chance.choice((0.0, 5.0)),
        rest_ms=chance.choice((0.0, 100.0)),
        settle_ms=chance.choice((0.0, 10.0)),
    )
    session = session_on(world, fabric)
    ended = Ended(world, session.record, [], set())  # type: ignore[arg-type]
    async with running(session, chance.choice(("rfabric", "rfabric", "static"))) as controller:
        async with beside(trouble(world, chance, ended)) as troubling:
            parts = parts_from(chance, world.topology)
            for _ in range(chance.randint(1, 4)):
                await works(world, controller, parts, chance)
                if chance.random() < 0.3:
                    parts = parts_from(chance, world.topology)
            await troubling
        await calm(world, controller)
        at_rest(session)
    world.note()
    check(ended)
    assert not any(world.routes.values())
    assert not session.lit
    assert not world.beacons
    assert not any(len(unit.map) for unit in world.units.values())
    return ended


async def calm(world: World, controller: Controller) -> None:
    """Wait until those who failed were asked, and the guard has looked at what is lit."""
    faults = controller.circuits.faults
    for _ in range(70):
        await world.clock.sleep_ns(NS_PER_S)
        assert await controller.settled(10 * NS_PER_S)
        if not faults.unsteered and not faults.broken.keys() & world.units.keys():
            break
    await world.clock.sleep_ns(NS_PER_S)
    assert await controller.settled(10 * NS_PER_S)
    assert not faults.unsteered
    assert not faults.broken.keys() & world.units.keys()


def check(ended: Ended) -> None:
    """Nobody stranded for long, nothing broken used again, and every row whole."""
    world, events, happened, stiff = ended
    for stream, row in events:
        assert row.keys() == FABRIC_STREAMS[stream].keys()
    if not happened:
        assert not world.strandings
    for one in world.strandings:
        assert one.ms <= LONGEST_MS or one.pair[0] in stiff, one
    ends = {str(up): up for up in world.topology.uplinks}
    for (stream, row), told_ns in zip(events, world.told_ns, strict=True):
        if stream == "fabric_part" and row["state"] == "broken" and row["part"] in ends:
            up = ends[row["part"]]
            for asked_ns, wanted in world.units[up.switch].wanted:
                used = up.ingress in {port for port, _ in wanted}
                assert asked_ns <= told_ns or not used, f"{up} is used again"
