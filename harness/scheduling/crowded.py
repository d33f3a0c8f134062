"""An instance whose KV does not hold all of its requests at once: who sits when. Pure.

It is followed from event to event as the engine lives (`harness.model.batching`): first come first
served; a request sits down where KV is free for all it knows; when a decode finds no room, the
youngest gives up its KV and waits ahead of all others, to be computed anew. Steps of a token each;
units: tokens, steps, seconds.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness.scheduling.view import Floats

if TYPE_CHECKING:
    from harness.scheduling.compute import Costs


class Crowded(NamedTuple):
    """When each ends, in steps, and begins if it were never interrupted; and the time of steps."""

    starts: Floats
    ends: Floats
    steps: Floats
    time_s: Floats


def crowded(
    costs: Costs,
    sequences_max: int,
    remaining: Floats,
    context: Floats,
    prefill_s: tuple[Floats, Floats],
) -> Crowded:
    """Follow these requests in their order; each fits the KV alone.

    `prefill_s`: what each computes first, and in later turns, which is paid while it decodes.
    """
    sitting = _Sitting(costs, sequences_max, remaining, context, prefill_s)
    while sitting.waiting or sitting.ends_at:
        sitting.admit()
        sitting.advance()
    ends = sitting.ends
    return Crowded(ends - remaining, ends, np.array(sitting.steps), np.array(sitting.time_s))


class _Sitting:
    """Who sits, who waits, and how far it has come. Requests are known by their rows."""

    def __init__(
        self,
        costs: Costs,
        sequences_max: int,
        remaining: Floats,
        context: Floats,
        prefill_s: tuple[Floats, Floats],
    ) -> None:
        first_s, later_s = prefill_s
        self._costs, self._seats = costs, sequences_max
        self._fixed_s, self._kv_s = costs.fixed_s.tolist(), costs.kv_token_s.tolist()
        self._left, self._context = remaining.tolist(), context.tolist()
        self._length, self._first_s = remaining.tolist(), first_s.tolist()
        self._beside_s = (later_s / np.maximum(remaining, 1.0)).tolist()
        self.waiting = list(range(len(remaining)))
        """The oldest goes first, whoever has sat before too: a heap."""
        self.ends_at: list[tuple[float, int]] = []
        """When who sits will end: a heap. Who gave up is still in it, with another time."""
        self._young: list[int] = []
        """Who sits, the youngest first: a heap of negated rows."""
        self._until: dict[int, float] = {}
        self._kv_tokens = self._more_s = 0.0
        self.ends = np.zeros(len(remaining))
        self.steps, self.time_s = [0.0], [0.0]

    def admit(self) -> None:
        """Seat who waits while there is a seat, and KV for what it knows and the next step."""
        step, paid_s = self.steps[-1], 0.0
        while self.waiting and len(self._until) < self._seats:
            row = self.waiting[0]
            known = self._context[row] + self._length[row] - self._left[row]
            room = self._costs.kv_capacity_tokens - self._kv_tokens - len(self._until) - known
            if self._until and room < 1:
                break
            heapq.heappop(self.waiting)
            paid_s += self._first_s[row]
            self._kv_tokens += known
            self._more_s += self._beside_s[row]
            self._until[row] = step + self._left[row]
            heapq.heappush(self.ends_at, (self._until[row], row))
            heapq.heappush(self._young, -row)
        self._note(step, paid_s)

    def advance(self) -> None:
        """Go on until somebody ends, or the youngest must give up its KV."""
        while self._until.get(self.ends_at[0][1]) != self.ends_at[0][0]:
            heapq.heappop(self.ends_at)
        batch, step = len(self._until), self.steps[-1]
        room = (self._costs.kv_capacity_tokens - self._kv_tokens) // batch
        steps = min(self.ends_at[0][0] - step, max(room, 0.0) if batch > 1 else np.inf)
        mean_tokens = self._kv_tokens + batch * (steps + 1) / 2
        step_s = self._fixed_s[batch] + self._kv_s[batch] * mean_tokens + self._more_s
        self._kv_tokens += steps * batch
        self._note(step + steps, steps * step_s)
        if step + steps < self.ends_at[0][0]:
            self._give_up()
            return
        while self.ends_at and self.ends_at[0][0] <= step + steps:
            until, row = heapq.heappop(self.ends_at)
            if self._until.get(row) == until:
                self.ends[row] = until
                self._left[row] = 0.0
                self._leave(row)

    def _give_up(self) -> None:
        """Let the youngest that sits wait again, to be computed anew."""
        while -self._young[0] not in self._until:
            heapq.heappop(self._young)
        row = -heapq.heappop(self._young)
        self._left[row] = self._until[row] - self.steps[-1]
        self._leave(row)
        known = self._context[row] + self._length[row] - self._left[row]
        self._first_s[row] = float(self._costs.prefill_s(np.asarray(known)))
        heapq.heappush(self.waiting, row)

    def _leave(self, row: int) -> None:
        self._kv_tokens -= self._context[row] + self._length[row] - self._left[row]
        self._more_s -= self._beside_s[row]
        del self._until[row]

    def _note(self, step: float, lasts_s: float) -> None:
        self.steps.append(step)
        self.time_s.append(self.time_s[-1] + lasts_s)
