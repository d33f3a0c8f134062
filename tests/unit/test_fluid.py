"""Max-min fair rates, the classes that flows fall into, and when flows end that begin at once."""

from __future__ import annotations

import importlib.util
import sys
from fractions import Fraction
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rlsim import kernels
from harness.rlsim.classes import classes
from harness.rlsim.fluid import fair_rates, finish_ns
from harness.rlsim.island import started
from harness.rlsim.paths import Paths
from tests.unit.fluid_cases import GB, Case, cases, copies, shifts
from tests.unit.fluid_exact import Exact, fair


def test_flows_share_a_link_and_take_what_others_leave() -> None:
    # the first is held to 2 by link 0, so the second has the other 8 of link 1
    assert fair_rates([[0, 1], [1]], [2 * GB, 10 * GB]).tolist() == [2 * GB, 8 * GB]


def test_the_long_flow_of_a_chain_gets_as_much_as_the_short_ones() -> None:
    assert fair_rates([[0, 1, 2], [0], [1], [2]], [6 * GB] * 3).tolist() == [3 * GB] * 4


def test_without_a_link_there_is_no_limit_and_without_capacity_nothing() -> None:
    assert fair_rates([[], [0], [1]], [0, GB]).tolist() == [np.inf, 0, GB]
    assert finish_ns([[], [0], [1]], [7, 7, 7], [0, GB]).tolist() == [0, np.inf, 7]


@given(cases())
def test_rates_are_those_of_exact_arithmetic(case: Case) -> None:
    exact = fair(dict(enumerate(case.paths)), [Fraction(value) for value in case.capacity])
    rates = fair_rates(case.paths, case.bytes_per_s)
    assert rates == pytest.approx([float(exact[i]) * GB for i in range(len(rates))], rel=1e-12)


@given(cases(flows_max=40))
def test_no_link_carries_too_much_and_every_flow_has_a_bottleneck(case: Case) -> None:
    rates = fair_rates(case.paths, case.bytes_per_s)
    on = np.zeros((len(case.capacity), len(rates)))
    for flow, path in enumerate(case.paths):
        np.add.at(on[:, flow], path, 1)
    load, capacity = on @ rates, np.array(case.bytes_per_s)
    assert (load <= capacity * (1 + 1e-12)).all()
    for flow, path in enumerate(case.paths):
        assert any(
            load[link] >= capacity[link] * (1 - 1e-12)
            and rates[flow] >= rates[on[link] > 0].max() * (1 - 1e-12)
            for link in path
        )


@given(cases(), st.data())
def test_names_of_links_and_flows_do_not_matter(case: Case, data: st.DataObject) -> None:
    links = data.draw(st.permutations(range(len(case.capacity))))
    flows = data.draw(st.permutations(range(len(case.paths))))
    capacity = [0] * len(links)
    for link, place in enumerate(links):
        capacity[place] = case.capacity[link] * GB
    renamed = [[links[link] for link in case.paths[flow]] for flow in flows]
    rates = fair_rates(case.paths, case.bytes_per_s)
    assert fair_rates(renamed, capacity) == pytest.approx(rates[list(flows)], rel=1e-12)
    ends = finish_ns(case.paths, case.sizes, case.bytes_per_s)
    sizes = [case.sizes[flow] for flow in flows]
    assert finish_ns(renamed, sizes, capacity) == pytest.approx(ends[list(flows)], rel=1e-12)


@given(cases(), st.data())
def test_who_has_least_has_no_less_when_a_link_is_widened(case: Case, data: st.DataObject) -> None:
    before = fair_rates(case.paths, case.bytes_per_s).min()
    link = data.draw(st.integers(0, len(case.capacity) - 1))
    case.capacity[link] += data.draw(st.integers(1, 9))
    assert fair_rates(case.paths, case.bytes_per_s).min() >= before * (1 - 1e-12)


@given(cases(), st.data())
def test_a_count_stands_for_as_many_flows(case: Case, data: st.DataObject) -> None:
    many = len(case.paths)
    counts = data.draw(st.lists(st.integers(1, 5), min_size=many, max_size=many))
    each = [path for path, count in zip(case.paths, counts, strict=True) for _ in range(count)]
    one = fair_rates(case.paths, case.bytes_per_s, counts)
    assert np.repeat(one, counts) == pytest.approx(fair_rates(each, case.bytes_per_s), rel=1e-12)


