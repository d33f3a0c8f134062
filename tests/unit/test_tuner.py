"""NCCL's choice: where protocols and algorithms change, what may be asked of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.model.scenario import Op
from harness.rlsim.nvlink import links_of
from harness.rlsim.tuner import (
    TUNED,
    Allowed,
    Group,
    Tuner,
    Wiring,
    allowed,
    latency_us,
    steps,
    tuning,
)

MB = 1_000_000


def tuner(gpu: str, network_gb_per_s: float = 0.0) -> Tuner:
    links = links_of(gpu)
    wiring = Wiring(links.architecture, links.graph_gb_per_s, links.channels, network_gb_per_s)
    return Tuner(wiring, tuning())


def changes(of: Tuner, op: Op, group: Group) -> list[tuple[str, str, float]]:
    """Return (algorithm, protocol, first size in MB) at powers of two from 512 B to 1 GiB."""
    found: list[tuple[str, str, float]] = []
    for exponent in range(9, 31):
        choice = of.choose(op, 2**exponent, group)
        if not found or found[-1][:2] != choice[:2]:
            found.append((*choice[:2], round(2**exponent / MB, 1)))
    return found


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # sizes at which the times of a measured A100 node (NCCL 2.27.3) jump
        (2, [("ring", "ll", 0.0), ("ring", "simple", 2.1)]),
        (4, [("ring", "ll", 0.0), ("ring", "simple", 2.1)]),
        (8, [("ring", "ll", 0.0), ("ring", "ll128", 4.2), ("ring", "simple", 16.8)]),
    ],
)
def test_protocols_of_an_all_gather_change_where_an_a100_node_shows_it(
    ranks: int, expected: list[tuple[str, str, float]]
) -> None:
    assert changes(tuner("A100"), "all_gather", Group(ranks, 1, ranks)) == expected


def test_hopper_all_reduces_large_sizes_in_its_switch() -> None:
    found = changes(tuner("H100"), "all_reduce", Group(8, 1, 8))
    assert found == [("ring", "ll", 0.0), ("nvls", "simple", 2.1)]
    assert "nvls" not in str(changes(tuner("A100"), "all_reduce", Group(8, 1, 8)))


def test_trees_serve_small_sizes_of_many_nodes() -> None:
    of, group = tuner("A100", 200.0), Group(128, 16, 8)
    assert of.choose("all_reduce", 1024, group)[:2] == ("tree", "ll")
    assert of.choose("all_reduce", 1 << 34, group)[:2] == ("ring", "simple")
    assert of.choose("all_gather", 1024, group).algorithm == "ring"


def test_a_tree_of_two_nodes_has_twice_the_network() -> None:
    of = tuner("A100", 50.0)
    ring, tree = (
        of.choose("all_reduce", 1 << 33, Group(16, 2, 8), allowed(name, "simple")).estimate_us
        for name in ("ring", "tree")
    )
    assert tree < ring
    ring, tree = (
        of.choose("all_reduce", 1 << 33, Group(64, 8, 8), allowed(name, "simple")).estimate_us
        for name in ("ring", "tree")
    )
    assert ring < tree


def test_names_are_read_as_nccl_reads_them() -> None:
    assert allowed() == Allowed()
    assert allowed("Ring,TREE", "LL128").algorithms == ("ring", "tree")
    assert allowed("^NVLSTree, nvls").algorithms == ("ring", "tree")
    assert allowed(protocols="^LL").protocols == ("ll128", "simple")
    assert allowed("hierarchical").algorithms == ("hierarchical",)
    assert "hierarchical" not in allowed("^ring").algorithms
    with pytest.raises(UsageError, match=r"NCCL_ALGO = rings: 'rings' is none of ring, tree"):
        allowed("rings")


def test_what_nothing_allowed_can_do_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no all_gather of 8 ranks on 1 nodes .* by tree"):
        tuner("H100").choose("all_gather", 1, Group(8, 1, 8), allowed("tree"))
    with pytest.raises(UsageError, match=r"by nvls"):
        tuner("A100").choose("all_reduce", 1, Group(8, 1, 8), allowed("nvls"))
    with pytest.raises(UsageError, match=r"with ll"):
        tuner("H100").choose("all_reduce", 1, Group(8, 1, 8), allowed("nvls", "ll"))
    with pytest.raises(UsageError, match=r"NCCL 1\.0: there is a tuning of 2\.27 only"):
        tuning("1.0")


def test_steps_of_a_ring_cross_nodes_as_often_as_there_are_nodes() -> None:
    assert [steps(op, 8) for op in ("all_reduce", "all_gather", "reduce_scatter")] == [14, 7, 7]
    assert latency_us("all_reduce", "ring", Group(16, 2, 8), 1.0, 100.0) == 28 + 200
    assert latency_us("all_reduce", "tree", Group(64, 8, 8), 1.0, 100.0) == 2 * (7 + 300)
    assert latency_us("all_reduce", "nvls_tree", Group(64, 8, 8), 1.0, 100.0) == 601


@given(
    st.sampled_from(["A100", "H100", "B200"]),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    st.integers(0, 1 << 34),
    st.integers(1, 20),
    st.integers(1, 8),
)
def test_the_choice_is_the_least_of_what_may_be_chosen(
    gpu: str, op: Op, size: int, nodes: int, each: int
) -> None:
    group = Group(max(2, nodes * each), nodes, each)
    of = tuner(gpu, 100.0)
    best = of.choose(op, size, group)
    assert best.estimate_us > 0
    for algorithm in TUNED:
        try:
            one = of.choose(op, size, group, Allowed((algorithm,)))
        except UsageError:
            continue
        assert best.estimate_us <= one.estimate_us
