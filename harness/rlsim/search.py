"""The best static layout, found by trying all: what a user could only know afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import get_args

from harness.errors import UsageError
from harness.model.layout import Layout, Mix
from harness.model.placement import place
from harness.model.policies import BEST_STATIC
from harness.model.replay import ReplayRequest
from harness.rlsim.fleet import Hardware
from harness.rlsim.pool import simulate
from harness.scheduling.compute import Compute
from harness.scheduling.policies import Policy
from harness.scheduling.view import Routing, Settings


def uniform(layouts: Sequence[Layout], gpus_of: Mapping[str, int]) -> Iterator[Mix]:
    """Yield each layout with as many instances as fit."""
    for layout in layouts:
        if count := sum(gpus // layout.gpus_per_instance for gpus in gpus_of.values()):
            yield Mix((_times(layout, count),))


def two_types(layouts: Sequence[Layout], gpus_of: Mapping[str, int]) -> Iterator[Mix]:
    """Yield all mixes of two layouts that take every GPU: of the larger one 1, 2, ... instances."""
    gpus = sum(gpus_of.values())
    for few, many in combinations(sorted(layouts, key=lambda one: one.gpus_per_instance), 2):
        small, large = few.gpus_per_instance, many.gpus_per_instance
        for count in range(1, gpus // large + 1):
            rest, left = divmod(gpus - count * large, small)
            if rest and not left:
                mix = Mix((_times(few, rest), _times(many, count)))
                if _fits(mix, gpus_of):
                    yield mix


def best_static(
    batches: Sequence[Sequence[ReplayRequest]],
    hardware: Hardware,
    *,
    cap_tokens: int,
    compute: Compute | None = None,
    mixes: Sequence[Mix] = (),
) -> Policy:
    """Return the static policy that ends these batches first: its layout and routing.

    Of all uniform layouts and mixes of two (or of `mixes`), with either routing, all simulated.
    Raises `UsageError` where none can run the requests.
    """
    compute = compute or hardware.compute()
    if not mixes:
        layouts = compute.layouts(max(hardware.gpus_of.values(), default=0))
        mixes = [*uniform(layouts, hardware.gpus_of), *two_types(layouts, hardware.gpus_of)]
    took: dict[Policy, float] = {}
    problems: dict[Mix, str] = {}
    for mix, routing in product(mixes, get_args(Routing)):
        policy = Policy(BEST_STATIC, first=mix, routing=routing)
        try:
            done = simulate(
                batches, policy, hardware, Settings(), cap_tokens=cap_tokens, compute=compute
            )
            took[policy] = done.total_s
        except UsageError as error:
            problems[mix] = str(error)
    if not took:
        told = "; ".join(f"{mix}: {problem}" for mix, problem in problems.items())
        raise UsageError(f"no static layout can run this: {told or 'none fits the GPUs'}")
    return min(took, key=lambda policy: took[policy])


def _times(layout: Layout, count: int) -> Layout:
    return Layout(count, layout.tp, layout.pp, layout.ep, layout.dp)


def _fits(mix: Mix, gpus_of: Mapping[str, int]) -> bool:
    try:
        place(mix, gpus_of)
    except UsageError:
        return False
    return True
