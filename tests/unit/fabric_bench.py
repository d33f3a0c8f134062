"""A bench for what is decided about circuits: some ToRs, each with one uplink on every plane."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from harness.fabric.demand import Demand
from harness.fabric.links import Link, Plan, Uplink
from harness.fabric.topology import NodePlace, Plane, Rates, Topology, TorPlace

MS = 1e6
"""ns"""


def bench(
    tors: int | Sequence[str] = 4,
    *,
    nodes: int = 2,
    planes: int = 2,
    oversubscription: float = 4.0,
    switching_ms: Sequence[float] = (25.0, 25.0),
    duplex: bool = True,
) -> Topology:
    """Nodes are called ``t0.0``, ``t0.1``, ..., planes ``agg0``, ...; links carry 1 Gbit/s."""
    names = [f"t{i}" for i in range(tors)] if isinstance(tors, int) else list(tors)
    half = len(names)
    return Topology(
        tors={
            name: TorPlace(name, f"198.19.{i}.0/24", "", "", "", steered=True)
            for i, name in enumerate(names)
        },
        nodes={
            f"{tor}.{k}": NodePlace(f"{tor}.{k}", tor, "", "eth0", f"198.19.{i}.{10 + k}")
            for i, tor in enumerate(names)
            for k in range(nodes)
        },
        uplinks=tuple(
            Uplink(tor, f"u{k}", f"agg{k}", 1 + i, 1 + half + i, f"198.18.{k}.{i}")
            for i, tor in enumerate(names)
            for k in range(planes)
        ),
        ours={f"agg{k}": frozenset(range(1, 1 + 2 * half)) for k in range(planes)},
        planes={
            f"agg{k}": Plane(f"agg{k}", duplex=duplex, switching_ns=int(switching_ms[k] * MS))
            for k in range(planes)
        },
        rates=Rates(1000.0, oversubscription),
    )


def link(topology: Topology, a: str, b: str, plane: int = 0, *, both: bool = True) -> Link:
    """The link of two ToRs over one plane."""
    ends = [topology.uplink(tor, f"agg{plane}") for tor in (a, b)]
    assert ends[0] is not None
    assert ends[1] is not None
    return Link(ends[0], ends[1], (), both)


def plan(topology: Topology, *edges: tuple[str, str] | tuple[str, str, int]) -> Plan:
    """Duplex links by ToRs and plane."""
    return Plan(frozenset(link(topology, *edge) for edge in edges))


def demand(topology: Topology, **sent_bytes: float) -> Demand:
    """Bytes by ``t0_t1``, from and to."""
    names = list(topology.tors)
    matrix = np.zeros((len(names),) * 2)
    for key, size in sent_bytes.items():
        a, b = key.split("_")
        matrix[names.index(a), names.index(b)] = size
    return Demand("made", tuple(names), matrix)


@st.composite
def demands(draw: st.DrawFn, topology: Topology) -> Demand:
    """Some bytes, or none, for every pair."""
    n = len(topology.tors)
    sizes = st.sampled_from([0.0, 0.0, 1e3, 1e6, 3e6, 2e7, 1e8])
    matrix = np.array(draw(st.lists(sizes, min_size=n * n, max_size=n * n))).reshape(n, n)
    return Demand("drawn", tuple(topology.tors), matrix)


@st.composite
def plans(draw: st.DrawFn, topology: Topology) -> Plan:
    """A matching on each plane."""
    links = set()
    for k in range(len(topology.ours)):
        left = set(topology.tors)
        for a, b in draw(st.permutations(list(combinations(topology.tors, 2)))):
            if {a, b} <= left and draw(st.booleans()):
                left -= {a, b}
                links.add(link(topology, a, b, k))
    return Plan(frozenset(links))
