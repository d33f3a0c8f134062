"""Max-min fair rates of flows over links, and when flows end that all begin at once. Pure.

Links are indices into their capacities, in bytes per s; a path is the links that a flow takes, in
any order. Whoever takes a link twice counts twice there. Errors are `ValueError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from harness.clock import NS_PER_S
from harness.rlsim.classes import untied
from harness.rlsim.island import numbered, started
from harness.rlsim.kernels import Course, Floats, advance, settle
from harness.rlsim.paths import Paths


def fair_rates(
    paths: Paths | Sequence[Sequence[int]],
    capacities_bytes_per_s: ArrayLike,
    counts: ArrayLike = 1,
) -> Floats:
    """Return each flow's rate in bytes per s; `counts`: as many flows each path stands for.

    No rate can rise unless one falls that is no greater. A flow that takes no link is infinitely
    fast, one on a link of no capacity stands still.
    """
    paths, capacity = checked(paths, capacities_bytes_per_s)
    many = np.broadcast_to(np.asarray(counts, np.float64), len(paths))
    if not (many > 0).all():
        raise ValueError("a path stands for one flow or more")
    web = untied(paths, len(capacity), many)
    course = Course.of(np.zeros(len(paths)), capacity)
    settle(web, course, np.arange(len(capacity), dtype=np.int32), 0.0, 0.0)
    course.rate[paths.lengths == 0] = np.inf
    return course.rate


def finish_ns(
    paths: Paths | Sequence[Sequence[int]],
    sizes_bytes: ArrayLike,
    capacities_bytes_per_s: ArrayLike,
) -> Floats:
    """Return when each flow ends, if all begin at 0 and nothing else happens: ns, not rounded.

    Infinity where it never does, for a link of its path has no capacity. The result can't be
    written to, so it may be remembered by what was given.
    """
    paths, capacity = checked(paths, capacities_bytes_per_s)
    sizes = checked_sizes(sizes_bytes, len(paths))
    going = np.flatnonzero((sizes > 0) & (paths.lengths > 0))
    local, links = numbered(paths.take(going), len(capacity))
    web, course, class_of = started(local, sizes[going], capacity[links] / NS_PER_S)
    advance(web, course, np.inf)
    end_ns = np.zeros(len(paths))
    end_ns[going] = course.end_ns[class_of]
    end_ns.flags.writeable = False
    return end_ns


def checked(
    paths: Paths | Sequence[Sequence[int]], capacities_bytes_per_s: ArrayLike
) -> tuple[Paths, Floats]:
    """Return both as arrays; raises `ValueError` where they are not what they should be."""
    capacity = np.array(capacities_bytes_per_s, np.float64)
    if capacity.ndim != 1 or not (np.isfinite(capacity) & (capacity >= 0)).all():
        raise ValueError("capacities are finite bytes per s from 0 on, one a link")
    return Paths.of(paths).checked(len(capacity)), capacity


def checked_sizes(sizes_bytes: ArrayLike, flows: int) -> Floats:
    """Return sizes as an array, one a flow; raises `ValueError` where they are none."""
    sizes = np.array(np.broadcast_to(np.asarray(sizes_bytes, np.float64), flows))
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        raise ValueError("sizes are finite bytes from 0 on")
    return sizes
