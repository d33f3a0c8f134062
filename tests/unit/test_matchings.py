"""Matchings: regular patterns, the best for a demand, and circuits by longest finish."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness.errors import UsageError
from harness.fabric import matchings
from harness.fabric.greedy import greedy
from harness.fabric.matchings import (
    Floats,
    Ints,
    Pairs,
    Planes,
    Rates,
    best_duplex,
    best_simplex,
    count,
    finish_s,
)
from tests.unit.fabric_milp import KINDS, optimum_s, random_case, random_demand

RATES = Rates(1e9, 0.5e9)
sizes = st.integers(0, 12)


def demands(nodes_max: int) -> st.SearchStrategy[Floats]:
    """Whole bytes, so that equal sums are equal, and there are ties and zeros."""
    whole = st.integers(0, 20).map(float)
    return st.integers(1, nodes_max).flatmap(lambda n: arrays(np.float64, (n, n), elements=whole))


def is_matching(pairs: Pairs, *, duplex: bool) -> bool:
    ends = [(node, 0 if duplex else side) for pair in pairs for side, node in enumerate(pair)]
    return len(ends) == len(set(ends)) and all(a != b for a, b in pairs)


def edges(planes: Planes) -> Counter[tuple[int, int]]:
    return Counter(pair for pairs in planes for pair in pairs)


def within(planes: Planes, ports: Ints, *, duplex: bool) -> bool:
    n = len(ports)
    used = [count([pairs], n, duplex=duplex) for pairs in planes]
    return all(
        (each.sum(axis) <= ports[:, p]).all() for p, each in enumerate(used) for axis in (0, 1)
    )


# -- regular patterns ------------------------------------------------------------------------------


@given(n=sizes)
def test_all_to_all_takes_as_many_rounds_as_there_must_be(n: int) -> None:
    rounds = matchings.round_robin(n)
    assert len(rounds) == (n - 1 + n % 2 if n > 1 else 0)
    assert all(is_matching(pairs, duplex=True) for pairs in rounds)
    assert edges(rounds) == Counter((i, j) for i in range(n) for j in range(i + 1, n))


@given(n=sizes)
def test_a_ring_takes_two_planes_and_three_if_it_is_odd(n: int) -> None:
    planes = matchings.ring(n)
    assert len(planes) == (min(n, 2) - 1 if n in (1, 2) else 0 if n < 1 else 2 + n % 2)
    assert all(is_matching(pairs, duplex=True) for pairs in planes)
    wanted = {(min(k, (k + 1) % n), max(k, (k + 1) % n)) for k in range(n)} if n > 1 else set()
    assert edges(planes) == Counter(wanted)


@given(n=sizes)
def test_chain_and_tree_reach_everybody_once(n: int) -> None:
    for planes, most in ((matchings.chain(n), 2), (matchings.tree(n), 3)):
        assert len(planes) <= most
        assert all(is_matching(pairs, duplex=True) for pairs in planes)
        assert sorted(child for _, child in edges(planes).elements()) == list(range(1, n))
        assert all(parent < child for parent, child in edges(planes))


@given(dims=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_torus_is_a_ring_along_each_dimension(dims: list[int]) -> None:
    planes = matchings.torus(dims)
    n = int(np.prod(dims))
    assert all(is_matching(pairs, duplex=True) for pairs in planes)
    degree = sum(0 if size < 2 else 1 if size == 2 else 2 for size in dims)
    assert count(planes, n, duplex=True).sum(1).tolist() == [degree] * n


@given(left=st.integers(0, 5), right=st.integers(0, 5), planes=st.integers(0, 6))
def test_two_sides_meet_by_rotation(left: int, right: int, planes: int) -> None:
    found = matchings.bipartite(range(left), range(10, 10 + right), planes)
    assert len(found) == planes
    assert all(is_matching(pairs, duplex=True) for pairs in found)
    assert all(a < left and b >= 10 for a, b in edges(found))
    if left and right and planes == max(left, right):
        assert edges(found) == Counter((a, 10 + b) for a in range(left) for b in range(right))


@given(groups=st.lists(st.integers(0, 5), max_size=4), planes=st.integers(0, 6))
def test_groups_are_meshes_apart(groups: list[int], planes: int) -> None:
    ends = np.cumsum([0, *groups])
    named = [tuple(range(a, b)) for a, b in pairwise(ends)]
    found = matchings.isolated(named, planes)
    assert len(found) == planes
    assert all(is_matching(pairs, duplex=True) for pairs in found)
    of = {node: k for k, group in enumerate(named) for node in group}
    assert all(of[a] == of[b] for a, b in edges(found))
    if planes >= max([len(group) - 1 + len(group) % 2 for group in named if len(group) > 1] or [0]):
        inside = {(a, b) for group in named for a in group for b in group if a < b}
        assert set(edges(found)) == inside


def test_a_mesh_repeats_its_rounds_where_there_are_more_planes() -> None:
    assert edges(matchings.mesh(4, 6)) == Counter(
        {(i, j): 2 for i in range(4) for j in range(i + 1, 4)}
    )
    assert matchings.mesh(1, 2) == ((), ())


# -- the best for a demand -------------------------------------------------------------------------


def worth(demand: Floats, pairs: Pairs, *, duplex: bool) -> float:
    return sum(demand[i, j] + duplex * demand[j, i] for i, j in pairs)


def best_of_all(weight: Floats, left: frozenset[int]) -> float:
    """Brute force: the first node rests, or is joined with any other."""
    if len(left) < 2:
        return 0.0
    i = min(left)
    rest = left - {i}
    joined = (weight[i, j] + best_of_all(weight, rest - {j}) for j in rest)
    return max(best_of_all(weight, rest), *joined)


@given(demand=demands(8))
def test_edmonds_finds_the_best_there_is(demand: Floats) -> None:
    np.fill_diagonal(demand, 0.0)
    pairs = best_duplex(demand)
    assert is_matching(pairs, duplex=True)
    best = best_of_all(demand + demand.T, frozenset(range(len(demand))))
    assert worth(demand, pairs, duplex=True) == best
    assert all(demand[i, j] + demand[j, i] > 0 for i, j in pairs)


@given(demand=demands(6))
def test_hungarian_finds_the_best_there_is(demand: Floats) -> None:
    np.fill_diagonal(demand, 0.0)
    pairs = best_simplex(demand)
    assert is_matching(pairs, duplex=False)
    n = len(demand)
    best = max(demand[range(n), to].sum() for to in map(list, permutations(range(n))))
    assert worth(demand, pairs, duplex=False) == best
    assert all(demand[pair] > 0 for pair in pairs)


@pytest.mark.parametrize("duplex", [True, False])
def test_only_allowed_pairs_are_joined(duplex: bool) -> None:
    demand = np.array([[0.0, 9, 1], [0, 0, 2], [0, 0, 0]])
    allowed = np.ones((3, 3), bool)
    allowed[0, 1] = allowed[1, 0] = False
    best = best_duplex if duplex else best_simplex
    assert (0, 1) in best(demand)
    assert (0, 1) not in best(demand, allowed)
    lit = greedy(demand, np.ones((3, 2), int), RATES, duplex=duplex, allowed=allowed)
    assert edges(lit)
    assert (0, 1) not in edges(lit)


# -- how long it takes -----------------------------------------------------------------------------


def test_what_a_demand_takes() -> None:
    demand = np.array([[0.0, 4e9, 1e9], [2e9, 0, 0], [0, 0, 0]])
    nothing = np.zeros((3, 3), int)
    assert finish_s(demand, nothing, RATES) == 10.0  # node 0 sends 5 GB at 0.5 GB/s
    assert finish_s(demand, count([((0, 1),)], 3, duplex=True), RATES) == 4.0
    assert finish_s(demand, count([((0, 1),)] * 2, 3, duplex=True), RATES) == 2.0
    assert finish_s(demand, count([((0, 1),)] * 2, 3, duplex=False), RATES) == 4.0  # 1 to 0
    assert finish_s(np.zeros((3, 3)), nothing, RATES) == 0.0


@pytest.mark.parametrize(
    ("demand", "told"),
    [
        (np.zeros((2, 3)), "square"),
        (np.array([[0, -1.0], [0, 0]]), "from 0 on"),
        (np.array([[0, np.nan], [0, 0]]), "finite"),
    ],
)
def test_what_is_no_demand_is_refused(demand: Floats, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        greedy(demand, np.ones((2, 1), int), RATES)


def test_rates_of_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="above 0"):
        Rates(0.0, 1.0)


# -- longest finish --------------------------------------------------------------------------------


@given(
    demand=demands(7),
    planes=st.integers(0, 4),
    duplex=st.booleans(),
    electrical=st.sampled_from([0.25, 1.0, 4.0]),
    data=st.data(),
)
def test_ports_are_never_used_twice_and_nothing_gets_slower(
    demand: Floats, planes: int, duplex: bool, electrical: float, data: st.DataObject
) -> None:
    np.fill_diagonal(demand, 0.0)
    n = len(demand)
    ports = data.draw(arrays(np.int64, (n, planes), elements=st.integers(0, 2)))
    rates = Rates(1.0, electrical)
    lit = greedy(demand, ports, rates, duplex=duplex)
    assert len(lit) == planes
    assert within(lit, ports, duplex=duplex)
    circuits = count(lit, n, duplex=duplex)
    assert not circuits.diagonal().any()
    assert (circuits[demand + duplex * demand.T == 0] == 0).all()
    alone_s = finish_s(demand, np.zeros((n, n), int), rates)
    assert finish_s(demand, circuits, rates) <= alone_s * (1 + 1e-9)


def test_zero_demand_lights_nothing() -> None:
    assert greedy(np.zeros((4, 4)), np.ones((4, 2), int), RATES) == ((), ())
    assert greedy(np.zeros((0, 0)), np.ones((0, 1), int), RATES) == ((),)


def test_an_odd_ring_lights_all_but_one_edge_on_two_planes() -> None:
    """Five nodes in a ring: no two matchings hold five edges; the fifth goes electrically."""
    demand = np.zeros((5, 5))
    for k in range(5):
        demand[k, (k + 1) % 5] = demand[(k + 1) % 5, k] = 1e9
    two, three = (greedy(demand, np.ones((5, p), int), RATES) for p in (2, 3))
    assert edges(two).total() == 4
    assert finish_s(demand, count(two, 5, duplex=True), RATES) == 2.0
    assert set(edges(three)) == set(edges(matchings.ring(5)))
    assert finish_s(demand, count(three, 5, duplex=True), RATES) == 1.0


def test_circuits_slower_than_the_electrical_path_are_not_used() -> None:
    demand = np.array([[0.0, 1e9], [0, 0]])
    assert greedy(demand, np.ones((2, 1), int), Rates(1e9, 2e9)) == ((),)
    assert greedy(demand, np.ones((2, 3), int), Rates(1e9, 2e9)) == (((0, 1),),) * 3


@given(seed=st.integers(0, 10_000), n=st.integers(3, 10), planes=st.integers(1, 5))
def test_new_names_give_the_same_plan_under_new_names(seed: int, n: int, planes: int) -> None:
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % 4]
    demand, duplex = random_demand(rng, n, kind), bool(seed % 2)
    busy = demand.any(0) | demand.any(1)
    named = rng.permutation(n)
    renamed = np.empty_like(demand)
    renamed[np.ix_(named, named)] = demand
    ports = np.ones((n, planes), int)
    plans = []
    for each, names in ((demand, named), (renamed, np.arange(n))):
        lit = greedy(each, ports, RATES, duplex=duplex)
        pairs = [[(int(names[a]), int(names[b])) for a, b in plane] for plane in lit]
        plans.append([sorted((min(p), max(p)) if duplex else p for p in some) for some in pairs])
    assert busy.sum() < n or plans[0] == plans[1]
    for best in (best_simplex, best_duplex):
        pairs = {tuple(sorted((named[a], named[b]))) for a, b in best(demand)}
        assert pairs == {tuple(sorted(pair)) for pair in best(renamed)}


@pytest.mark.parametrize("n", [4, 5, 6])
def test_new_names_take_as_long_where_there_are_ties(n: int) -> None:
    rng = np.random.default_rng(n)
    for shape in (count(matchings.ring(n), n, duplex=True), 1 - np.eye(n)):
        times = set()
        for _ in range(4):
            named = rng.permutation(n)
            demand = shape[np.ix_(named, named)] * 1e9
            lit = greedy(demand, np.ones((n, 2), int), RATES)
            circuits = count(lit, n, duplex=True)
            times.add((finish_s(demand, circuits, RATES), int((circuits > 0).sum())))
        assert len(times) == 1


def test_longest_finish_comes_within_a_tenth_of_the_exact_optimum() -> None:
    over = []
    for case in map(random_case, range(200)):
        lit = greedy(case.demand, case.ports, case.rates, duplex=case.duplex)
        circuits = count(lit, len(case.demand), duplex=case.duplex)
        taken_s, best_s = finish_s(case.demand, circuits, case.rates), optimum_s(case)
        over.append(taken_s / best_s - 1 if best_s else taken_s)
    assert min(over) > -1e-6, "better than the optimum: the oracle is wrong"
    assert max(over) < 0.1
