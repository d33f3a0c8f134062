"""Flows over links, made up: small ones of every sort, and symmetric ones of any size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

GB = 10**9
"""Bytes per s of which one is 1 byte per ns."""


class Case(NamedTuple):
    """Whole capacities in bytes per ns, whole sizes in bytes."""

    capacity: list[int]
    paths: list[list[int]]
    sizes: list[int]

    @property
    def bytes_per_s(self) -> list[int]:
        return [value * GB for value in self.capacity]


@st.composite
def cases(draw: st.DrawFn, flows_max: int = 10) -> Case:
    links = draw(st.integers(1, 6))
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=4)
    paths = draw(st.lists(path, min_size=1, max_size=flows_max))
    many = len(paths)
    return Case(
        draw(st.lists(st.integers(1, 9), min_size=links, max_size=links)),
        paths,
        draw(st.lists(st.integers(1, 99), min_size=many, max_size=many)),
    )


@st.composite
def copies(draw: st.DrawFn) -> tuple[Case, list[int]]:
    """Return a network several times over, links and flows shuffled; and where each flow went."""
    case, times = draw(cases()), draw(st.integers(16, 24))
    links, flows = len(case.capacity), len(case.paths)
    link_at = draw(st.permutations(range(links * times)))
    flow_at = draw(st.permutations(range(flows * times)))
    capacity, sizes = [0] * (links * times), [0] * (flows * times)
    paths: list[list[int]] = [[]] * (flows * times)
    for at, place in enumerate(link_at):
        capacity[place] = case.capacity[at % links]
    for at, place in enumerate(flow_at):
        copy, flow = divmod(at, flows)
        sizes[place] = case.sizes[flow]
        paths[place] = [link_at[copy * links + link] for link in case.paths[flow]]
    return Case(capacity, paths, sizes), list(flow_at)


def shifts(hosts: int, strides: list[int], sizes: list[float]) -> Case:
    """Each host sends to the one so many further: over its link out, and the other's link in."""
    paths = [[i, hosts + (i + by) % hosts] for by in strides for i in range(hosts)]
    return Case([50] * (2 * hosts), paths, list(np.repeat(sizes, hosts)))
