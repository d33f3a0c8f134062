"""The fabric's controller at work: what it decides and changes, and what it survives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fabric_bench import bench, link
from fabric_world import (
    BYTES,
    World,
    actions,
    at_rest,
    changes,
    goes,
    is_down,
    pairs,
    part,
    play,
    running,
    session_on,
    train_and_sync,
)
from generation_bench import Events

from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.links import Plan
from harness.fabric.planner import plan_demand
from harness.fabric.topology import Topology
from harness.model.fabric_rules import Arm
from harness.model.scenario import Fabric
from harness.run.fabric.controller import Controller
from harness.run.fabric.opening import network
from harness.tasks import beside
from harness.virtual import VirtualClock, run_virtually

# -- what follows the work -------------------------------------------------------------------------


def test_circuits_come_up_where_the_work_is_and_nobody_is_ever_stranded() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology = world.topology
        train = part(topology, t0_t1=BYTES, t1_t0=BYTES)
        sync = part(topology, "sync", t0_t2=BYTES, t1_t3=BYTES)
        for _ in range(4):
            await goes(world, controller, [train, sync], 100, 300)
        at_rest(controller.session)

    world, events = play(body)
    changes = events.of("fabric_change")
    assert [row["kind"] for row in changes][:3] == ["train", "sync", "train"]
    assert pairs(changes[0]["lit"]) == {"t0-t1"}
    assert pairs(changes[1]["lit"]) >= {"t0-t2", "t1-t3"}
    assert changes[-1]["kind"] == "end"
    assert all(row["outcome"] == "changed" for row in changes)
    assert not world.strandings
    carried = events.of("fabric_traffic")
    assert carried[0]["announced_bytes"] == 2 * BYTES
    assert carried[-1]["circuits_bytes"] == carried[-1]["measured_bytes"] == 2 * BYTES


def test_what_is_up_already_is_neither_steered_nor_switched_again() -> None:
    async def body(world: World, controller: Controller) -> None:
        train = part(world.topology, t0_t1=BYTES, t1_t0=BYTES)
        await goes(world, controller, [train], 100, 300)
        told, steered = [len(unit.wanted) for unit in world.units.values()], len(world.steered)
        for _ in range(5):
            await goes(world, controller, [train], 100, 300)
        assert [len(unit.wanted) for unit in world.units.values()] == told
        assert len(world.steered) == steered

    _, events = play(body)
    assert len(events.of("fabric_change")) == 2  # up, and down at the end
    assert actions(events) == ["change", *["keep"] * 5]


def test_nothing_is_sent_and_nothing_changes() -> None:
    async def body(world: World, controller: Controller) -> None:
        controller.expect([])
        await goes(world, controller, [part(world.topology)], 100, 100)
        assert not any(unit.wanted for unit in world.units.values())

    _, events = play(body)
    assert actions(events) == ["keep"]
    assert "nothing is sent" in events.of("fabric")[0]["reason"]
    assert not events.of("fabric_change")


def windows(rule: Any, idle_ms: Sequence[float], layered: float = 100.0) -> tuple[World, Events]:
    """Steps of two parts that need other circuits, with these windows before each part."""

    async def body(world: World, controller: Controller) -> None:
        topology = world.topology
        parts = train_and_sync(topology)
        for each in idle_ms:
            await goes(world, controller, parts, each, layered)

    one_plane = bench(planes=1, switching_ms=(25.0,))
    return play(body, one_plane, fabric=Fabric(rule=rule, rest_ms=0.0))


def test_by_the_window_rule_circuits_change_only_in_windows_that_are_long_enough() -> None:
    _, long = windows("window", [100.0] * 6)
    _, short = windows("window", [5.0] * 6)
    assert len(changes(long)) >= 10
    assert len(changes(short)) == 1  # before anybody knew how short they are


def test_a_window_that_becomes_ten_times_shorter_is_learnt_and_refused() -> None:
    world, events = windows("window", [200.0] * 6 + [20.0] * 12)
    assert set(actions(events)[3:12]) == {"change"}
    assert set(actions(events)[-6:]) == {"keep"}
    assert not world.strandings


def test_a_window_that_becomes_ten_times_longer_is_learnt_and_used() -> None:
    _, events = windows("window", [20.0] * 4 + [200.0] * 12)
    assert set(actions(events)[2:8]) == {"keep"}
    assert set(actions(events)[-6:]) == {"change"}


def test_a_plan_that_missed_its_window_is_dropped_and_told() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology = world.topology
        parts = train_and_sync(topology)
        for _ in range(3):
            await goes(world, controller, parts, 100, 300)
        await world.clock.sleep_ns(5 * NS_PER_MS)
        controller.expect(parts)
        loop: Any = asyncio.get_running_loop()
        loop.busy(90 * NS_PER_MS)  # something keeps the loop busy
        lit = controller.session.lit
        await world.clock.sleep_ns(50 * NS_PER_MS)
        assert controller.session.lit == lit

    _, events = play(body, fabric=Fabric(rule="window", rest_ms=0.0))
    [dropped] = [row for row in events.of("fabric") if row["action"] == "dropped"]
    assert dropped["reason"].startswith("dropped: ")
    assert "the window is" in dropped["reason"]


def test_soon_after_a_change_the_next_must_save_more() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology = world.topology
        await goes(world, controller, [part(topology, t0_t1=BYTES, t1_t0=BYTES)], 100, 300)
        parts = [part(topology, "sync", t0_t1=BYTES, t1_t0=BYTES, t2_t3=1.5 * BYTES)]
        await goes(world, controller, parts, 100, 300)

    gain_pct = 20.0
    _, calm = play(body, bench(planes=1), fabric=Fabric(gain_min_pct=gain_pct, rest_ms=0.0))
    _, hasty = play(body, bench(planes=1), fabric=Fabric(gain_min_pct=40.0, rest_ms=10_000.0))
    assert actions(calm) == ["change", "change"]
    assert actions(hasty) == ["change", "keep"]
    assert "so soon after the last change" in hasty.of("fabric")[1]["reason"]


def test_what_planes_cannot_serve_goes_the_electrical_path_and_that_is_said() -> None:
    async def body(world: World, controller: Controller) -> None:
        sent = {"t0_t1": 3 * BYTES, "t1_t2": BYTES, "t2_t0": BYTES}
        await goes(world, controller, [part(world.topology, **sent)], 100, 300)
        assert len(controller.session.lit) == 1

    _, events = play(body, bench(3, planes=1))
    [row] = events.of("fabric")
    assert len(row["unserved"]) == 2
    assert "% of the bytes go the electrical path" in row["reason"]


def test_an_odd_ring_takes_three_planes() -> None:
    async def body(world: World, controller: Controller) -> None:
        ring = {f"t{i}_t{(i + 1) % 5}": BYTES for i in range(5)}
        await goes(world, controller, [part(world.topology, **ring)], 100, 300)
        lit = {frozenset((each.a.tor, each.b.tor)) for each in controller.session.lit}
        assert lit == {frozenset((f"t{i}", f"t{(i + 1) % 5}")) for i in range(5)}

    play(body, bench(5, planes=3, switching_ms=(25.0,) * 3))


def test_what_is_not_ours_is_not_touched() -> None:
    topology = bench()
    ours = {**topology.ours, "agg0": topology.ours["agg0"] - {1}}
    foreign = Topology(**{**vars(topology), "ours": ours})

    async def body(world: World, controller: Controller) -> None:
        await goes(world, controller, [part(topology, t0_t1=BYTES, t1_t0=BYTES)], 100, 300)

    shape = Plan(frozenset({link(topology, "t0", "t1"), link(topology, "t2", "t3")}))
    world, _ = play(
        body, foreign, arm="static", fabric=Fabric(static="ring"), plans={"ring": shape}
    )
    assert all(1 not in port for _, made in world.units["agg0"].wanted for port in made)
    play(body, foreign)


def test_names_of_tors_do_not_matter() -> None:
    def rows(names: Sequence[str]) -> list[Any]:
        async def body(world: World, controller: Controller) -> None:
            a, b, c, d = "wxyz"
            train = part(world.topology, **{f"{a}_{b}": BYTES, f"{b}_{a}": BYTES})
            sync = part(world.topology, "sync", **{f"{a}_{c}": 2 * BYTES, f"{b}_{d}": BYTES})
            for _ in range(3):
                await goes(world, controller, [train, sync], 100, 300)

        _, events = play(body, bench(names))
        return [
            {key: row[key] for key in row if key not in ("solve_ms", "circuits", "reason")}
            for row in events.of("fabric")
        ]

    assert rows("wxyz") == rows("zxwy") == rows("yzxw")


def test_traffic_that_nobody_steers_waits_for_circuits() -> None:
    """A change in its time costs more than where it goes on beside: 640 ms are sent meanwhile."""

    def planned_ms(*, steered: bool) -> float:
        async def body(world: World, controller: Controller) -> None:
            await goes(world, controller, train_and_sync(world.topology), 0, 300)

        there = bench()
        tors = {name: replace(tor, steered=steered) for name, tor in there.tors.items()}
        _, events = play(body, replace(there, tors=tors), stranded_ms=1e9)
        rows = [row for row in events.of("fabric") if row["kind"] == "sync"]
        return float(rows[0]["change_ms"])

    assert planned_ms(steered=False) > planned_ms(steered=True)


def test_a_decision_takes_as_long_as_its_plans_and_its_course_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(world: World, controller: Controller) -> None:
        late_ms = 0

        def planned(*given: Any, **named: Any) -> Plan:
            nonlocal late_ms
            late_ms += 7
            return plan_demand(*given, **named)

        class Late(VirtualClock):
            def now_ns(self) -> int:
                return super().now_ns() + late_ms * NS_PER_MS

        monkeypatch.setattr("harness.run.fabric.controller.plan_demand", planned)
        controller.clock = Late()
        controller.expect([part(world.topology, t0_t1=BYTES)])
        assert late_ms
        row = controller.session.record.of("fabric")[-1]  # type: ignore[attr-defined]
        assert row["solve_ms"] == late_ms

    play(body)


# -- arms ------------------------------------------------------------------------------------------


def test_arms_follow_one_another_and_leave_nothing_behind() -> None:
    async def main() -> None:
        world = World(bench())
        session = session_on(world)
        parts = train_and_sync(world.topology)
        changes = dict[str, int]()
        for arm in ("electrical", "static", "rfabric", "ideal"):
            async with running(session, arm) as controller:
                for _ in range(3):
                    await goes(world, controller, parts, 100, 300)
                if arm == "static":
                    assert {each.a.tor + each.b.tor for each in session.lit} >= {"t0t2", "t1t3"}
            is_down(session)
            told: Any = session.record
            of = [r for r in told.of("fabric_change") if r["policy"] == f"orchestrl@{arm}"]
            changes[arm] = len(of)
        assert changes == {"electrical": 0, "static": 2, "rfabric": changes["rfabric"], "ideal": 0}
        assert changes["rfabric"] > 2
        assert world.oversubscription == [1.0, None]
        assert not world.strandings

    run_virtually(main())


def test_a_static_arm_lights_the_scenarios_shape_and_keeps_it() -> None:
    topology = bench()
    shape = Plan(frozenset({link(topology, "t0", "t1"), link(topology, "t2", "t3", 1)}))

    async def body(world: World, controller: Controller) -> None:
        parts = train_and_sync(topology)
        for _ in range(3):
            await goes(world, controller, parts, 100, 300)
        assert controller.session.lit == shape.links

    fabric = Fabric(static="ring")
    _, events = play(body, topology, arm="static", fabric=fabric, plans={"ring": shape})
    assert len(events.of("fabric_change")) == 2


def test_a_static_plan_is_of_a_whole_step_also_where_a_sync_is_announced_first() -> None:
    async def body(world: World, controller: Controller) -> None:
        train = part(world.topology, t0_t1=5 * BYTES, t1_t0=5 * BYTES)
        sync = part(world.topology, "sync", t0_t2=BYTES)
        controller.expect([sync])
        await world.clock.sleep_ns(NS_PER_S)
        for _ in range(2):
            await goes(world, controller, [train, sync], 100, 300)
        assert "t0t1" in {each.a.tor + each.b.tor for each in controller.session.lit}

    play(body, bench(planes=1), arm="static")


def test_before_anybody_carries_decisions_out_nobody_waits_for_them() -> None:
    async def main() -> None:
        world = World(bench())
        async with network(session_on(world), Arm("orchestrl", "rfabric"), 0) as controller:
            assert controller is not None
            controller.expect([part(world.topology, t0_t1=BYTES)])
            begin_ns = world.clock.now_ns()
            assert await controller.settled(NS_PER_S)
            assert world.clock.now_ns() == begin_ns

    run_virtually(main())


# -- one thing at a time ---------------------------------------------------------------------------


def test_of_two_changes_asked_in_quick_succession_the_newest_wins() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology = world.topology
        controller.expect([part(topology, t0_t1=BYTES, t1_t0=BYTES)])
        controller.expect([part(topology, "sync", t0_t2=BYTES, t1_t3=BYTES)])
        await world.clock.sleep_ns(20 * NS_PER_MS)  # it is under way
        controller.expect([part(topology, "gather", t0_t1=9 * BYTES)])
        controller.expect([part(topology, "train", t0_t3=9 * BYTES, t1_t2=BYTES)])
        assert await controller.settled(NS_PER_S)
        assert {each.a.tor + each.b.tor for each in controller.session.lit} == {"t0t3", "t1t2"}
        at_rest(controller.session)

    _, events = play(body, bench(planes=1), fabric=Fabric(rest_ms=0.0))
    assert [row["kind"] for row in events.of("fabric_change")] == ["sync", "train", "end"]


def test_what_is_asked_during_a_change_is_weighed_after_it() -> None:
    async def body(world: World, controller: Controller) -> None:
        parts = [part(world.topology, t0_t1=BYTES, t1_t0=BYTES)]
        controller.expect(parts)
        await world.clock.sleep_ns(20 * NS_PER_MS)  # it is under way
        controller.expect(parts)
        assert await controller.settled(NS_PER_S)

    _, events = play(body)
    assert actions(events) == ["change", "keep"]


def test_a_layout_waits_until_circuits_are_settled() -> None:
    async def body(world: World, controller: Controller) -> None:
        controller.expect([part(world.topology, t0_t1=BYTES, t1_t0=BYTES)])
        await world.clock.sleep_ns(10 * NS_PER_MS)
        assert not await controller.settled(5 * NS_PER_MS)  # not for longer than asked
        assert not controller.session.lit
        assert await controller.settled(NS_PER_S)
        assert controller.session.lit
        at_rest(controller.session)
        assert await controller.settled(0)

    play(body)


def test_a_step_that_is_announced_again_goes_on_as_before() -> None:
    async def body(world: World, controller: Controller) -> None:
        parts = train_and_sync(world.topology)
        await goes(world, controller, parts, 100, 300)
        controller.expect(parts)

        async def dies() -> None:
            async with controller.during(parts[0]):
                await world.clock.sleep_ns(50 * NS_PER_MS)
                raise RuntimeError("a rank died")

        with pytest.raises(RuntimeError):
            await dies()
        for _ in range(2):
            await goes(world, controller, parts, 100, 300)
        at_rest(controller.session)

    _, events = play(body)
    assert len(events.of("fabric_traffic")) == 6


@pytest.mark.parametrize("after_ms", [0.5, 5, 12, 20, 30, 38, 45, 60])
def test_an_interrupt_in_a_change_leaves_all_electrical_and_dark(after_ms: float) -> None:
    async def main() -> None:
        world = World(bench())
        session = session_on(world)

        async def arm() -> None:
            async with running(session) as controller:
                await goes(world, controller, [part(world.topology, t0_t1=BYTES)], 200, 300)
                controller.expect([part(world.topology, "sync", t0_t2=BYTES, t1_t3=BYTES)])
                await asyncio.Event().wait()

        async with beside(arm()) as running_arm:
            await world.clock.sleep_ns(round(503 * NS_PER_MS + after_ms * NS_PER_MS))
            running_arm.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running_arm
        is_down(session)
        assert session.shape == "electrical"
        assert not world.strandings

    run_virtually(main())


# -- what is learnt --------------------------------------------------------------------------------


def test_a_change_that_was_slow_once_does_not_end_all_changes() -> None:
    async def body(world: World, controller: Controller) -> None:
        topology = world.topology
        parts = train_and_sync(topology)
        await goes(world, controller, parts, 100, 300)
        world.steer_ns = NS_PER_S
        await goes(world, controller, parts, 100, 300)
        world.steer_ns = NS_PER_MS // 10
        await world.clock.sleep_ns(20 * NS_PER_S)
        for _ in range(4):
            await goes(world, controller, parts, 100, 300)

    _, events = play(body, fabric=Fabric(rest_ms=0.0))
    assert actions(events)[-2:] == ["change", "change"]


def test_a_link_that_is_waited_for_in_vain_does_not_count_as_slow_steering() -> None:
    async def body(world: World, controller: Controller) -> None:
        world.units["agg0"].dull = {up.egress for up in world.topology.by_switch["agg0"]}
        await goes(world, controller, [part(world.topology, t0_t1=BYTES)], 100, 3000)
        assert controller.circuits.steer_ns < 10 * NS_PER_MS

    play(body)


def test_traffic_takes_the_electrical_path_while_steering_is_slow() -> None:
    async def body(world: World, controller: Controller) -> None:
        world.steer_ns = 30 * NS_PER_MS
        parts = train_and_sync(world.topology)
        for _ in range(4):
            await goes(world, controller, parts, 100, 300)
        await controller.settled(NS_PER_S)
        at_rest(controller.session)
        assert controller.circuits.steer_ns > 100 * NS_PER_MS

    play(body)


def test_the_first_gap_of_a_part_counts_to_its_window() -> None:
    async def body(world: World, controller: Controller) -> None:
        train = part(world.topology, gap_ms=200, t0_t1=BYTES, t1_t0=BYTES)
        sync = part(world.topology, "sync", t0_t2=BYTES, t1_t3=BYTES)
        for _ in range(3):
            controller.expect([train, sync])
            async with controller.during(train):
                await world.clock.sleep_ns(500 * NS_PER_MS)
            controller.reached("sync")
            async with controller.during(sync):
                await world.clock.sleep_ns(300 * NS_PER_MS)

    _, events = play(body, bench(planes=1), fabric=Fabric(rule="window", rest_ms=0.0))
    trains = [row for row in events.of("fabric") if row["kind"] == "train"]
    assert trains[-1]["window_ms"] == pytest.approx(200, abs=5)
