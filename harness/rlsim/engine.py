"""One instance in virtual time: the life cycle of its requests, jumped from event to event.

It is the paced engine's machine (`harness.model.batching`) with the profile's step times. Commands
act between steps: a step that is under way when one comes ends first. Times in ns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.model.advance import FOREVER_NS, Stretch, plan_stretch
from harness.model.batching import Batching, Step, complete_step, settle
from harness.model.intake import abort_all, export, import_with_kv, pause, resume, submit
from harness.model.placement import Instance
from harness.model.profile import Profile, costs_of
from harness.model.requests import Carried, Event
from harness.model.room import limits_of
from harness.model.steptime import Line, StepCosts
from harness.scheduling.view import Instance as Seen


class Completed(NamedTuple):
    """A stretch that is over: when it began, and what happened at its end."""

    begin_ns: int
    stretch: Stretch
    events: list[Event]


@dataclass(eq=False)
class Engine:
    """An instance, and the stretch of steps that it is in."""

    instance: Instance
    state: Batching
    costs: StepCosts
    now_ns: int
    """End of the last step that is complete."""
    tokens: int = 0
    """Produced here, each once."""
    busy_ns: int = 0
    _stretch: Stretch | None = None
    _planned: bool = False
    _bound: bool = False
    """The stretch is one step that was under way when a request came: it can't be cut."""
    _yield: tuple[int, int] = field(default=(0, 0))

    @classmethod
    def up(
        cls,
        instance: Instance,
        profile: Profile,
        now_ns: int,
        *,
        sequences_max: int,
        step_max_tokens: int,
        kv_max_tokens: int = 0,
    ) -> Engine:
        """Bring an empty one up. Raises `UsageError` where the layout does not fit."""
        limits = limits_of(
            profile,
            instance.layout,
            sequences_max=sequences_max,
            step_max_tokens=step_max_tokens,
            kv_max_tokens=kv_max_tokens,
        )
        return cls(instance, Batching(limits), costs_of(profile, instance.layout), now_ns)

    @property
    def name(self) -> str:
        """In the fleet."""
        return self.instance.name

    @property
    def kv_capacity_tokens(self) -> int:
        """What its KV cache holds."""
        return self.state.limits.blocks * self.state.limits.block_tokens

    @property
    def length_max_tokens(self) -> int:
        """The longest request that it can hold; the last token needs no KV."""
        return min(self.state.limits.length_max_tokens, self.kv_capacity_tokens + 1)

    @property
    def waiting(self) -> int:
        """Requests without a seat."""
        return len(self.state.waiting) + len(self.state.preempted)

    @property
    def due_ns(self) -> int:
        """When something happens here next."""
        if not self._planned:
            self._stretch = plan_stretch(self.state, self.costs, self.now_ns)
            self._planned = True
        return self._stretch.ends_ns if self._stretch else FOREVER_NS

    def known_tokens(self, now_ns: int) -> int:
        """Return context and output of all its requests at `now_ns`, without stopping them."""
        state, due_ns = self.state, self.due_ns
        queued = (*state.waiting.values(), *state.preempted, *state.prefilling)
        known = state.kv_tokens + sum(request.known_tokens for request in queued)
        if self._stretch is None or due_ns <= self.now_ns:
            return known
        share = max(0, now_ns - self.now_ns) / (due_ns - self.now_ns)
        return known + round(self._stretch.step.batch * self._stretch.times * share)

    def complete(self) -> Completed:
        """Make the stretch that it is in true: it is over, and the next begins at its end."""
        assert self.due_ns < FOREVER_NS
        assert self._stretch is not None
        begin_ns, stretch = self.now_ns, self._stretch
        step, times, ends_ns = stretch
        events = complete_step(self.state, step, ends_ns, times)
        self.tokens += step.batch * times + sum(chunk.last for chunk in step.chunks)
        self.busy_ns += ends_ns - begin_ns
        self.now_ns, self._planned, self._bound = ends_ns, False, False
        return Completed(begin_ns, stretch, events)

    def reach(self, now_ns: int) -> list[Event]:
        """Complete the steps up to the one that is under way at `now_ns`, and that one."""
        events: list[Event] = []
        while (ends_ns := self.due_ns) < FOREVER_NS and (
            self.now_ns < now_ns or ends_ns == self.now_ns <= now_ns
        ):
            self.cut(now_ns)
            events += self.complete().events
        return events

    def cut(self, now_ns: int) -> None:
        """Shorten the stretch so that it ends with the step that is under way at `now_ns`."""
        if not self._bound and self.due_ns > now_ns:
            self._stretch = plan_stretch(self.state, self.costs, self.now_ns, now_ns)

    def shorten(self, now_ns: int) -> bool:
        """Leave, of a stretch that lasts beyond `now_ns`, the steps that have ended by then.

        Returns whether there are any; where there are none, it stays as it is.
        """
        if self._bound or not self.now_ns < now_ns < self.due_ns < FOREVER_NS:
            return False
        assert self._stretch is not None
        step, times, _ = self._stretch
        line = self.costs.line(step.batch, step.kv_tokens, step.prefill_tokens, step.prefill_pairs)
        ended = _ended(line, step, times, now_ns - self.now_ns)
        if ended:
            lasts_ns = line.steps_ns(step.kv_tokens, step.batch, ended)
            self._stretch = Stretch(step, ended, self.now_ns + lasts_ns)
        return ended > 0

    def stand(self, now_ns: int) -> None:
        """Let commands be given to `state` now, between steps; where it idled it begins anew."""
        self.now_ns, self._planned = max(self.now_ns, now_ns), False

    def hold(self) -> None:
        """Make no steps, between steps, until `go_on`: the device does something else."""
        pause(self.state)
        self._planned = False

    def go_on(self, now_ns: int) -> None:
        """Begin to make steps again."""
        resume(self.state)
        self.stand(now_ns)

    def submit(self, carried: Carried, now_ns: int) -> None:
        """Queue a request; a step that is under way is not disturbed."""
        if self.due_ns == FOREVER_NS or self.now_ns >= now_ns:
            self.stand(now_ns)
        else:
            self.cut(now_ns)
            self._bound = True
        submit(self.state, carried)

    def take_over(self, carried: Carried, now_ns: int) -> list[Event]:
        """Go on with a request that comes with its KV, or queue it where there is no room."""
        events = self.reach(now_ns)
        self.stand(now_ns)
        try:
            import_with_kv(self.state, carried)
        except UsageError:
            submit(self.state, carried)
        return events

    def hand_over(self, id_: str) -> Carried | None:
        """Let a request go, between steps; None where it is not here any more."""
        self._planned = False
        return export(self.state, id_)

    def end(self) -> list[Carried]:
        """Let all requests go, oldest first."""
        self._planned = False
        return abort_all(self.state)

    def produced(self, id_: str) -> tuple[int, bool]:
        """Return what a request has produced of its turn, and whether it has a seat."""
        request = settle(self.state, self.state.requests[id_])
        return request.produced_tokens, request.status in ("prefilling", "decoding")

    def seen(self) -> Seen:
        """Return it as policies see it; its speed is that of the time since it was last seen."""
        tokens, busy_ns = self.tokens - self._yield[0], self.busy_ns - self._yield[1]
        self._yield = self.tokens, self.busy_ns
        state = self.state
        return Seen(
            name=self.name,
            node=self.name.rpartition(":")[0],
            layout=self.instance.layout,
            accepting=True,
            sequences_max=state.limits.sequences_max,
            kv_capacity_tokens=self.kv_capacity_tokens,
            kv_used_tokens=state.blocks_used * state.limits.block_tokens,
            running=len(state.running),
            waiting=self.waiting,
            tokens_per_s=tokens * NS_PER_S / busy_ns if busy_ns else 0.0,
            length_max_tokens=self.length_max_tokens,
        )


def _ended(line: Line, step: Step, times: int, after_ns: int) -> int:
    """Return how many of these equal steps on end, of which not all have, end within `after_ns`.

    Each lasts as long as the one before or longer, which bounds it from both sides.
    """
    longest_ns = line.step_ns(step.kv_tokens + step.batch * (times - 1))
    low = after_ns // max(1, longest_ns)
    high = min(times - 1, after_ns // max(1, line.step_ns(step.kv_tokens)))
    while low < high:
        middle = (low + high + 1) // 2
        if line.steps_ns(step.kv_tokens, step.batch, middle) <= after_ns:
            low = middle
        else:
            high = middle - 1
    return low
