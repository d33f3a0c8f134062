"""From event to event: run an engine's requests through virtual time, or tell how long to wait.

`plan_stretch` finds the longest run of equal steps until something happens (a finish, KV running
out, the time the caller asks for) and its exact end; the paced engine waits for that end, the
simulator jumps to it. Both then complete it, and end where stepping one by one would have ended, to
the nanosecond: step times are lines (`harness.model.steptime`), so their sum is exact. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from harness.model.batching import Batching, Step, complete_step, plan_step, steps_alike
from harness.model.requests import Event
from harness.model.steptime import Line, StepCosts

FOREVER_NS = 2**63 - 1


class Stretch(NamedTuple):
    """`times` equal steps on end, and when the last of them ends."""

    step: Step
    times: int
    ends_ns: int


@dataclass(slots=True)
class Advance:
    """Where an engine stands after `advance_until`.

    `now_ns` is the end of the first step that ends at or after the time asked for (a step under way
    is not cut short), or that time itself where the engine was idle. `beyond` tells how step times
    were extrapolated.
    """

    now_ns: int
    idle: bool = False
    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    events: list[Event] = field(default_factory=list)
    beyond: frozenset[str] = frozenset()


def plan_stretch(
    state: Batching, costs: StepCosts, now_ns: int, until_ns: int = FOREVER_NS
) -> Stretch | None:
    """Return the next stretch; None where nothing runs.

    It ends with an event, or as soon as `until_ns` is reached: whichever is first. Planning again
    with an earlier `until_ns`, for a command that has come, is safe: nothing has changed yet.
    """
    step = plan_step(state)
    if step is None:
        return None
    if not step.batch and not step.chunks:  # only preemption, which takes no time on the GPU
        return Stretch(step, 1, now_ns)
    line = costs.line(step.batch, step.kv_tokens, step.prefill_tokens, step.prefill_pairs)
    times = steps_alike(state, step)
    if line.kv_until is not None and times > 1:
        times = max(1, min(times, (line.kv_until - step.kv_tokens) // step.batch + 1))
    lasts_ns = line.steps_ns(step.kv_tokens, step.batch, times)
    if times > 1 and now_ns + lasts_ns > until_ns:
        times = _steps_to_reach(line, step, times, until_ns - now_ns)
        lasts_ns = line.steps_ns(step.kv_tokens, step.batch, times)
    return Stretch(step, times, now_ns + lasts_ns)


def advance_until(
    state: Batching,
    costs: StepCosts,
    now_ns: int,
    until_ns: int = FOREVER_NS,
    *,
    first_event: bool = False,
) -> Advance:
    """Run from `now_ns` until `until_ns`, or with `first_event` until something happened.

    Returns at once where the engine is idle or paused (``idle``); then `now_ns` is `until_ns`,
    unless that is for ever.
    """
    done = Advance(now_ns)
    while done.now_ns < until_ns and not (first_event and done.events):
        stretch = plan_stretch(state, costs, done.now_ns, until_ns)
        if stretch is None:
            done.idle = True
            done.now_ns = until_ns if until_ns != FOREVER_NS else done.now_ns
            break
        step, times, done.now_ns = stretch
        grown = step.kv_tokens + step.batch * (times - 1)
        for kv_tokens in {step.kv_tokens, grown}:
            if found := costs.beyond(step.batch, kv_tokens, step.prefill_tokens):
                done.beyond |= found
        done.events += complete_step(state, step, done.now_ns, times)
        done.steps += times
        done.decoded_tokens += step.batch * times
        done.prefilled_tokens += step.prefill_tokens
    return done


def _steps_to_reach(line: Line, step: Step, most: int, wanted_ns: int) -> int:
    """Return the fewest steps that take at least `wanted_ns`, from 1 to `most`."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if line.steps_ns(step.kv_tokens, step.batch, middle) >= wanted_ns:
            high = middle
        else:
            low = middle + 1
    return low
