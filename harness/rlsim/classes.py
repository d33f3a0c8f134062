"""Flows that fare alike, found by colour refinement: a symmetric collective is few classes.

Flows begin with the colour of their bytes, links with that of their capacity. Then each takes a new
colour from its own and from those of all that it crosses, again and again, until flows fall apart
no further. Then flows of one colour cross links of the same colours, and links of one colour carry
as many flows of each (an *equitable partition*). So max-min fairness gives flows of one colour the
same rate, all of them end together, and what is left is as symmetric. One link of each colour
stands for all. It is exact but for colours being hashes of 64 bits: that two of 10,000 fall
together by chance happens once in 10^11 times. Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from harness.rlsim.kernels import Floats, Indices, Web, crossed
from harness.rlsim.paths import Ints, Paths

Colours = NDArray[np.uint64]

FLOWS_MIN = 16
"""With fewer there is nothing to win."""
CLASSES_PART = 0.5
"""With more classes than this part of the flows, too."""
ROUNDS_MAX = 12
"""Long chains fall apart by one class a round: they are left as they are."""


def untied(paths: Paths, links: int, counts: Floats | None = None) -> Web:
    """Return the web in which each path and each link is a class of its own.

    `counts`: of how many flows on each path; one, where not given.
    """
    link_starts, flows = crossed(paths.starts, paths.links, links)
    many = np.ones(len(paths)) if counts is None else counts
    return Web(
        paths.starts.astype(np.int32),
        paths.links.astype(np.int32),
        np.repeat(many, paths.lengths),
        link_starts,
        flows,
        many[flows],
    )


def classes(paths: Paths, sizes: Floats, capacity: Floats) -> tuple[Web, Ints, Ints, Ints] | None:
    """Return the web of classes, the class of each flow, and a flow and a link to stand for each.

    None where it doesn't pay: too few flows, or nearly all of them differ.
    """
    if len(paths) < FLOWS_MIN:
        return None
    ones, shape = np.ones(len(paths.links), np.uint64), (len(paths), len(capacity))
    crossing = csr_array((ones, paths.links, paths.starts), shape=shape)
    crossed_by = crossing.T.tocsr()
    flows, links = _mixed(sizes.view(np.uint64)), _mixed(capacity.view(np.uint64))
    count = _count(flows)
    for _ in range(ROUNDS_MAX):
        if count > CLASSES_PART * len(paths):
            return None
        links = _mixed(links + crossed_by @ _mixed(flows))
        flows = _mixed(flows + crossing @ _mixed(links))
        before, count = count, _count(flows)
        if before == count:
            return _tied(crossed_by, flows, links)
    return None


def _tied(crossed_by: Any, flows: Colours, links: Colours) -> tuple[Web, Ints, Ints, Ints]:
    _, flow_of, class_of = np.unique(flows, return_index=True, return_inverse=True)
    _, link_of = np.unique(links, return_index=True)
    ones, each = np.ones(len(flows)), np.arange(len(flows) + 1)
    member = csr_array((ones, class_of, each), shape=(len(flows), len(flow_of)))
    by_link = crossed_by[link_of].astype(np.float64) @ member
    return Web(*_parts(by_link.T.tocsr()), *_parts(by_link)), class_of, flow_of, link_of


def _parts(matrix: Any) -> tuple[Indices, Indices, Floats]:
    return matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32), matrix.data


def _mixed(values: Colours) -> Colours:
    """Scatter values over 64 bits: the finaliser of splitmix64 (Steele et al., OOPSLA 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _count(colours: Colours) -> int:
    return int(np.unique(colours).size)
