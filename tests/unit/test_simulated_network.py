"""The simulated network: light, routes and rates decide when bytes arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from simulated_fabric import (
    MB_PER_S,
    NETWORK,
    PORTS,
    SWITCH_MS,
    Small,
    bench,
    broken,
    figure,
    flows,
    play,
)

from harness.bench.simulated.world import Flow
from harness.errors import UsageError
from harness.fabric.links import Link
from harness.model.bench import Links, Node
from harness.tasks import beside

NEAR_MS = 1e-5
"""Times are whole ns."""


def ms(size_mb: float, mb_per_s: float = MB_PER_S) -> Any:
    return pytest.approx(size_mb / mb_per_s * 1e3, abs=NEAR_MS)


# -- rates -----------------------------------------------------------------------------------------


def test_nics_and_the_electrical_path_of_a_tor_bind_at_their_share_of_its_rate() -> None:
    async def body(small: Small) -> None:
        assert await small.takes_ms(*flows(10, "t0.0>t0.1")) == ms(10)
        # two hosts of 1000 Mbit/s, 4:1, a share of 0.4: 25 MB/s for the ToR
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10, 25.0)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0", "t0.1>t2.0")) == ms(20, 25.0)
        # both send to one ToR: its way in binds
        assert await small.takes_ms(*flows(10, "t0.0>t2.0", "t1.0>t2.1")) == ms(20, 25.0)

    play(body)


def test_an_electrical_path_of_another_rate_changes_flows_that_are_under_way() -> None:
    async def body(small: Small) -> None:
        async with beside(small.takes_ms(*flows(10, "t0.0>t1.0"))) as sending:
            await small.sleep_ms(100)
            await small.electrical(1.0)  # 100 MB/s
            assert await sending == pytest.approx(100 + 75, abs=NEAR_MS)
        await small.electrical(None)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10, 25.0)
        with pytest.raises(UsageError, match="more than 0"):
            await small.electrical(0.0)

    play(body)


def test_a_link_that_was_idle_lets_a_burst_pass_at_once() -> None:
    async def body(small: Small) -> None:
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(9, 25.0)  # 1 MB is in a bucket
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10, 25.0)  # which is empty now
        await small.sleep_ms(20)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(9.5, 25.0)  # or half full
        await small.sleep_ms(100)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0", "t0.1>t1.1")) == ms(19, 25.0)
        await small.sleep_ms(100)
        assert await small.takes_ms(*flows(0.5, "t0.0>t1.0")) < NEAR_MS
        async with beside(small.takes_ms(*flows(10, "t2.0>t1.0"))) as sending:
            await small.sleep_ms(100)
            # busy on its way in, which two share
            assert await small.takes_ms(*flows(1, "t3.0>t1.1")) == ms(2, 25.0)
            await sending

    play(body, network=structs.replace(NETWORK, burst_kb=figure(1000.0)))


def test_what_stays_in_a_node_or_is_nothing_takes_no_time_and_a_first_byte_takes_its_latency() -> (
    None
):
    async def body(small: Small) -> None:
        assert await small.takes_ms(*flows(10, "t0.0>t0.0")) == 0
        assert await small.takes_ms(*flows(0, "t0.0>t1.0")) == 0
        assert await small.takes_ms() == 0
        assert await small.takes_ms(*flows(10, "t0.0>t0.1")) == pytest.approx(100.5, abs=NEAR_MS)

    play(body, network=structs.replace(NETWORK, latency_us=figure(500.0)))


def test_whoever_is_cancelled_sends_no_more() -> None:
    async def body(small: Small) -> None:
        async with beside(small.takes_ms(*flows(100, "t0.0>t1.0", "t0.0>t2.0"))):
            await small.sleep_ms(40)
        assert small.crossed("t0")[0] == {"e0": 1_000_000}
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10, 25.0)

    play(body)


# -- circuits --------------------------------------------------------------------------------------


def test_a_circuit_carries_what_is_steered_over_it_and_counters_tell() -> None:
    async def body(small: Small) -> None:
        link = small.link("t0", "t1")
        await small.switch(link)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10, 25.0)
        await small.lead_over(link)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0", "t0.1>t2.0")) == ms(10, 25.0)
        assert small.crossed("t0") == ({"e0": 20_000_000, "u1": 20_000_000}, {})
        assert small.crossed("t1") == ({}, {"e0": 10_000_000, "u1": 20_000_000})

    play(body)


def test_a_one_way_link_carries_one_way() -> None:
    async def body(small: Small) -> None:
        link = small.link("t0", "t1", both=False)
        await small.switch(link)
        await small.lead_over(link)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0")) == ms(10)
        assert await small.takes_ms(*flows(10, "t1.0>t0.0")) == ms(10, 25.0)

    play(body)


def test_what_is_sent_into_the_dark_is_late_by_exactly_the_dark_time() -> None:
    async def body(small: Small) -> None:
        here, there = small.link("t0", "t1"), small.link("t2", "t3")
        await small.switch(here, there)
        await small.lead_over(here, there)
        sent = flows(10, "t0.0>t1.0", "t2.0>t3.0")
        async with beside(small.takes_ms(sent[0])) as hit, beside(small.takes_ms(sent[1])) as kept:
            await small.sleep_ms(20)
            await small.switch(there)
            await small.switch(here, there)
            assert await kept == ms(10)
            dark_ms, lit_ms = (at_ms for at_ms, up, _ in small.turns[4:] if up == "t0:u1")
            assert lit_ms - dark_ms > SWITCH_MS
            assert await hit == pytest.approx(100 + lit_ms - dark_ms, abs=NEAR_MS)
        assert small.crossed("t0")[0] == {"u1": 10_000_000}

    play(body)


def test_who_sends_into_the_dark_stands_still_from_when_light_went_until_it_is_back() -> None:
    async def body(small: Small) -> None:
        here = small.link("t0", "t1")
        await small.switch(here)
        await small.lead_over(here)
        async with beside(small.fabric.stands_still("t0.0", "t1.0", 10**8)) as still:
            await small.sleep_ms(250)  # it could send all the time
            await small.switch()
            await small.switch(here)
            assert not still.done()
            await small.switch()
            dark_ms = small.turns[-1][0]
            await still
            assert small.now_ms() == pytest.approx(dark_ms + 100, abs=NEAR_MS)

    play(body)


def test_who_is_steered_off_a_circuit_before_it_goes_dark_never_waits() -> None:
    async def body(small: Small) -> None:
        here = small.link("t0", "t1")
        await small.switch(here)
        await small.lead_over(here)
        async with beside(small.takes_ms(*flows(10, "t0.0>t1.0"))) as sending:
            await small.sleep_ms(49.9)
            await small.lead_over()
            await small.switch()
            assert await sending == pytest.approx(50 + 5e6 / 25e6 * 1e3, abs=NEAR_MS)
        assert small.crossed("t0")[0] == {"u1": 5_000_000, "e0": 5_000_000}
        assert small.crossed("t1")[1] == {"u1": 5_000_000, "e0": 5_000_000}

    play(body)


def test_light_that_arrives_at_another_tor_carries_nothing() -> None:
    async def body(small: Small) -> None:
        links = small.link("t0", "t1"), small.link("t2", "t3")
        await small.switch(*links)
        await small.lead_over(*links)
        far = small.fabric.light.far
        assert far(small.uplink("t0:u1")) == small.uplink("t3:u1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await small.takes_ms(*flows(1, "t0.0>t1.0"))
        async with beside(small.takes_ms(*flows(1, "t0.0>t1.0"))) as sending:
            await small.sleep_ms(5)
            await small.lead_over()
            assert await sending == pytest.approx(5.1 + 40, abs=NEAR_MS)

    swapped = broken(swapped_ports=((PORTS + 2, PORTS + 4),))  # those of t1 and t3
    play(body, bench(emulate={"agg0": swapped}))


def test_light_is_followed_through_both_tiers_and_goes_out_where_any_unit_lets_it() -> None:
    async def body(small: Small) -> None:
        topology = small.topology
        ends = [small.uplink("t0:u1"), small.uplink("t1:u1")]
        trunks = [next(t for t in topology.trunks if t.aggregation == up.switch) for up in ends]
        link = Link(ends[0], ends[1], tuple(trunks))
        await small.switch(link)
        await small.lead_over(link)
        assert await small.takes_ms(*flows(10, "t0.0>t1.0", "t1.0>t0.0")) == ms(10)
        assert small.crossed("t0") == ({"u1": 10_000_000}, {"u1": 10_000_000})
        for unit in ("agg0", "core", "agg1"):
            small.turns.clear()
            await small.units[unit].apply(topology.matching(frozenset(), unit))
            went = sorted(turn[1:] for turn in small.turns)
            assert went == [("t0:u1", ""), ("t1:u1", "")]
            await small.sleep_ms(10)  # else power meters still show the light that was
            await small.switch(link)
            came = sorted(turn[1:] for turn in small.turns[2:])
            assert came == [("t0:u1", "t1:u1"), ("t1:u1", "t0:u1")]

    play(body, bench(core=True, planes=2))


# -- several ways ----------------------------------------------------------------------------------


def test_parallel_links_are_shared_host_by_host_and_flow_by_flow() -> None:
    async def body(small: Small) -> None:
        links = small.link("t0", "t1"), small.link("t0", "t1", 1)
        await small.switch(*links)
        await small.lead_over(*links)
        # each host of t1 is given one of the two
        assert await small.takes_ms(*flows(10, "t0.0>t1.0", "t0.1>t1.1")) == ms(10)
        assert small.crossed("t0")[0] == {"u1": 10_000_000, "u2": 10_000_000}
        # without the hosts' own routes the flows are dealt out by hash
        wanted = small.topology.routes(frozenset(links))
        shared = {t: frozenset(r for r in rs if len(r.hops) > 1) for t, rs in wanted.items()}
        await small.steer(shared)
        pairs = [f"t0.{i}>t1.{j}" for i in range(2) for j in range(2)]
        before = small.crossed("t0")[0]
        await small.takes_ms(*flows(1, *pairs))
        await small.takes_ms(*flows(1, *pairs))
        grown = [size - before[name] for name, size in small.crossed("t0")[0].items()]
        assert sum(grown) == 8_000_000
        assert all(size % 2_000_000 == 0 for size in grown)  # the same hop both times

    play(body)


def test_a_node_sends_over_all_its_rails_or_over_the_one_that_is_named() -> None:
    railed = structs.replace(
        bench(tors=2), nodes={name: Node(rails=("t0", "t1")) for name in ("a", "b")}
    )

    async def body(small: Small) -> None:
        assert await small.takes_ms(Flow("a", "b", 10e6)) == ms(5)
        assert await small.takes_ms(Flow("a", "b", 10e6, 1)) == ms(10)

    play(body, railed)


def test_an_electrical_path_of_rails_joins_no_two_rails() -> None:
    nodes = {"a": Node(rails=("t0", "t1")), "b": Node(rails=("t2", "t3"))}
    railed = structs.replace(bench(links=Links(electrical="rail")), nodes=nodes)

    async def body(small: Small) -> None:
        assert await small.takes_ms(Flow("a", "b", 10e6, 1)) == ms(10, 12.5)
        assert small.crossed("t1")[0] == {"e0": 10_000_000}

    play(body, railed)


@pytest.mark.parametrize("forwarding", [True, False])
def test_without_an_electrical_path_flows_go_over_others_circuits_or_wait(
    *, forwarding: bool
) -> None:
    async def body(small: Small) -> None:
        links = small.link("t0", "t1"), small.link("t1", "t2", 1)
        await small.switch(*links)
        await small.lead_over(*links)
        if forwarding:
            assert await small.takes_ms(*flows(10, "t0.0>t2.0")) == ms(10)
            assert small.crossed("t1") == ({"u2": 10_000_000}, {"u1": 10_000_000})
        async with beside(small.takes_ms(*flows(10, "t0.0>t3.0"))) as sending:
            await small.sleep_ms(1000)
            assert not sending.done()
            await small.switch(small.link("t0", "t3"))
            await small.lead_over(small.link("t0", "t3"))
            await sending
        with pytest.raises(UsageError, match="no electrical path"):
            await small.electrical(1.0)

    play(body, bench(links=Links(electrical="none", forwarding=forwarding)))


# -- whatever comes --------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_counters_add_up_to_the_bytes_that_were_sent_whatever_is_steered_and_switched(
    data: st.DataObject,
) -> None:
    nodes = [f"t{i}.{k}" for i in range(4) for k in range(2)]
    ends = st.sampled_from(nodes)
    drawn = data.draw(st.lists(st.tuples(ends, ends, st.sampled_from([1e5, 1e6, 7e6]))))
    sent = [Flow(*each) for each in drawn]
    plans = data.draw(
        st.lists(st.sampled_from([("t0", "t1", 0), ("t2", "t3", 0), ("t0", "t2", 1)]), max_size=4)
    )

    async def body(small: Small) -> None:
        async with beside(small.fabric.carry(sent)) as sending:
            for plan in plans:
                await small.lead_over()
                await small.switch(small.link(*plan))
                await small.lead_over(small.link(*plan))
                await small.sleep_ms(10)
            await sending
        across = sum(flow.bytes for flow in sent if flow.source[:2] != flow.target[:2])
        tolls = [small.crossed(tor) for tor in small.topology.tors]
        assert sum(sum(out.values()) for out, _ in tolls) == pytest.approx(across, abs=20)
        assert sum(sum(into.values()) for _, into in tolls) == pytest.approx(across, abs=20)
        for tor in small.topology.tors:
            own = sum(f.bytes for f in sent if f.source[:2] == tor != f.target[:2])
            assert sum(small.crossed(tor)[0].values()) == pytest.approx(own, abs=20)

    play(body)