@given(cases())
def test_ends_are_those_of_exact_arithmetic(case: Case) -> None:
    exact = Exact(case.capacity)
    for flow, (path, size) in enumerate(zip(case.paths, case.sizes, strict=True)):
        exact.add(flow, path, size)
    exact.advance(None)
    ends = finish_ns(case.paths, case.sizes, case.bytes_per_s)
    assert ends == pytest.approx([float(exact.ended[i]) for i in range(len(ends))], rel=1e-9)


# -- classes --------------------------------------------------------------------------------------


@given(copies())
def test_copies_of_a_network_are_reckoned_once_and_fare_as_they_do_alone(
    given_: tuple[Case, list[int]],
) -> None:
    case, _ = given_
    paths, sizes = Paths.of(case.paths), np.array(case.sizes, np.float64)
    capacity = np.array(case.capacity, np.float64)
    alone = started(paths, sizes, capacity, lump=False)
    kernels.advance(*alone[:2], np.inf)
    found = classes(paths, sizes, capacity)
    assert found is not None
    assert len(found[2]) <= len(case.paths) // 16
    ends = finish_ns(case.paths, case.sizes, case.bytes_per_s)
    assert ends == pytest.approx(alone[1].end_ns, rel=1e-9)


def test_a_collective_of_1024_hosts_is_a_class_a_stride() -> None:
    case = shifts(1024, [1, 2, 4, 8, 16, 32, 64, 128], [1e6, 1e6, 1e6, 1e6, 2e6, 2e6, 2e6, 5e6])
    found = classes(Paths.of(case.paths), np.array(case.sizes), np.array(case.capacity) * 1.0)
    assert found is not None
    assert len(found[2]) == 3  # strides of one size fare alike
    ends = finish_ns(case.paths, case.sizes, case.bytes_per_s)
    # all share alike to 8e6 bytes sent, then the four that are left, then one
    assert np.unique(ends).tolist() == pytest.approx([8e6 / 50, 12e6 / 50, 15e6 / 50])


def test_flows_that_all_differ_are_left_as_they_are() -> None:
    case = shifts(64, [1], [1e6])
    sizes = np.arange(1.0, 65.0)
    assert classes(Paths.of(case.paths), sizes, np.array(case.capacity) * 1.0) is None


def test_a_long_chain_is_not_refined_to_its_end() -> None:
    chain = Paths.of([[i, i + 1] for i in range(200)])
    assert classes(chain, np.ones(200), np.ones(201)) is None


# -- without numba --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """Return the same kernels as they are where numba is not installed."""
    spec = importlib.util.find_spec("harness.rlsim.kernels")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"numba": None}):
        spec.loader.exec_module(module)
    return module


@given(case=cases(flows_max=40))
def test_without_numba_it_is_the_same_to_the_last_bit(interpreted: ModuleType, case: Case) -> None:
    assert not hasattr(interpreted.advance, "py_func")
    sizes, capacity = np.array(case.sizes, float), np.array(case.capacity, float)
    web, course, _ = started(Paths.of(case.paths), sizes, capacity, lump=False)
    other = kernels.Course.of(sizes, capacity)
    interpreted.settle(web, other, np.arange(len(capacity)), 0.0, 0.0)
    assert [one.tobytes() for one in other] == [one.tobytes() for one in course]
    ended, next_ns = kernels.advance(web, course, 50.0)
    likewise, other_ns = interpreted.advance(web, other, 50.0)
    assert ended.tolist() == likewise.tolist()
    assert next_ns == other_ns
    assert [one.tobytes() for one in other] == [one.tobytes() for one in course]


# -- what can't be asked for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "sizes", "capacities", "told"),
    [
        ([[0, 3]], [1], [1, 1], "there is no link 3: they are 0 to 1"),
        ([[-1]], [1], [1], "there is no link -1"),
        ([[0]], [-1], [1], "sizes are finite bytes from 0 on"),
        ([[0]], [np.inf], [1], "sizes are finite bytes"),
        ([[0]], [1], [np.inf], "capacities are finite bytes per s"),
        ([[0]], [1], [-1], "capacities are finite bytes per s"),
        ([[0]], [1, 2], [1], "shape"),
    ],
)
def test_what_makes_no_sense_is_refused(
    paths: list[list[int]], sizes: list[float], capacities: list[float], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        finish_ns(paths, sizes, capacities)


def test_what_was_found_can_be_remembered_safely() -> None:
    with pytest.raises(ValueError, match="read-only"):
        finish_ns([[0]], [1], [GB])[0] = 2
