"""What an instance of a layout yields, tokens/s: by its profile, else as measured so far. Pure.

The profile knows the step time at each batch. Without one, an instance is taken to yield what the
best of its layout was seen to yield, whatever its batch is now: a lightly loaded one yields little
because it is lightly loaded, and must not be avoided for it. Unknown layouts start equal.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.clock import NS_PER_S
from harness.model.layout import Layout
from harness.model.profile import Profile, costs_of
from harness.model.steptime import StepCosts, step_ns


class Speeds:
    """Expected speeds of one model on one kind of GPU."""

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._costs: dict[Layout, StepCosts] = {}
        self._seen: dict[Layout, float] = {}

    @property
    def seen(self) -> Mapping[Layout, float]:
        """What the best instance of each layout has yielded, tokens/s."""
        return dict(self._seen)

    def measured(self, layout: Layout, tokens_per_s: float) -> None:
        """Note what an instance yielded for a while."""
        self._seen[layout] = max(tokens_per_s, self._seen.get(layout, 0.0))

    def expected(self, layout: Layout, batch: int, kv_tokens: int) -> float:
        """Return tokens/s of an instance that decodes `batch` sequences over `kv_tokens`."""
        if self._profile is None:
            return self._seen.get(layout) or max(self._seen.values(), default=0.0) or 1.0
        if layout not in self._costs:
            self._costs[layout] = costs_of(self._profile, layout)
        return batch * NS_PER_S / max(1, step_ns(self._costs[layout], batch, kv_tokens))
