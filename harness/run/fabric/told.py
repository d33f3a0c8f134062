"""The rows of the fabric's controller: what it decided, what it changed, what broke."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from harness.clock import NS_PER_MS
from harness.fabric.decision import Decision
from harness.fabric.links import Link
from harness.model.streams import STAGES
from harness.run.change import Change
from harness.run.fabric.traffic import Crossed


def decision_row(
    kind: str, sent_bytes: float, decided: Decision, solve_ms: float | None
) -> dict[str, object]:
    """Return the row of one decision; times are predictions."""
    numbers = decided.numbers
    return {
        "kind": kind,
        "action": decided.action,
        "reason": decided.reason,
        "bytes": round(sent_bytes),
        "window_ms": None if numbers.window_ns is None else numbers.window_ns / NS_PER_MS,
        "needed_ms": numbers.needed_ns / NS_PER_MS,
        "keep_ms": numbers.keep_ns / NS_PER_MS,
        "change_ms": numbers.total_ns / NS_PER_MS,
        "electrical_ms": numbers.electrical_ns / NS_PER_MS,
        "circuits": names(decided.plan.links),
        "unserved": [f"{a}-{b}" for a, b in decided.plan.unserved],
        "solve_ms": solve_ms,
    }


def change_row(lit: Collection[Link], change: Change, took_ns: int) -> dict[str, object]:
    """Return the row of a change of circuits, with what is lit after it."""
    return {
        "stages": {name: change.stamps.get(name) for name in STAGES},
        "device_ms": change.device_ns / NS_PER_MS,
        "total_ms": took_ns / NS_PER_MS,
        "moved": len(change.moved),
        "kept": len(change.kept),
        "lit": names(lit),
        "outcome": "degraded" if change.failures else "changed",
        "error": "; ".join(change.failures.values()),
    }


def failed_row(lit: Collection[Link], took_ns: int, error: str) -> dict[str, object]:
    """Return the row of a change that could not begin."""
    return {
        "stages": dict.fromkeys(STAGES),
        "device_ms": None,
        "total_ms": took_ns / NS_PER_MS,
        "moved": 0,
        "kept": len(lit),
        "lit": names(lit),
        "outcome": "failed",
        "error": error,
    }


def traffic_row(
    kind: str, announced_bytes: float, crossed: Crossed | None, took_ns: int
) -> dict[str, object]:
    """Return the row of a part of a step's traffic; null where nobody counts."""
    return {
        "kind": kind,
        "announced_bytes": round(announced_bytes),
        "measured_bytes": None if crossed is None else round(float(crossed.sent.sum())),
        "circuits_bytes": None if crossed is None else round(crossed.by_circuits),
        "took_ms": took_ns / NS_PER_MS,
    }


def part_row(part: str, state: str, reason: str) -> dict[str, object]:
    """Return the row of a part that broke, or is used again."""
    return {"part": part, "state": state, "reason": reason}


def names(links: Iterable[Link]) -> list[str]:
    """Return links as a reader knows them."""
    return [str(link) for link in sorted(links)]
