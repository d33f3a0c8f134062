"""The exact optimum of small planning problems, by a mixed-integer linear programme (HiGHS).

Sets: layouts t of one instance (g_t GPUs); classes l of like requests (N_l of them). A
*configuration* c = (t, n_1..n_L) is one instance of layout t with n_l requests of each class; its
time T_c is that of the cost model, and it exists only where KV holds it. Variables: y_c, the
number of instances with configuration c (integer >= 0). For a makespan Z the programme is

    sum over c of g_t(c) * y_c            <= GPUs of the node
    sum over c of n_l(c) * y_c            =  N_l          for every class l
    y_c = 0 where T_c > Z

and the smallest Z for which there are such y is found by bisection over the sorted T_c. Nothing is
linearised: an instance's time enters as that of its whole configuration (the cutting-stock
formulation of Gilmore and Gomory), so (X, Y) of the planner is solved exactly, from scratch,
without migration. It takes as many variables as there are configurations, hence small cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from harness.model.layout import Layout
from harness.model.load import load_profile
from harness.model.placement import place
from harness.model.profile import Profile
from harness.scheduling.compute import Compute
from harness.scheduling.forecast import Forecast
from harness.scheduling.planner import plan
from harness.scheduling.view import Plan, Requests, Settings, View

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
SEATS = 64


@dataclass(frozen=True)
class SmallCase:
    """Classes of like requests, on one node."""

    compute: Compute
    gpus: int
    remaining: tuple[int, ...]
    context: tuple[int, ...]
    count: tuple[int, ...]


@cache
def profile() -> Profile:
    return load_profile(PROFILES / "qwen2.5-14b-h800.toml")


@cache
def compute_of(kv_max_tokens: int) -> Compute:
    return Compute.of(profile(), sequences_max=SEATS, kv_max_tokens=kv_max_tokens)


def random_case(seed: int, *, short: bool = False) -> SmallCase:
    """Two or three classes, heavy-tailed; one case in three has long contexts, up to 60,000 tokens.

    `short`: an instance of whatever layout holds but 1 to 4 times the largest request, so that
    requests wait for each other's KV.
    """
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 4))
    remaining = np.ceil(rng.lognormal(6.5, 1.2, classes)).clip(20, 20_000)
    context = rng.integers(50, 3_000 if short or rng.random() < 2 / 3 else 60_000, classes)
    count = rng.integers(1, 7, classes)
    largest = int((remaining + context).max())
    return SmallCase(
        compute_of(int(largest * rng.uniform(1.0, 4.0)) if short else 0),
        int(rng.choice([4, 8])),
        tuple(int(n) for n in remaining),
        tuple(int(n) for n in context),
        tuple(int(n) for n in count),
    )


def time_s(case: SmallCase, layout: Layout, counts: tuple[int, ...]) -> float:
    """Return how long one instance takes, the longest seated first; infinite where KV is short."""
    remaining = np.repeat(np.array(case.remaining, float), counts)
    context = np.repeat(np.array(case.context, float), counts)
    first = np.argsort(-remaining, kind="stable")
    return case.compute.makespan_s(layout, remaining[first], context[first], context[first])


def optimum_s(case: SmallCase) -> float:
    """Return the smallest makespan that there is."""
    configurations = [
        (layout, counts)
        for layout in case.compute.layouts(case.gpus)
        for counts in product(*(range(n + 1) for n in case.count))
        if any(counts)
    ]
    times = np.array([time_s(case, *each) for each in configurations])
    sizes = np.array([layout.gpus for layout, _ in configurations], float)
    counts = np.array([counts for _, counts in configurations], float)
    levels = np.unique(times[np.isfinite(times)])
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _feasible(case, sizes, counts, times <= levels[middle]):
            high = middle
        else:
            low = middle + 1
    return float(levels[low])


def _feasible(case: SmallCase, sizes: np.ndarray, counts: np.ndarray, allowed: np.ndarray) -> bool:
    if not allowed.any():
        return False
    held, wanted = counts[allowed].T, np.array(case.count, float)
    found = milp(
        c=sizes[allowed],
        constraints=[
            LinearConstraint(sizes[allowed][None, :], 0, case.gpus),
            LinearConstraint(held, wanted, wanted),
        ],
        integrality=np.ones(int(allowed.sum())),
        bounds=Bounds(0, np.inf),
    )
    return bool(found.success)


def planned_s(case: SmallCase) -> float:
    """Return the makespan of what the planner wants, by the same cost model."""
    remaining = np.repeat(case.remaining, case.count)
    context = np.repeat(case.context, case.count)
    rows = len(remaining)
    requests = Requests(
        ids=tuple(f"r{n}" for n in range(rows)),
        group=np.arange(rows),
        produced=np.zeros(rows, np.int64),
        context=context,
        at=np.full(rows, -1),
        running=np.zeros(rows, bool),
        batch=np.zeros(rows, np.int64),
    )
    view = View(0.0, (), requests, (), {"g0": case.gpus}, 20_000)
    decided = plan(view, Forecast.certain(remaining), case.compute, Settings(), must=True)
    assert decided.wanted is not None, decided.reason
    return makespan_s(case, view, decided, remaining, context)


def makespan_s(
    case: SmallCase, view: View, decided: Plan, remaining: np.ndarray, context: np.ndarray
) -> float:
    """Return when the last instance of a plan ends; where the place is free, dealt in turn."""
    assert decided.wanted is not None
    instances = [i for several in place(decided.wanted, view.gpus_of).values() for i in several]
    names = [instance.name for instance in instances]
    order = np.argsort(-remaining, kind="stable")
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order)) % len(instances)
    for row, name in enumerate(view.requests.ids):
        if name in decided.assignment:
            at[row] = names.index(decided.assignment[name])
    ends = []
    for index, instance in enumerate(instances):
        rows = [row for row in order if at[row] == index]
        first = context[rows].astype(float)
        ends.append(
            case.compute.makespan_s(instance.layout, remaining[rows].astype(float), first, first)
        )
    return max(ends)
