"""A life cycle of requests in real time: each step ends when the latency profile says.

The ideal timeline rules: a step ends so long after the *ideal* end of the one before, however late
this process woke, so that pacing is exact on average. Equal steps on end are one wait, of a report
interval at most. A command that comes meanwhile acts at the first step end at or after it. An idle
engine's timeline starts anew when work comes; so does that of one that stood for over a second,
because a device that was stopped does not catch up.

Time is an argument: `now_ns`, `sleep_until_ns` and the engine's `wait`; so this is as exact on a
virtual clock. Outputs carry the ideal ends of the steps that gave them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agents.generation.base import Tell, Wait
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.advance import Stretch, plan_stretch
from harness.model.batching import Batching, complete_step, settle
from harness.model.requests import Carried, Event, carried
from harness.model.steptime import StepCosts, step_ns
from harness.wire.generation import Output, Stats

REPORT_NS = 50 * NS_PER_MS
_IDLE_NS = NS_PER_S
_STALL_NS = NS_PER_S

Ended = Literal["", "finished", "aborted", "exported"]


def sleep_until_ns(until_ns: int) -> None:
    """Sleep until a time of the monotonic clock."""
    while (left_ns := until_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / NS_PER_S)


@dataclass(slots=True)
class _Open:
    """How much of a request's output was told. `first_ns` 0: its next token is the interval's."""

    told: int
    first_ns: int = 0
    cached_tokens: int = 0


class Pace:
    """One instance's requests, their steps and what is told of them.

    `state` is changed by `harness.model.intake` between calls of `run`; what it does to a request
    is said here too, by `opened` and `ended`.
    """

    def __init__(
        self,
        instance: str,
        state: Batching,
        costs: StepCosts,
        tell: Tell,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep_until_ns: Callable[[int], None] = sleep_until_ns,
    ) -> None:
        self.state = state
        self._instance, self._costs, self._tell = instance, costs, tell
        self._now_ns, self._sleep_until_ns = now_ns, sleep_until_ns
        self._ideal_ns, self._standing = now_ns(), True
        self._open: dict[str, _Open] = {}
        self._joined: list[str] = []
        self._interval_ns = 0  # end of the first decode step that was not reported
        self._reported_ns = 0
        self._steps = self._generated = self._prefilled = self._cached = self._preemptions = 0
        self._first_token_ns = self._last_token_ns = self._late_ns = 0
        self._beyond: frozenset[str] = frozenset()

    # -- steps ---------------------------------------------------------------------------------

    def run(self, wait: Wait) -> None:
        """Step until a command waits; see `agents.generation.base.Engine.run`."""
        while True:
            now_ns = self._now_ns()
            if self._standing or now_ns - self._ideal_ns > _STALL_NS:
                self._ideal_ns, self._standing = now_ns, False
            stretch = self._plan(now_ns + REPORT_NS)
            if stretch is None:
                self.report()
                self._standing = True
                if wait(now_ns + _IDLE_NS):
                    return
            elif wait(stretch.ends_ns):
                self._reach(self._now_ns())
                return
            else:
                self._complete(stretch)

    def restart(self) -> None:
        """Begin a new timeline with the next step: meanwhile the device did something else."""
        self._standing = True

    def time_steps(self, steps: int) -> list[int]:
        """Make `steps` steps, one by one, in real time; return how long each really took."""
        began_ns = self._now_ns()
        if self._standing:
            self._ideal_ns, self._standing = began_ns, False
        times_ns: list[int] = []
        while len(times_ns) < steps and (stretch := self._plan(self._ideal_ns + 1)):
            self._sleep_until_ns(stretch.ends_ns)
            self._complete(stretch)
            ended_ns = self._now_ns()
            times_ns.append(ended_ns - began_ns)
            began_ns = ended_ns
        return times_ns

    def _plan(self, until_ns: int) -> Stretch | None:
        return plan_stretch(self.state, self._costs, self._ideal_ns, until_ns)

    def _reach(self, command_ns: int) -> None:
        """End the step that is under way at `command_ns`, and those that should have ended."""
        while self._ideal_ns < command_ns and (stretch := self._plan(command_ns)):
            self._sleep_until_ns(stretch.ends_ns)
            self._complete(stretch)

    def _complete(self, stretch: Stretch) -> None:
        step, times, ends_ns = stretch
        begin_ns, self._ideal_ns = self._ideal_ns, ends_ns
        self._late_ns += max(0, self._now_ns() - ends_ns)
        load = (step.batch, step.kv_tokens, step.prefill_tokens)
        if step.batch:
            one_ns = step_ns(self._costs, *load, step.prefill_pairs)
            self._began_decoding(begin_ns + one_ns)
        grown = step.kv_tokens + step.batch * (times - 1)
        self._beyond |= self._costs.beyond(*load)
        self._beyond |= self._costs.beyond(step.batch, grown, step.prefill_tokens)
        lasts = [chunk.id for chunk in step.chunks if chunk.last]
        self._count(stretch, len(lasts))
        for name in lasts:
            self._open[name].first_ns = ends_ns
        for event in complete_step(self.state, step, ends_ns, times):
            self._on_event(event, begin_ns)
        for name in lasts:
            if request := self.state.requests.get(name):
                self._say(carried(request), ends_ns)
                self._joined.append(name)
        if ends_ns - self._reported_ns >= REPORT_NS:
            self.report()

    def _began_decoding(self, first_ns: int) -> None:
        self._interval_ns = self._interval_ns or first_ns
        for name in self._joined:
            if name in self._open:
                self._open[name].first_ns = first_ns
        self._joined.clear()

    def _count(self, stretch: Stretch, first_tokens: int) -> None:
        step, times, ends_ns = stretch
        tokens = step.batch * times + first_tokens
        self._steps += times
        self._generated += tokens
        self._prefilled += step.prefill_tokens
        self._preemptions += len(step.preempted)
        if tokens:
            self._last_token_ns = ends_ns
            self._first_token_ns = self._first_token_ns or (self._interval_ns or ends_ns)

    def _on_event(self, event: Event, begin_ns: int) -> None:
        if event.what == "preempted":  # before the step: it has no token from it
            self._say(event.request, begin_ns)
        elif event.what == "finished":
            self._say(event.request, event.at_ns, "finished")

    # -- what is told --------------------------------------------------------------------------

    def opened(self, request: Carried, cached_tokens: int = 0) -> None:
        """Tell the output of a request that was submitted, from where it stands."""
        self._open[request.id] = _Open(request.produced_tokens, 0, cached_tokens)
        self._cached += cached_tokens
        self._joined += [request.id] * bool(cached_tokens)

    def ended(self, request: Carried, how: Ended) -> None:
        """Tell the last of a request that was ended by a command, after a `report`."""
        self._say(request, self._ideal_ns, how)

    def report(self) -> None:
        """Tell all output so far."""
        for request in self.state.running:
            if request.status == "decoding":
                self._say(carried(settle(self.state, request)), self._ideal_ns)
        self._reported_ns, self._interval_ns = self._ideal_ns, 0

    def _say(self, request: Carried, last_ns: int, ended: Ended = "") -> None:
        entry = self._open[request.id]
        count = request.produced_tokens - entry.told
        if count or ended:
            self._tell(
                Output(
                    instance=self._instance,
                    id=request.id,
                    start=entry.told,
                    count=count,
                    first_ns=(entry.first_ns or self._interval_ns) if count else last_ns,
                    last_ns=last_ns,
                    ended=ended,
                    version=request.version_last or 0,
                    cached_tokens=entry.cached_tokens,
                )
            )
            entry.cached_tokens = 0
        entry.told, entry.first_ns = request.produced_tokens, 0
        if ended:
            del self._open[request.id]

    def stats(self) -> Stats:
        """Return where it stands; totals since it was made."""
        state = self.state
        return Stats(
            t_ns=self._now_ns(),
            running=len(state.running),
            waiting=len(state.waiting) + len(state.preempted),
            kv_blocks_used=state.blocks_used,
            kv_blocks=state.limits.blocks,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            preemptions=self._preemptions,
            steps=self._steps,
            first_token_ns=self._first_token_ns,
            last_token_ns=self._last_token_ns,
            prefilling=len(state.prefilling),
            late_ns=self._late_ns,
            beyond=tuple(sorted(self._beyond)),
        )
