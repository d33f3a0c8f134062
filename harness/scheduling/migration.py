"""How a request is moved: its KV is sent along, or computed anew where it goes. Pure.

A table of what moves really took, keyed by the layouts of source and target and by the length of
the context in powers of two. Where nothing was measured yet, an estimate stands: bytes over the
link's rate, or the time to prefill. Times are ms, from the withdrawal to the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.clock import NS_PER_MS
from harness.model.layout import Layout
from harness.model.profile import Profile, costs_of
from harness.model.steptime import step_ns

By = Literal["kv", "recompute"]
BYS: tuple[By, ...] = ("kv", "recompute")
LATEST_WEIGHT = 0.2
"""Least weight of a new measurement, so that the table follows a bench that changes."""


class Key(NamedTuple):
    """A row of the table; layouts are those of one instance, such as ``1xTP2``."""

    source: str
    target: str
    bucket: int
    """Context of less than ``2 ** bucket`` tokens, and not less than half of that."""


class Choice(NamedTuple):
    """How to move, and what either way is expected to take; null: impossible, or unknown."""

    by: By
    expected_ms: dict[By, float | None]


Estimate = Callable[[Layout, Layout, int], float | None]
"""``(source, target, context_tokens)`` -> ms; null: unknown."""


@dataclass
class _Mean:
    ms: float
    count: int = 1

    def add(self, ms: float) -> None:
        self.count += 1
        self.ms += (ms - self.ms) * max(1 / self.count, LATEST_WEIGHT)


class Costs:
    """The table, and the estimates that it begins with."""

    def __init__(self, estimates: dict[By, Estimate]) -> None:
        self._estimates = estimates
        self._measured: dict[tuple[Key, By], _Mean] = {}

    def expected_ms(
        self, source: Layout, target: Layout, context_tokens: int, by: By
    ) -> float | None:
        """Return what such moves took on average so far, else the estimate."""
        if known := self._measured.get((key_of(source, target, context_tokens), by)):
            return known.ms
        return self._estimates[by](source, target, context_tokens)

    def measured(
        self, source: Layout, target: Layout, context_tokens: int, by: By, ms: float
    ) -> None:
        """Learn from a move."""
        key = key_of(source, target, context_tokens), by
        if key in self._measured:
            self._measured[key].add(ms)
        else:
            self._measured[key] = _Mean(ms)


def key_of(source: Layout, target: Layout, context_tokens: int) -> Key:
    """Return the row of a move."""
    return Key(str(source), str(target), context_tokens.bit_length())


def choose(
    costs: Costs,
    source: Layout,
    target: Layout,
    context_tokens: int,
    *,
    kv_possible: bool,
    wanted: Literal["auto", "kv", "recompute"] = "auto",
) -> Choice:
    """Choose how to move a request, unless it is said (`wanted`); without KV it is recomputed.

    Of two ways of which one is unknown, sending KV is tried: then both come to be known.
    """
    expected: dict[By, float | None] = {
        by: costs.expected_ms(source, target, context_tokens, by) for by in BYS
    }
    if not kv_possible or wanted == "recompute":
        return Choice("recompute", expected if kv_possible else expected | {"kv": None})
    kv_ms, recompute_ms = expected["kv"], expected["recompute"]
    slower = kv_ms is not None and recompute_ms is not None and kv_ms > recompute_ms
    return Choice("recompute" if wanted == "auto" and slower else "kv", expected)


def estimates_of(
    profile: Profile | None, bytes_scale: float, link_bytes_per_s: float
) -> dict[By, Estimate]:
    """Return the first estimates by a latency profile; without one, nothing is known.

    KV of `bytes_scale` of its real size goes over one link between two nodes.
    """
    if profile is None:
        return {"kv": _unknown, "recompute": _unknown}
    kv_bytes_per_token = profile.shape.kv_bytes_per_token * bytes_scale

    def send_ms(source: Layout, target: Layout, context_tokens: int) -> float:
        del source
        sent_ms = context_tokens * kv_bytes_per_token / link_bytes_per_s * 1e3
        return sent_ms + step_ns(costs_of(profile, target), 1, context_tokens) / NS_PER_MS

    def prefill_ms(source: Layout, target: Layout, context_tokens: int) -> float:
        del source
        pairs = context_tokens * (context_tokens + 1) // 2
        return step_ns(costs_of(profile, target), 0, 0, context_tokens, pairs) / NS_PER_MS

    return {"kv": send_ms, "recompute": prefill_ms}


def _unknown(source: Layout, target: Layout, context_tokens: int) -> None:
    del source, target, context_tokens
