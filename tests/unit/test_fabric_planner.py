"""Demand becomes links: budgets, what stays, what is broken, what is told, how near the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.fabric.laying import is_one_way
from harness.fabric.links import Link
from harness.fabric.planner import lay, plan_demand
from harness.fabric.prediction import BYTES_PER_NS_OF_A_MBIT, capacity
from harness.fabric.topology import Rates, Topology, topology_of
from harness.model.generated import REFERENCE, Numbers, bench_of
from tests.unit.two_tier_milp import optimum, random_demand, random_fabric

SEEDS = st.integers(0, 10**6)
PATTERNS = ("mesh", "isolated", "tree", "chain", "ring", "static")


def one_tier(tors: int, planes: int, *, duplex: bool = True, uplinks: int = 0) -> Topology:
    return topology_of(
        bench_of(
            Numbers(
                roles=("train",), tors_per_pod=tors, nodes_per_tor=2, duplex=duplex,
                uplinks_per_tor=uplinks or planes, aggregation_planes=planes,
            )
        )
    )  # fmt: skip


def two_tier(tors: int = 2, planes: int = 2, trunks: int = 4) -> Topology:
    return topology_of(
        bench_of(
            Numbers(
                roles=("train", "generate"), tors_per_pod=tors, nodes_per_tor=2,
                uplinks_per_tor=planes, aggregation_planes=planes, core_planes=2,
                trunks_per_pod=trunks,
            )
        )
    )  # fmt: skip


def ring(n: int) -> np.ndarray:
    return np.roll(np.eye(n), 1, 1) * 1e9


def pairs(topology: Topology, links: Iterable[Link]) -> Counter[tuple[str, str]]:
    """Circuits by pair: sorted names where duplex, sender first where one-way."""
    one_way = is_one_way(topology)
    ends = [(link.a.tor, link.b.tor) for link in links]
    return Counter(pair if one_way else tuple(sorted(pair)) for pair in ends)


def asked(topology: Topology, demand: np.ndarray) -> set[tuple[str, str]]:
    names, one_way = list(topology.tors), is_one_way(topology)
    told = [(names[i], names[j]) for i, j in np.argwhere(demand > 0)]
    return {pair if one_way else tuple(sorted(pair)) for pair in told}


def assert_within_budget(topology: Topology, links: frozenset[Link]) -> None:
    sides = [
        part
        for link in links
        for part in (
            [(link.a, "out"), (link.b, "in")]
            + ([(link.b, "out"), (link.a, "in")] if link.both else [])
        )
    ]
    assert len(sides) == len(set(sides))
    for switch in topology.switches:
        circuits = topology.matching(links, switch)
        assert {port for circuit in circuits for port in circuit} <= topology.ours[switch]
    assert all(up in topology.uplinks for link in links for up in (link.a, link.b))
    assert all(trunk in topology.trunks for link in links for trunk in link.trunks)
    assert all(link.a.tor != link.b.tor and link.both != is_one_way(topology) for link in links)


def breakable(topology: Topology, rng: np.random.Generator) -> frozenset[str]:
    names = [*map(str, topology.uplinks), *map(str, topology.trunks), *topology.switches]
    return frozenset(name for name in names if rng.random() < 0.2)


# -- what always holds -----------------------------------------------------------------------------


@settings(deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_circuits_for_a_demand_keep_to_ports_that_are_whole_and_the_rest_is_told(
    seed: int, tiers: bool, again: bool
) -> None:
    rng = np.random.default_rng(seed)
    topology = random_fabric(rng, two_tier=tiers)
    demand = random_demand(rng, len(topology.tors))
    broken = breakable(topology, rng)
    lit = frozenset[Link]()
    if again:
        lit = plan_demand(topology, random_demand(rng, len(topology.tors))).links
    plan = plan_demand(topology, demand, lit=lit, broken=broken)
    assert_within_budget(topology, plan.links)
    for link in plan.links:
        used = {str(link.a), str(link.b), *link.switches, *map(str, link.trunks)}
        assert not used & broken
    served = set(pairs(topology, plan.links))
    assert served <= asked(topology, demand)
    told = [pair if is_one_way(topology) else tuple(sorted(pair)) for pair in plan.unserved]
    assert sorted(told) == sorted(asked(topology, demand) - served)


@settings(deadline=None)
@given(SEEDS, st.booleans())
def test_what_is_wanted_is_laid_or_told_and_what_is_lit_and_wanted_stays(
    seed: int, tiers: bool
) -> None:
    rng = np.random.default_rng(seed)
    topology = random_fabric(rng, two_tier=tiers)
    names = list(topology.tors)
    lit = plan_demand(topology, random_demand(rng, len(names))).links
    several = int(rng.integers(0, 12))
    wanted = [tuple(map(str, rng.choice(names, 2, replace=False))) for _ in range(several)]
    plan = lay(topology, wanted, lit=lit)
    assert_within_budget(topology, plan.links)
    counted = Counter(p if is_one_way(topology) else tuple(sorted(p)) for p in wanted)
    told = Counter(p if is_one_way(topology) else tuple(sorted(p)) for p in plan.unserved)
    assert pairs(topology, plan.links) + told == counted
    assert pairs(topology, plan.links & lit) == pairs(topology, lit) & counted


@settings(deadline=None, max_examples=50)
@given(SEEDS, st.booleans(), st.sampled_from(PATTERNS))
def test_patterns_keep_to_their_ports_and_to_tors_that_send_or_get(
    seed: int, tiers: bool, method: str
) -> None:
    rng = np.random.default_rng(seed)
    topology = random_fabric(rng, two_tier=tiers)
    demand = random_demand(rng, len(topology.tors))
    demand[0], demand[:, 0] = 0, 0
    plan = plan_demand(topology, demand, method=method)  # type: ignore[arg-type]
    assert_within_budget(topology, plan.links)
    assert not {(link.a.tor, link.b.tor) for link in plan.links} & set(plan.unserved)
    if method != "static":
        assert "t0" not in {up.tor for link in plan.links for up in (link.a, link.b)}


@settings(deadline=None, max_examples=50)
@given(SEEDS, st.booleans())
def test_the_same_demand_again_moves_nothing(seed: int, tiers: bool) -> None:
    rng = np.random.default_rng(seed)
    topology = random_fabric(rng, two_tier=tiers)
    demand = random_demand(rng, len(topology.tors))
    before = plan_demand(topology, demand)
    assert plan_demand(topology, demand, lit=before.links) == before


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_new_names_give_the_same_plan_under_new_names(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = one_tier(6, 3)
    demand = rng.lognormal(20, 1, (6, 6))
    order = rng.permutation(6)
    before = pairs(topology, plan_demand(topology, demand).links)
    after = pairs(topology, plan_demand(topology, demand[np.ix_(order, order)]).links)
    renamed = {f"tor{old}": f"tor{new}" for new, old in enumerate(order)}
    assert after == Counter(
        {tuple(sorted((renamed[a], renamed[b]))): n for (a, b), n in before.items()}
    )


# -- how good it is --------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [False, True], ids=["one tier", "two tiers"])
def test_within_ten_percent_of_the_exact_optimum(tiers: bool) -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        topology = random_fabric(rng, two_tier=tiers)
        demand = random_demand(rng, len(topology.tors))
        links = plan_demand(topology, demand).links
        finish = float(capacity(topology, links).finish_ns(demand))
        finish *= topology.rates.link_mbit_per_s * BYTES_PER_NS_OF_A_MBIT
        best = optimum(topology, demand)
        assert best * (1 - 1e-5) <= finish <= best * 1.1, seed


def test_nothing_to_send_needs_no_circuit() -> None:
    assert plan_demand(two_tier(), np.zeros((4, 4))).links == frozenset()


def test_who_sends_to_one_other_only_gets_all_uplinks_to_it() -> None:
    topology = one_tier(4, 4, uplinks=8)
    demand = np.zeros((4, 4))
    demand[0, 1] = demand[3, 2] = 1e9
    assert pairs(topology, plan_demand(topology, demand).links) == {
        ("tor0", "tor1"): 8,
        ("tor2", "tor3"): 8,
    }


def test_many_circuits_at_once_where_one_would_be_slower_than_the_electrical_path() -> None:
    reference = topology_of(bench_of(REFERENCE))
    demand = np.zeros((16, 16))
    demand[np.arange(8), np.arange(8) + 8] = 1e12
    plan = plan_demand(reference, demand)
    assert set(pairs(reference, plan.links).values()) == {32}
    assert not plan.unserved


def test_no_circuit_where_the_electrical_path_is_faster() -> None:
    topology = replace(one_tier(2, 1), rates=Rates(1000.0, 1.0))  # two hosts, one uplink
    assert plan_demand(topology, np.array([[0, 1e9], [0, 0]])).unserved == (("tor0", "tor1"),)


def test_an_odd_ring_on_two_planes_leaves_one_pair_electrical_and_on_three_none() -> None:
    assert len(plan_demand(one_tier(5, 3), ring(5), method="ring").unserved) == 0
    two = plan_demand(one_tier(5, 2), ring(5), method="ring")
    assert len(two.links) == 4
    assert len(two.unserved) == 1


def test_a_ring_of_simplex_planes_takes_one_uplink_of_each_tor() -> None:
    topology = one_tier(5, 1, duplex=False)
    plan = plan_demand(topology, ring(5))
    assert len(plan.links) == 5
    assert not plan.unserved
    assert not any(link.both for link in plan.links)
    with pytest.raises(UsageError, match="edmonds"):
        plan_demand(topology, ring(5), method="edmonds")
    assert plan_demand(topology, ring(5), method="hungarian").links == plan.links


@pytest.mark.parametrize("method", [*PATTERNS, "bipartite"])
def test_patterns_of_simplex_planes_lead_both_ways(method: Any) -> None:
    """Whoever sends to whom: the second of two ToRs to the first."""
    plan = plan_demand(one_tier(2, 1, duplex=False), ring(2) * [[0, 0], [1, 0]], method=method)
    assert {(link.a.tor, link.b.tor) for link in plan.links} == {("tor0", "tor1"), ("tor1", "tor0")}


def test_matchings_that_carry_most_serve_the_largest_pairs() -> None:
    demand = np.array([[0, 9, 1, 1], [9, 0, 1, 1], [1, 1, 0, 9], [1, 1, 9, 0]]) * 1e9
    topology = one_tier(4, 1)
    plan = plan_demand(topology, demand, method="edmonds")
    assert set(pairs(topology, plan.links)) == {("tor0", "tor1"), ("tor2", "tor3")}
    assert len(plan.unserved) == 4
    with pytest.raises(UsageError, match="hungarian"):
        plan_demand(topology, demand, method="hungarian")


def test_the_two_sides_of_a_demand_are_found_or_told_not_to_be_there() -> None:
    demand = np.zeros((4, 4))
    demand[0, 1] = demand[2, 3] = demand[2, 1] = 1e9
    plan = plan_demand(one_tier(4, 2), demand, method="bipartite")
    assert set(pairs(one_tier(4, 2), plan.links)) == {
        ("tor0", "tor1"), ("tor2", "tor3"), ("tor0", "tor3"), ("tor1", "tor2"),
    }  # fmt: skip
    demand[0, 2] = 1e9
    with pytest.raises(UsageError, match="no two sides"):
        plan_demand(one_tier(4, 2), demand, method="bipartite")


def test_a_chain_starts_where_most_is_sent_from() -> None:
    demand = np.zeros((4, 4))
    demand[2] = [1e9, 1e9, 0, 1e9]
    topology = one_tier(4, 2)
    plan = plan_demand(topology, demand, method="chain")
    assert set(pairs(topology, plan.links)) >= {("tor0", "tor2"), ("tor0", "tor1")}


# -- two tiers -------------------------------------------------------------------------------------


def test_pods_are_joined_over_two_trunks_and_tors_of_one_pod_over_none() -> None:
    topology = two_tier()
    [over] = lay(topology, [("tor0", "tor3")]).links
    assert [trunk.aggregation for trunk in over.trunks] == [over.a.switch, over.b.switch]
    assert over.trunks[0].core == over.trunks[1].core
    [within] = lay(topology, [("tor0", "tor1")]).links
    assert within.trunks == ()


def test_without_free_trunks_pods_stay_apart() -> None:
    topology = two_tier(trunks=2)
    plan = lay(topology, [("tor0", "tor2"), ("tor1", "tor3"), ("tor0", "tor3")])
    assert len(plan.links) == 2
    assert plan.unserved == (("tor0", "tor3"),)


def test_circuits_in_the_way_swap_planes_unless_they_are_to_stay() -> None:
    topology = one_tier(4, 2)
    first = lay(topology, [("tor0", "tor1"), ("tor2", "tor3"), ("tor1", "tor2")])
    assert not first.unserved
    path = [("tor0", "tor1"), ("tor2", "tor3"), ("tor0", "tor2"), ("tor1", "tor3")]
    assert not lay(topology, path).unserved
    lit = lay(topology, [("tor0", "tor1")]).links  # on the first plane, and it stays there
    both = lay(topology, [("tor2", "tor3"), ("tor0", "tor1")], lit=lit)
    assert lit <= both.links


@pytest.mark.parametrize("broken", ["tor0:u1", "agg0", "agg0:3", "core0", "core0:1"])
def test_what_is_left_is_planned_anew_without_what_broke(broken: str) -> None:
    topology = two_tier()
    demand = np.zeros((4, 4))
    demand[0, 2] = demand[1, 3] = 1e9
    before = plan_demand(topology, demand)
    after = plan_demand(topology, demand, lit=before.links, broken=frozenset({broken}))
    assert not after.unserved
    assert 2 <= len(after.links) < len(before.links)
    assert before.links & after.links


# -- what is refused -------------------------------------------------------------------------------


def test_names_and_sizes_that_do_not_fit_are_refused() -> None:
    topology = two_tier()
    with pytest.raises(UsageError, match="'agg9'"):
        lay(topology, [], broken=frozenset({"agg9"}))
    with pytest.raises(UsageError, match="'tor9'"):
        lay(topology, [("tor0", "tor9")])
    with pytest.raises(UsageError, match="3 ToRs, this bench has 4"):
        plan_demand(topology, np.zeros((3, 3)))


def test_lit_links_of_another_bench_count_for_nothing() -> None:
    lit = plan_demand(one_tier(6, 3), ring(6)).links
    assert_within_budget(two_tier(), plan_demand(two_tier(), ring(4), lit=lit).links)
