"""Where each rank stands along the axes of parallelism, and with whom it forms groups. Pure.

Megatron's order: ranks count TP fastest, then DP, then PP; EP is the fast part of DP. With DP2 TP2
PP2, ranks 0 and 1 split a layer's tensors, 0 and 2 the samples, 0 and 4 the layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from harness.model.degrees import Degrees

Axis = Literal["dp", "tp", "pp", "ep"]

AXES: tuple[Axis, ...] = ("tp", "ep", "dp", "pp")

Members = tuple[tuple[int, ...], ...]
"""Global ranks of groups that exist side by side, each in the order of its axis."""


class Place(NamedTuple):
    """Where a rank is along each axis."""

    dp: int
    tp: int
    pp: int
    ep: int


def place_of(rank: int, degrees: Degrees) -> Place:
    """Return where a rank stands."""
    rest, tp = divmod(rank, degrees.tp)
    pp, dp = divmod(rest, degrees.dp)
    return Place(dp=dp, tp=tp, pp=pp, ep=dp % degrees.ep)


@cache
def groups_along(axis: Axis, degrees: Degrees) -> Members:
    """Return every group along an axis: ranks that differ in it and in nothing else.

    Along ``ep`` those are parts of the groups along ``dp``, for experts are split within them.
    """
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(degrees.ranks):
        dp, tp, pp, ep = place_of(rank, degrees)
        fixed = {
            "tp": (dp, pp),
            "dp": (tp, pp),
            "pp": (tp, dp),
            "ep": (tp, pp, dp - ep),
        }[axis]
        found[fixed].append(rank)
    return tuple(map(tuple, found.values()))


@cache
def expert_copies(degrees: Degrees) -> Members:
    """Return the groups of ranks that hold the same experts: every EP-th rank along ``dp``.

    Over them the gradients of experts are reduced; each has DP / EP ranks.
    """
    return tuple(
        ranks[first :: degrees.ep]
        for ranks in groups_along("dp", degrees)
        for first in range(degrees.ep)
    )


def misfit(ranks: Sequence[int], world_size: int, degrees: Degrees) -> str:
    """Return why these ranks of a node cannot be of a world of these degrees; "": they can."""
    if world_size != degrees.ranks:
        return f"{degrees} is {degrees.ranks} ranks, not world_size {world_size}"
    if strangers := [rank for rank in ranks if not 0 <= rank < world_size]:
        return f"ranks {strangers} are none of {world_size}"
    if not ranks:
        return "no rank is asked for on this node"
    return ""
