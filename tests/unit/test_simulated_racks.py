"""Simulated ToRs: how they are steered, what their agents hear and count; a controller on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fabric_world import pairs, part, running, session_on
from generation_bench import Events
from hypothesis import given
from hypothesis import strategies as st
from simulated_fabric import (
    CHANGE_MS,
    READ_MS,
    STEER_MS,
    SWITCH_MS,
    Small,
    bench,
    broken,
    flows,
    play,
)

from agents.beacons import Beacon, Ledger
from harness.bench.simulated.beacons import Record, Stream, report
from harness.bench.simulated.world import Flow
from harness.clock import NS_PER_MS
from harness.errors import SteeringFailed
from harness.fabric.prediction import PAYLOAD_SHARE
from harness.model.bench import Bench, EmulatedTor, Links
from harness.run.fabric.controller import Controller
from harness.tasks import beside
from harness.wire.asks import CommandFailed
from harness.wire.messages import (
    Beacons,
    Counters,
    Done,
    Heard,
    ReadCounters,
    StartBeacons,
    StopBeacons,
)

BEACON_NS = NS_PER_MS

# -- steering --------------------------------------------------------------------------------------


def test_tors_are_steered_beside_each_other_and_routes_are_in_force_then() -> None:
    async def body(small: Small) -> None:
        link = small.link("t0", "t1")
        await small.switch(link)
        begun_ms = small.now_ms()
        async with beside(small.lead_over(link)) as steering:
            sending = asyncio.create_task(small.takes_ms(*flows(10, "t0.0>t1.0")))
            await steering
            assert small.now_ms() - begun_ms == pytest.approx(STEER_MS)
            # 25 MB/s for 0.1 ms, then 100 MB/s
            assert await sending == pytest.approx(STEER_MS + (100 - STEER_MS / 4), abs=1e-4)

    play(body)


def steered(**faults: Any) -> tuple[str, str, float]:
    """Why t0 refused, whether it sends over its circuit nevertheless, and how long that took."""

    async def body(small: Small) -> tuple[str, str, float]:
        link, reason = small.link("t0", "t1"), ""
        await small.switch(link)
        begun_ms = small.now_ms()
        try:
            await small.lead_over(link)
        except SteeringFailed as failed:
            reason = failed.failures["t0"]
        took_ms = small.now_ms() - begun_ms
        await small.takes_ms(*flows(1, "t0.0>t1.0"))
        assert await small.takes_ms(*flows(1, "t1.0>t0.0")) == pytest.approx(10)
        return reason, *small.crossed("t0")[0], took_ms

    return play(body, bench(steering={"t0": EmulatedTor(**faults)}))


def test_a_tor_that_refuses_goes_on_as_before_and_says_so() -> None:
    reason, way, _ = steered(deny_devices=("u1",))
    assert way == "e0"
    assert "ToR t0: RTNETLINK answers: Operation not permitted" in reason
    assert "nothing was changed" in reason


def test_a_change_that_is_cut_or_lost_is_found_out_by_reading_and_made() -> None:
    assert steered(cut_apply=1)[:2] == ("", "u1")
    assert steered(lose_reply=1) == ("", "u1", pytest.approx(5000 + STEER_MS))
    assert steered(answer_ms=10.0) == ("", "u1", pytest.approx(20 + STEER_MS))


def test_of_a_tor_that_dies_nobody_knows_the_routes() -> None:
    async def body(small: Small) -> None:
        links = small.link("t0", "t1"), small.link("t0", "t2", 1)
        await small.switch(*links)
        with pytest.raises(SteeringFailed, match=r"t0.*nobody answers.*its routes are not known"):
            await small.lead_over(*links)
        with pytest.raises(SteeringFailed, match="t0: nobody answers"):
            await small.lead_over()
        await small.takes_ms(*flows(1, "t0.0>t1.0", "t0.0>t2.0"))
        assert small.crossed("t0")[0] == {"u1": 1_000_000, "e0": 1_000_000}  # it took one of two

    play(body, bench(steering={"t0": EmulatedTor(die_on_apply=1)}))


# -- beacons ---------------------------------------------------------------------------------------


async def start(small: Small, *tors: str) -> None:
    asked = StartBeacons(devices=("u1",), interval_ns=BEACON_NS)
    await small.ask_all(dict.fromkeys(tors, asked), Done)


async def hear(
    small: Small, expect: str, since_ns: int = 0, wait_ms: float = 0.0, tor: str = "t1"
) -> Beacons:
    wait_ns = round(wait_ms * NS_PER_MS)
    asked = Heard(since_ns=since_ns, expect={"u1": expect} if expect else {}, wait_ns=wait_ns)
    return await small.ask(tor, asked, Beacons)


def test_the_far_end_is_heard_with_the_first_beacon_after_its_light() -> None:
    async def body(small: Small) -> None:
        await small.sleep_ms(0.3)
        await start(small, "t0", "t1")
        async with beside(small.switch(small.link("t0", "t1"))):
            heard = await hear(small, "t0:u1", small.clock.now_ns(), 1000)
            lit_ms = 0.3 + READ_MS + CHANGE_MS / 2 + SWITCH_MS
            assert small.now_ms() == pytest.approx(26.3)  # 0.3, 1.3, ...
            assert lit_ms < small.now_ms() < lit_ms + 1
            assert heard.last == {"u1": "t0:u1"}
            assert heard.first_ns == {"u1": small.clock.now_ns()}

    play(body)


def test_who_waits_for_somebody_else_waits_to_the_end_and_hears_who_it_is() -> None:
    async def body(small: Small) -> None:
        await start(small, "t0", "t1", "t2", "t3")
        await small.switch(small.link("t0", "t1"), small.link("t2", "t3"))
        begun_ms = small.now_ms()
        heard = await hear(small, "t0:u1", small.clock.now_ns(), 50)
        assert small.now_ms() - begun_ms == pytest.approx(50)
        assert heard.last == {"u1": "t2:u1"}

    play(body, bench(emulate={"agg0": broken(swapped_ports=((10, 12),))}))


def test_a_moved_circuit_has_a_gap_and_one_that_stays_loses_nothing() -> None:
    async def body(small: Small) -> None:
        await small.switch(small.link("t0", "t1"), small.link("t2", "t3"))
        await start(small, "t0", "t1", "t2", "t3")
        await small.sleep_ms(10)
        await small.switch(small.link("t2", "t3"))
        await small.sleep_ms(10)
        await small.switch(small.link("t0", "t1"), small.link("t2", "t3"))
        await small.sleep_ms(10)
        told = await small.ask_all(dict.fromkeys(small.topology.tors, StopBeacons()), Beacons)
        (gap,) = told["t1"].gaps
        dark_ms = [at_ms for at_ms, up, _ in small.turns if up == "t0:u1"][-2:]
        silent_ms = (gap.first_ns - gap.last_ns) / NS_PER_MS
        assert silent_ms == pytest.approx(dark_ms[1] - dark_ms[0], abs=1)
        assert (gap.device, gap.before, gap.after) == ("u1", "t0:u1", "t0:u1")
        assert told["t1"].lost["u1"] == silent_ms - 1  # sent, and not heard
        assert not told["t3"].gaps
        assert told["t3"].lost == {"u1": 0}
        assert told["t3"].received["u1"] == told["t1"].received["u1"] + told["t1"].lost["u1"]

    play(body)


def test_what_cannot_be_is_answered_as_agents_do() -> None:
    async def body(small: Small) -> None:
        for asked in (Heard(since_ns=0), StopBeacons()):
            with pytest.raises(CommandFailed, match="NoBeacons: no beacons were started"):
                await small.ask("t0", asked, Beacons)
        for devices, interval_ns, why in (
            (("u9",), BEACON_NS, "no network device u9 here"),
            (("u1",), 1000, "200000 ns is the shortest"),
        ):
            with pytest.raises(CommandFailed, match=f"Refused: .*{why}"):
                await small.ask("t0", StartBeacons(devices=devices, interval_ns=interval_ns), Done)
        await start(small, "t0")
        with pytest.raises(CommandFailed, match="Busy"):
            await start(small, "t0")
        with pytest.raises(CommandFailed, match="no beacons on u2"):
            await small.ask("t0", Heard(since_ns=0, expect={"u2": "t1:u2"}), Beacons)
        async with beside(hear(small, "t1:u1", 0, 1000, "t0")) as waiting:
            await small.sleep_ms(10)
            await small.ask("t0", StopBeacons(), Beacons)
            with pytest.raises(CommandFailed, match="stopped meanwhile"):
                await waiting
        await start(small, "t0")

    play(body)


SPANS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 25), st.booleans()),
    max_size=8,
)
"""Who lights a device, how long it was dark before, for how long it is lit, and whether the sender
has begun anew; in quarters of an interval."""


@given(SPANS, st.integers(-1, 120), st.integers(0, 12))
def test_what_is_told_is_what_agents_make_of_the_same_beacons(
    spans: Sequence[tuple[str, int, int, bool]], since: int, left: int
) -> None:
    interval_ns = 4
    ledger, record = Ledger("me", ["u1"], interval_ns), Record()
    streams = {name: Stream(f"{name}:u1", i, interval_ns) for i, name in enumerate("ab")}
    now_ns = 0
    for number, (name, dark, lit, anew) in enumerate(spans):
        begin_ns, now_ns = now_ns + dark, now_ns + dark + lit
        if anew:
            streams[name] = Stream(f"{name}:u1", begin_ns, interval_ns)
        stream = streams[name]
        record.begin(stream, begin_ns)
        last = number == len(spans) - 1
        for sequence in range((now_ns + left) // interval_ns + 1):
            at_ns = stream.at_ns(sequence)
            if begin_ns <= at_ns and (at_ns < now_ns or (last and at_ns <= now_ns + left)):
                ledger.arrived("u1", at_ns, Beacon(stream.sender, id(stream), sequence))
        if not last:
            record.end(now_ns)
    now_ns += left
    told = report({"u1": record}, interval_ns, max(since, 0), now_ns)
    wanted = ledger.report(max(since, 0))
    assert told == wanted


# -- counters --------------------------------------------------------------------------------------


def test_counters_tell_bytes_of_frames_and_the_path_that_is_not_there() -> None:
    async def body(small: Small) -> None:
        before = await small.ask("t0", ReadCounters(), Counters)
        await small.takes_ms(*flows(1.448, "t0.0>t1.0"))
        after = await small.ask("t0", ReadCounters(), Counters)
        assert before.sent_bytes == {"e0": 0, "u1": 0, "u2": 0}
        assert after.sent_bytes == {"e0": 1_514_000, "u1": 0, "u2": 0}
        assert after.down == ()

    async def without(small: Small) -> None:
        there = await small.ask("t0", ReadCounters(), Counters)
        assert there.down == ("e0",)
        assert there.sent_bytes == {"u1": 0, "u2": 0}

    play(body)
    play(without, bench(links=Links(electrical="none")))


# -- a controller over all of it -------------------------------------------------------------------

SIZE = 20e6
"""800 ms over the electrical path of a ToR, 200 ms over a circuit."""
SENT = {"train": [("t0", "t1"), ("t1", "t0")], "sync": [("t0", "t2"), ("t1", "t3")]}


async def step(small: Small, controller: Controller) -> dict[str, float]:
    """Train and send new weights, with 200 ms before each; return how long each sent."""
    parts = [
        part(small.topology, kind, **{f"{a}_{b}": SIZE for a, b in ends})
        for kind, ends in SENT.items()
    ]
    controller.expect(parts)
    took_ms = {}
    for this, after in zip(parts, [*parts[1:], None], strict=True):
        await small.sleep_ms(200)
        async with controller.during(this):
            halves = [
                Flow(f"{a}.{k}", f"{b}.{k}", SIZE / 2) for a, b in SENT[this.kind] for k in (0, 1)
            ]
            took_ms[this.kind] = await small.takes_ms(*halves)
        if after is not None:
            controller.reached(after.kind)
    return took_ms


def arm(
    fabric: str, steps: int, made: Bench | None = None
) -> tuple[list[dict[str, float]], Events]:
    """Steps of an arm, and what was told; afterwards all is down."""

    async def body(small: Small) -> tuple[list[dict[str, float]], Events]:
        session = session_on(small)
        async with running(session, fabric) as controller:
            took = [await step(small, controller) for _ in range(steps)]
        assert not session.lit
        assert made or not any(len(unit.map) for unit in small.units.values())
        record: Any = session.record
        return took, record

    return play(body, made)


def test_circuits_follow_the_work_and_bytes_that_are_counted_are_those_that_were_announced() -> (
    None
):
    took, events = arm("rfabric", 4)
    assert took[0]["train"] <= 200.1  # the circuit was up before
    assert all(each <= 200.1 for one in took for each in one.values())
    rows = events.of("fabric_change")
    assert [row["kind"] for row in rows][:3] == ["train", "sync", "train"]
    assert pairs(rows[0]["lit"]) == {"t0-t1"}
    assert pairs(rows[1]["lit"]) >= {"t0-t2", "t1-t3"}
    assert all(row["outcome"] == "changed" for row in rows)
    carried = events.of("fabric_traffic")
    frames = 2 * SIZE / PAYLOAD_SHARE
    assert all(row["measured_bytes"] == pytest.approx(frames, rel=1e-6) for row in carried)
    assert carried[-1]["circuits_bytes"] == pytest.approx(frames, rel=1e-6)


def test_the_same_over_the_electrical_path_takes_four_times_as_long() -> None:
    took, events = arm("electrical", 2)
    assert [each for one in took for each in one.values()] == pytest.approx([800.0] * 4)
    assert not events.of("fabric_change")


def test_two_runs_tell_the_same() -> None:
    made = bench(emulate={"agg0": broken(switch_sd_ms=3.0)})
    assert arm("rfabric", 3, made)[1] == arm("rfabric", 3, made)[1]


@pytest.mark.parametrize(
    "faults",
    [
        {"die_on_command": 1},
        {"reboot_on_command": 3, "reboot_ms": 300.0},
        {"stuck_ports": (1,)},
        {"deny_ports": (10,)},
        {"swapped_ports": ((10, 12),)},
        {"lose_reply": 2},
    ],
)
def test_whatever_a_unit_does_traffic_gets_there(faults: dict[str, Any]) -> None:
    took, events = arm("rfabric", 6, bench(planes=1, emulate={"agg0": broken(**faults)}))
    assert all(each < 3000 for one in took for each in one.values())
    assert (
        any(row["outcome"] != "changed" for row in events.of("fabric_change"))
        or "lose_reply" in faults
    )
