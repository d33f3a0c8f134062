"""The policies, as data and as functions of a view: the same on a bench and in simulation. Pure.

A static policy keeps one layout. Users run it with requests assigned to instances when a batch
begins; `/least_loaded` sends them as instances have room. The others put the slow loop (planner),
the fast loop (balancer) or both on top. The oracle does what ``orchestrl`` does, and is told how
long every response will be: what no policy can beat by knowing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import UsageError
from harness.model.layout import Layout, Mix
from harness.model.policies import BEST_STATIC, ORACLE, parse_policy_name
from harness.scheduling.balancer import MoveS, balance, moves_allowed
from harness.scheduling.compute import Compute
from harness.scheduling.forecast import Forecast, forecast
from harness.scheduling.planner import plan
from harness.scheduling.view import Move, Plan, Routing, Settings, View


@dataclass(frozen=True)
class Policy:
    """What a policy is made of. `first`: what is up from the start.

    Without it, a policy that plans has its first batch planned before anything is up; ``reactive``
    starts with the `smallest`, and ``best_static`` with what a search found.
    """

    name: str
    first: Mix | None = None
    routing: Routing = "least_loaded"
    plans: bool = False
    balances: bool = False
    knows: bool = False
    """It is given the true lengths."""


NAMED: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(BEST_STATIC),
        Policy("reactive", balances=True),
        Policy("proactive", plans=True),
        Policy("orchestrl", plans=True, balances=True),
        Policy(ORACLE, plans=True, balances=True, knows=True),
    )
}


def parse_policy(text: str) -> Policy:
    """Read ``orchestrl``, ``static:8xTP1``, ``static:4xTP1+1xTP4/least_loaded``.

    Raises `ValueError`, telling what is possible.
    """
    found = parse_policy_name(text)
    if found.mix is None:
        return NAMED[found.name]
    return Policy(text, first=found.mix, routing=found.routing)


def smallest(compute: Compute, gpus_of: Mapping[str, int]) -> Mix:
    """Return what a user takes by default: the fewest GPUs an instance that fit, as many as do.

    Raises `UsageError` where nothing fits.
    """
    for layout in sorted(compute.layouts(max(gpus_of.values(), default=0)), key=_size):
        size = layout.gpus_per_instance
        if instances := sum(gpus // size for gpus in gpus_of.values()):
            return Mix((Layout(instances, layout.tp, layout.pp, layout.ep, layout.dp),))
    raise UsageError(f"no layout fits the GPUs of {', '.join(gpus_of) or 'no node'}")


def _size(layout: Layout) -> tuple[int, ...]:
    return (layout.gpus_per_instance, layout.pp, layout.dp, layout.ep)


# -- at the start of a batch ---------------------------------------------------------------------


def assign(view: View, ids: Sequence[str]) -> dict[str, str]:
    """Give each request an instance, in turn: id -> instance, for routing ``assigned``."""
    names = [instance.name for instance in view.instances]
    return {id_: names[turn % len(names)] for turn, id_ in enumerate(ids)}


def order(view: View) -> tuple[str, ...]:
    """Return the ids of a view in the order to send them: the longest first, if that is known."""
    if view.truth is None:
        return view.requests.ids
    return tuple(view.requests.ids[row] for row in np.argsort(-view.truth, kind="stable"))


# -- while it runs -------------------------------------------------------------------------------


def foresee(view: View) -> Forecast:
    """Return what is expected of a view, or what is known."""
    return forecast(view) if view.truth is None else Forecast.certain(view.truth)


def decide(
    policy: Policy, view: View, compute: Compute, settings: Settings, *, must: bool = False
) -> Plan:
    """Let the slow loop look; a static policy stays.

    With `must` it wants whatever ends soonest, with neither margin nor rest, and still nothing
    where what there is ends soonest.
    """
    if not policy.plans:
        return Plan(None, f"{policy.name} does not plan", 0.0)
    return plan(view, foresee(view), compute, settings, must=must)


def rebalance(
    policy: Policy, view: View, compute: Compute, settings: Settings, move_s: MoveS
) -> tuple[Move, ...]:
    """Let the fast loop look."""
    if not policy.balances or not len(view.requests) or not moves_allowed(view, settings):
        return ()
    return balance(view, foresee(view), compute, settings, move_s)
