"""A generation pool in virtual time, under a policy: batch after batch, each until all have ended.

The policy is asked on a `View` every `replan_s` and `balance_s`, as on a bench. A switch of layouts
takes `switch_s`, in which the instances that change give nothing; their requests go on elsewhere
or wait, and are computed anew. A move sends KV over a link, or computes it anew, whichever is
cheaper. Only generation is simulated: neither training nor the sync of weights. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.model.advance import FOREVER_NS
from harness.model.layout import Mix
from harness.model.placement import Instance, place
from harness.model.replay import ReplayRequest
from harness.rlsim.fleet import Fleet, Hardware
from harness.scheduling.compute import Compute
from harness.scheduling.policies import Policy, assign, decide, order, rebalance, smallest
from harness.scheduling.view import Finished, Moved, Plan, Settings, View
from harness.scheduling.waves import Wave, waves


@dataclass(frozen=True)
class Looked:
    """A look of the planner, with `open` requests; `switched` where the layout was changed."""

    at_s: float
    batch: int
    open: int
    plan: Plan
    switched: bool


@dataclass(frozen=True)
class Result:
    """What came of a run. `batch_s`: from the first request to the end of the last, of each batch.

    `layouts`: since when each was up; a switch is under way before it.
    """

    batch_s: tuple[float, ...]
    tokens: int
    layouts: tuple[tuple[float, Mix], ...]
    looks: tuple[Looked, ...] = ()
    moved: tuple[Moved, ...] = ()
    preemptions: int = 0

    @property
    def switches(self) -> int:
        """How often the layout changed."""
        return len(self.layouts) - 1

    @property
    def total_s(self) -> float:
        """Of all batches."""
        return sum(self.batch_s)


def simulate(
    batches: Sequence[Sequence[ReplayRequest]],
    policy: Policy,
    hardware: Hardware,
    settings: Settings,
    *,
    cap_tokens: int,
    turns_max: int = 1,
    before: Sequence[Finished] = (),
    compute: Compute | None = None,
    replan_s: float = 2.0,
    balance_s: float = 0.25,
) -> Result:
    """Generate the batches one after another; a switch takes `settings.switch_s`.

    `cap_tokens` and `turns_max`: of a whole trajectory. `before`: batches that policies remember,
    numbered below 0. `compute`: what policies take the hardware
    for, if it is not what it is. Raises `UsageError` where a request can run nowhere, and for
    ``best_static`` without a layout: `harness.rlsim.search` finds it.
    """
    fleet = Fleet(hardware, compute or hardware.compute(), before)
    pool = _Pool(policy, fleet, settings, (cap_tokens, turns_max), (replan_s, balance_s))
    for number, batch in enumerate(batches):
        pool.generate(batch, number, coming=list(map(len, batches[number + 1 :])))
    return Result(
        batch_s=tuple(pool.batch_s),
        tokens=fleet.tokens,
        layouts=tuple(pool.layouts),
        looks=tuple(pool.looks),
        moved=tuple(fleet.moved),
        preemptions=fleet.preemptions,
    )


class _Pool:
    """A fleet under a policy."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        settings: Settings,
        most: tuple[int, int],
        every_s: tuple[float, float],
    ) -> None:
        self._policy, self._fleet, self._settings = policy, fleet, settings
        self._cap_tokens, self._turns_max = most
        replan_s, balance_s = every_s
        self._replan_ns = round(replan_s * NS_PER_S) if policy.plans else FOREVER_NS
        self._balance_ns = round(balance_s * NS_PER_S) if policy.balances else FOREVER_NS
        self._layout: Mix | None = None
        self._placed: dict[str, tuple[Instance, ...]] = {}
        self._change: tuple[int, Mix, Wave] | None = None
        """When it ends, what is up then, what is built."""
        self._coming: Sequence[int] = ()
        """Requests of the next batches."""
        self._switches = 0
        """Since this one runs."""
        self.batch_s: list[float] = []
        self.layouts: list[tuple[float, Mix]] = []
        self.looks: list[Looked] = []

    def generate(
        self, batch: Sequence[ReplayRequest], number: int, *, coming: Sequence[int]
    ) -> None:
        """Generate one batch, to the end of its last request; then batches of so many come."""
        fleet, began_ns = self._fleet, self._fleet.now_ns
        self._coming, self._switches = coming, 0
        self._begin(batch, number)
        replan_ns, balance_ns = began_ns + self._replan_ns, began_ns + self._balance_ns
        while fleet.jobs:
            next_ns = min(fleet.next_ns(), self._change[0] if self._change else FOREVER_NS)
            if next_ns == FOREVER_NS:
                raise UsageError(f"{len(fleet.jobs)} requests wait, and nothing runs")
            fleet.now_ns = max(fleet.now_ns, min(next_ns, replan_ns, balance_ns))
            fleet.happen()
            self._finish_change()
            if fleet.now_ns >= replan_ns:
                self._replan(number)
                replan_ns = fleet.now_ns + self._replan_ns
            if fleet.now_ns >= balance_ns:
                self._rebalance()
                balance_ns = fleet.now_ns + self._balance_ns
            fleet.dispatch()
        self.batch_s.append((fleet.now_ns - began_ns) / NS_PER_S)

    def _begin(self, batch: Sequence[ReplayRequest], number: int) -> None:
        """Take a batch: lay out the fleet for it, queue it, and assign it if the policy does."""
        fleet = self._fleet
        fleet.add(batch, number)
        if self._layout is None:
            self._start(number)
        elif self._policy.plans:
            self._replan(number, must=True)  # nobody runs: a switch is in nobody's way
        view = self._view()
        fleet.order(order(view))
        if self._policy.routing == "assigned":
            fleet.assign(assign(view, view.requests.ids))
        fleet.dispatch()

    def _start(self, number: int) -> None:
        """Bring up what the policy begins with."""
        policy, first = self._policy, self._policy.first
        hardware = self._fleet.hardware
        if first is None and policy.plans:
            plan = self._look(number, must=True)
            first = plan.wanted
            self._fleet.assign(plan.assignment)
        elif first is None and policy.balances:
            first = smallest(self._fleet.compute, hardware.gpus_of)
        if first is None:
            raise UsageError(f"{policy.name}: its layout must be searched for first")
        self._placed = place(first, hardware.gpus_of)
        for instances in self._placed.values():
            self._fleet.build(instances)
        self._layout = first
        self.layouts.append((self._fleet.now_ns / NS_PER_S, first))

    # -- the slow loop ------------------------------------------------------------------------

    def _replan(self, number: int, *, must: bool = False) -> None:
        """Let the planner look, and do what it decides."""
        self._fleet.settle()
        if self._change or not self._fleet.jobs:
            return
        plan = self._look(number, must=must)
        self._fleet.assign(plan.assignment)
        if plan.wanted is not None:
            self._switches += not must
            self._switch(plan.wanted)

    def _look(self, number: int, *, must: bool = False) -> Plan:
        view = self._view()
        plan = decide(self._policy, view, self._fleet.compute, self._settings, must=must)
        switched = plan.wanted is not None and self._layout not in (None, plan.wanted)
        self.looks.append(Looked(view.now_s, number, len(view.requests), plan, switched))
        return plan

    def _switch(self, wanted: Mix) -> None:
        """Take down what changes; what comes is up after `switch_s`."""
        after = place(wanted, self._fleet.hardware.gpus_of)
        for wave in waves(self._placed, after, "at_once"):
            self._fleet.take_down(wave.gone_names)
            self._fleet.coming = frozenset(wave.fresh_names)
            ready_ns = self._fleet.now_ns + round(self._settings.switch_s * NS_PER_S)
            self._change = ready_ns, wanted, wave
        self._placed = after

    def _finish_change(self) -> None:
        """Bring up what was built, if it is."""
        if self._change is None or self._change[0] > self._fleet.now_ns:
            return
        ready_ns, self._layout, wave = self._change
        for instances in wave.fresh.values():
            self._fleet.build(instances)
        self._fleet.coming, self._change = frozenset(), None
        self.layouts.append((ready_ns / NS_PER_S, self._layout))

    # -- the fast loop ------------------------------------------------------------------------

    def _rebalance(self) -> None:
        """Let the balancer look, and do what it decides."""
        self._fleet.settle()
        if self._change or not self._fleet.jobs:
            return
        view, compute = self._view(), self._fleet.compute
        for move in rebalance(self._policy, view, compute, self._settings, self._move_s):
            self._fleet.move(move)

    def _move_s(self, source: str, target: str, context_tokens: int) -> float:
        return min(self._fleet.move_ms(source, target, context_tokens).values()) / 1e3

    # -- what policies see --------------------------------------------------------------------

    def _view(self) -> View:
        return replace(
            self._fleet.view(self._cap_tokens, truth=self._policy.knows),
            layout=self._layout,
            coming=self._coming[0] if self._coming else 0,
            coming_batches=len(self._coming),
            turns_max=self._turns_max,
            switches=self._switches,
            switched_s=self.layouts[-1][0] if len(self.layouts) > 1 else None,
            changing=self._change is not None,
        )
