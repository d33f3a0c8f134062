"""What breaks in a fabric at work: the run goes on over what is left, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fabric_bench import bench, link
from fabric_world import (
    BYTES,
    CHANGING_MS,
    NOTICED_MS,
    World,
    at_rest,
    goes,
    pairs,
    part,
    play,
    running,
    session_on,
    train_and_sync,
)
from generation_bench import Events

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SteeringFailed
from harness.fabric.links import Plan
from harness.fabric.topology import Topology, topology_of
from harness.model.fabric_rules import Arm
from harness.model.generated import Numbers, bench_of
from harness.model.scenario import Fabric
from harness.run.fabric.circuits import GUARD_NS, READ_NS, SILENCE_NS
from harness.run.fabric.controller import Controller
from harness.run.fabric.opening import network
from harness.tasks import beside
from harness.virtual import run_virtually

# -- what breaks -----------------------------------------------------------------------------------


def trouble(
    fault: Callable[[World], None],
    *,
    at_ms: float,
    topology: Topology | None = None,
    stranded_ms: float = 0.0,
    steps: int = 4,
    mend: Callable[[World], None] = lambda world: None,
) -> tuple[World, Events]:
    """Steps of train and sync, 800 ms each, while something breaks; it may be mended at 4 s."""

    async def body(world: World, controller: Controller) -> None:
        parts = train_and_sync(world.topology)

        async def breaks() -> None:
            await world.clock.sleep_ns(round(at_ms * NS_PER_MS))
            fault(world)
            world.note()
            await world.clock.sleep_ns(round((4000 - at_ms) * NS_PER_MS))
            mend(world)
            world.note()

        async with beside(breaks()):
            for _ in range(steps):
                await goes(world, controller, parts, 100, 300)
            assert await controller.settled(10 * NS_PER_S)
        at_rest(controller.session)

    return play(body, topology, fabric=Fabric(rest_ms=0.0), stranded_ms=stranded_ms)


def broken(events: Events) -> list[str]:
    return [row["part"] for row in events.of("fabric_part") if row["state"] == "broken"]


def never_again(world: World, events: Events) -> None:
    """No switch was told to use a port of a part again that was found to be broken."""
    ends = {str(up): up for up in world.topology.uplinks}
    for (stream, row), told_ns in zip(events, world.told_ns, strict=True):
        if stream == "fabric_part" and row["state"] == "broken" and row["part"] in ends:
            up = ends[row["part"]]
            for asked_ns, wanted in world.units[up.switch].wanted:
                assert asked_ns <= told_ns or up.ingress not in {port for port, _ in wanted}


def test_a_port_that_is_stuck_stays_electrical_and_is_not_tried_again() -> None:
    topology = bench()
    up = topology.uplink("t1", "agg0")

    def fault(world: World) -> None:
        world.units["agg0"].stuck = {up.egress if up else 0}

    world, events = trouble(fault, at_ms=0)
    assert broken(events) in (["t1:u0"], ["t0:u0", "t1:u0"], ["t2:u0", "t1:u0"])
    assert events.of("fabric_change")[0]["outcome"] == "degraded"
    assert sum(row["outcome"] != "changed" for row in events.of("fabric_change")) == 1
    never_again(world, events)


def test_a_port_that_gives_no_light_unnoticed_is_found_by_its_far_end() -> None:
    def fault(world: World) -> None:
        world.units["agg0"].dull = {up.egress for up in world.topology.by_switch["agg0"][1:2]}

    world, events = trouble(fault, at_ms=0)
    assert {"t1:u0"} <= {*broken(events)}
    never_again(world, events)


def test_cables_that_are_swapped_are_found_by_who_is_heard() -> None:
    def fault(world: World) -> None:
        a, b = (world.topology.uplink(tor, "agg0") for tor in ("t1", "t2"))
        assert a is not None
        assert b is not None
        world.swap(a, b)

    world, events = trouble(fault, at_ms=0)
    reasons = [row["reason"] for row in events.of("fabric_part")]
    assert any("hears" in reason for reason in reasons)
    never_again(world, events)


@pytest.mark.parametrize("at_ms", [60, 450, 1000])
def test_a_plane_whose_light_is_lost_while_idle_is_steered_off(at_ms: float) -> None:
    def fault(world: World) -> None:
        world.units["agg0"].shuttered = True

    world, events = trouble(fault, at_ms=at_ms, stranded_ms=NOTICED_MS)
    assert {*broken(events)} >= {"t0:u0"}
    assert "agg0" not in broken(events)
    assert all(up.endswith("u0") for up in broken(events))
    never_again(world, events)


@pytest.mark.parametrize("at_ms", [403, 410, 415, 430, 440])
def test_a_plane_whose_light_is_lost_in_a_change_is_steered_off(at_ms: float) -> None:
    def fault(world: World) -> None:
        world.units["agg0"].shuttered = True

    _, events = trouble(fault, at_ms=at_ms, stranded_ms=CHANGING_MS)
    assert all(up.endswith("u0") for up in broken(events))
    assert pairs(events.of("fabric_change")[-2]["lit"])  # the other plane goes on


@pytest.mark.parametrize("at_ms", [0, 200, 403, 415, 430, 600])
def test_a_switch_that_dies_is_done_without_and_comes_back(at_ms: float) -> None:
    def fault(world: World) -> None:
        world.units["agg0"].gone = "no answer"
        world.units["agg0"].shuttered = True

    def mend(world: World) -> None:
        world.units["agg0"].gone = ""
        world.units["agg0"].shuttered = False

    world, events = trouble(fault, at_ms=at_ms, steps=14, mend=mend, stranded_ms=CHANGING_MS)
    states = [(row["part"], row["state"]) for row in events.of("fabric_part")]
    assert states == [("agg0", "broken"), ("agg0", "back")]
    assert world.units["agg0"].wanted[-2][0] > 4 * NS_PER_S
    assert any("agg0" in name for name in events.of("fabric_change")[-2]["lit"])


@pytest.mark.parametrize("at_ms", [200, 405, 430, 600])
def test_a_switch_that_starts_anew_dark_is_used_again_at_once(at_ms: float) -> None:
    def fault(world: World) -> None:
        world.units["agg0"].reset()

    _, events = trouble(fault, at_ms=at_ms, stranded_ms=CHANGING_MS)
    states = [(row["part"], row["state"]) for row in events.of("fabric_part")]
    assert states in ([("agg0", "broken"), ("agg0", "back")], [])
    assert any("agg0" in name for name in events.of("fabric_change")[-2]["lit"])


def test_where_no_agent_hears_a_switch_that_starts_anew_dark_is_found_by_its_map() -> None:
    async def body(world: World, controller: Controller) -> None:
        await goes(world, controller, [part(world.topology, t0_t1=BYTES, t2_t3=BYTES)], 100, 300)
        assert controller.session.lit
        before = len(world.strandings)
        for unit in world.units.values():
            unit.gone, unit.errors = "no answer", []
        await world.clock.sleep_ns(3 * NS_PER_S)
        assert controller.session.lit  # nobody is steered off light that may well be there
        for unit in world.units.values():
            unit.gone = ""
            unit.reset()
        await world.clock.sleep_ns(2 * NS_PER_S)
        at_rest(controller.session)
        assert len(world.strandings) > before

    # two looks: the first one meets the line that the unit closed
    play(body, bench(), stranded_ms=2 * (READ_NS + GUARD_NS) / NS_PER_MS, agents=False)


def test_a_plan_that_waited_while_something_broke_goes_without_it() -> None:
    async def body(world: World, controller: Controller) -> None:
        train, sync = train_and_sync(world.topology)
        await goes(world, controller, [train], 100, 300)
        world.steer_ns, steered = 30 * NS_PER_MS, len(world.steered)
        world.units["agg0"].shuttered = True
        world.note()
        while len(world.steered) == steered:
            await world.clock.sleep_ns(NS_PER_MS)
        controller.expect([sync])  # over both planes, while traffic is steered off one
        assert await controller.settled(NS_PER_S)
        at_rest(controller.session)

    world, events = play(body, stranded_ms=NOTICED_MS + 120)
    never_again(world, events)


def test_a_look_that_began_before_two_changes_says_nothing() -> None:
    async def main() -> None:
        world = World(bench())
        world.steer_ns = 1000
        session = session_on(world, Fabric(settle_ms=0.0))
        first, other = (Plan(frozenset({link(world.topology, "t0", to)})) for to in ("t1", "t2"))
        async with network(session, Arm("orchestrl", "rfabric"), 0) as controller:
            assert controller is not None
            circuits, clock = controller.circuits, world.clock
            await circuits.change("first", first)
            await clock.sleep_ns(NS_PER_S - NS_PER_MS - clock.now_ns() % NS_PER_S)
            await clock.sleep_ns(2 * NS_PER_MS)  # just after a beacon
            async with beside(circuits.guard()) as looking:
                await clock.sleep_ns(GUARD_NS + NS_PER_MS // 2)
                await circuits.change("other", other)
                await clock.sleep_ns(SILENCE_NS - 50 * NS_PER_MS)
                await circuits.change("first", first)
                assert not await looking
            assert session.lit == first.links
            assert not circuits.faults.broken

    run_virtually(main())


def test_a_switch_that_answers_but_fails_whenever_it_is_used_costs_little() -> None:
    def fault(world: World) -> None:
        world.units["agg0"].dies_while_switching = True

        async def lives() -> None:
            while True:
                await world.clock.sleep_ns(10 * NS_PER_MS)
                world.units["agg0"].gone = ""

        world.living = asyncio.create_task(lives())  # type: ignore[attr-defined]

    _, events = trouble(fault, at_ms=0, steps=40)
    lost = [row for row in events.of("fabric_part") if row["state"] == "broken"]
    assert 2 <= len(lost) <= 9  # 0.1 s, 0.2 s, ...


def test_a_core_that_dies_is_found_between_pods() -> None:
    numbers = Numbers(
        roles=("train", "generate"), tors_per_pod=2, nodes_per_tor=2, uplinks_per_tor=2,
        aggregation_planes=2, core_planes=1, trunks_per_pod=2, link_gbit_per_s=1.0,
    )  # fmt: skip
    topology = topology_of(bench_of(numbers))

    async def body(world: World, controller: Controller) -> None:
        a, b = topology.pods.values()
        train = part(topology, **{f"{a[0]}_{a[1]}": BYTES})
        sync = part(topology, "sync", **{f"{a[0]}_{b[0]}": BYTES, f"{a[1]}_{b[1]}": BYTES})
        for _ in range(2):
            await goes(world, controller, [train, sync], 100, 300)
        assert any("core0" in each.switches for each in controller.session.lit)
        world.units["core0"].gone, world.units["core0"].shuttered = "no answer", True
        world.note()
        for _ in range(3):
            await goes(world, controller, [train, sync], 100, 300)
        at_rest(controller.session)
        assert not any("core0" in each.switches for each in controller.session.lit)
        world.units["core0"].gone, world.units["core0"].map = (
            "",
            type(world.units["core0"].map)(frozenset()),
        )

    _, events = play(body, topology, fabric=Fabric(rest_ms=0.0), stranded_ms=CHANGING_MS)
    assert broken(events) == ["core0"]


# -- ToRs ------------------------------------------------------------------------------------------


def test_a_tor_that_cannot_be_steered_away_keeps_its_circuits_and_the_rest_goes_on() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology, session = world.topology, controller.session
        await goes(world, controller, [part(topology, t0_t1=BYTES, t2_t3=BYTES)], 100, 300)
        world.unreachable["t0"] = "no route to host"
        before = session.lit
        told = [len(unit.wanted) for unit in world.units.values()]
        controller.expect([part(topology, "sync", t0_t2=9 * BYTES, t1_t3=9 * BYTES)])
        await world.clock.sleep_ns(12 * NS_PER_MS)
        assert [len(unit.wanted) for unit in world.units.values()] == told  # nothing was switched
        assert await controller.settled(NS_PER_S)
        at_rest(session)
        assert {each for each in before if "t0" in (each.a.tor, each.b.tor)} <= session.lit
        controller.expect([part(topology, "gather", t2_t3=BYTES)])
        await controller.settled(NS_PER_S)
        world.unreachable.clear()
        await world.clock.sleep_ns(NS_PER_S)
        controller.expect([part(topology, "sync", t0_t2=9 * BYTES, t1_t3=9 * BYTES)])
        assert await controller.settled(NS_PER_S)
        assert "t0t2" in {each.a.tor + each.b.tor for each in session.lit}

    _, events = play(body, bench(planes=1), fabric=Fabric(rest_ms=0.0))
    assert events.of("fabric_change")[1]["outcome"] == "failed"
    states = [(row["part"], row["state"]) for row in events.of("fabric_part")]
    assert states == [("t0", "unsteered"), ("t0", "back")]


def test_around_a_tor_that_is_out_of_reach_circuits_change_all_the_same() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology, session = world.topology, controller.session
        await goes(world, controller, [part(topology, t0_t1=BYTES)], 100, 300)
        world.unreachable["t0"] = "no route to host"
        for a, b in (("t2", "t3"), ("t4", "t5"), ("t2", "t5")):
            controller.expect([part(topology, **{"t0_t1": BYTES, f"{a}_{b}": 9 * BYTES})])
            assert await controller.settled(10 * NS_PER_S)
            assert {each.a.tor + each.b.tor for each in session.lit} >= {"t0t1", a + b}
            at_rest(session)
        far_end = part(topology, t0_t1=BYTES, t1_t2=5 * BYTES, t3_t4=9 * BYTES)
        controller.expect([far_end])  # the circuit that must stay takes t1's only uplink too
        assert await controller.settled(10 * NS_PER_S)
        assert {each.a.tor + each.b.tor for each in session.lit} >= {"t0t1", "t3t4"}
        world.unreachable.clear()

    play(body, bench(6, planes=1), fabric=Fabric(rest_ms=0.0))


def test_a_tor_that_cannot_be_steered_back_sends_electrically_and_the_rest_goes_on() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology, session = world.topology, controller.session
        world.refusing["t0"] = "the daemon says no"
        await goes(world, controller, [part(topology, t0_t1=BYTES, t2_t3=BYTES)], 100, 300)
        assert not world.routes["t0"]
        assert all(world.is_up(each) for each in session.lit)
        assert world.routes["t2"]
        world.refusing.clear()
        await world.clock.sleep_ns(NS_PER_S)
        assert world.routes["t0"]
        at_rest(session)

    _, events = play(body, bench(planes=1))
    change, *_ = events.of("fabric_change")
    assert change["outcome"] == "degraded"
    assert "the daemon says no" in change["error"]


def test_circuits_stay_that_a_tor_out_of_reach_may_have_been_steered_onto() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology, session = world.topology, controller.session
        world.vanishing.add("t0")
        await goes(world, controller, [part(topology, t0_t1=BYTES, t2_t3=BYTES)], 100, 300)
        assert world.routes["t0"]
        controller.expect([part(topology, "sync", t1_t3=9 * BYTES)])
        assert await controller.settled(NS_PER_S)
        at_rest(session)
        world.unreachable.clear()

    play(body, bench(planes=1), fabric=Fabric(rest_ms=0.0))


def test_a_tor_that_refuses_at_the_end_keeps_its_circuits_and_the_next_arm_does_not_begin() -> None:
    async def main() -> None:
        world = World(bench())
        session = session_on(world)
        async with running(session) as controller:
            await goes(world, controller, [part(world.topology, t0_t1=BYTES)], 100, 300)
            world.refusing["t0"] = "the daemon says no"
        at_rest(session)
        assert session.lit
        assert not world.beacons
        with pytest.raises(SteeringFailed, match="t0: the daemon says no"):
            async with running(session, "electrical"):
                pass
        assert not world.strandings

    run_virtually(main())


def test_a_circuit_that_goes_dark_under_a_tor_that_refuses_is_left_as_soon_as_it_obeys() -> None:
    async def body(world: World, controller: Controller) -> None:
        await goes(world, controller, [part(world.topology, t0_t1=BYTES)], 100, 300)
        world.refusing["t0"], world.units["agg0"].shuttered = "the daemon says no", True
        world.units["agg1"].shuttered = True
        world.note()
        await world.clock.sleep_ns(2 * NS_PER_S)
        world.refusing.clear()
        await world.clock.sleep_ns(2 * NS_PER_S)
        assert not world.routes["t0"]

    play(body, stranded_ms=4000)
