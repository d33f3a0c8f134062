"""How far the times of an emulated run are the machine's own: samples, and words for them. Pure.

Emulators call this fidelity monitoring: where tasks wait for a CPU, what they do takes longer than
the links and devices that are emulated would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.model.documents import Event, Metric
from harness.model.listing import first
from harness.model.metrics import parse_metric
from harness.record.loops import places_of

WAITED = "bench.cpu_waited_pct"
SHORT_PCT = 25.0
"""A reader is warned of more."""
TOLD = 8
"""Steps, or arms of one, that are told by name."""


def pressure_samples(
    events: Sequence[Event],
) -> Iterator[tuple[str, dict[str, object], list[float | None]]]:
    """Yield the shares by the step's place in the scenario, and by policy where it has some."""
    places = places_of(events)
    for event in events:
        if event.stream == "pressure":
            number, policy = event.data["step"], event.data["policy"]
            place, _ = places.get(number, (number, 0))
            labels = {"step": place, "policy": policy} if policy else {"step": place}
            yield WAITED, labels, [event.data["cpu_waited_pct"]]


def cpu_waited(metrics: Mapping[str, Metric]) -> list[str]:
    """Return one line for the report, or none: the share of each step."""
    found = [f"{where} {share:.0f} %" for where, share in _shares(metrics)]
    return [f"time in which a task waited for a CPU: {first(found, TOLD, ', ')}"] if found else []


def short_of_cpu(metrics: Mapping[str, Metric]) -> list[str]:
    """Return one warning, worst step first, or none where cores were not short."""
    short = [found for found in _shares(metrics) if found[1] > SHORT_PCT]
    if not short:
        return []
    worst = sorted(short, key=lambda found: -found[1])
    told = first((f"{share:.0f} % of {where}" for where, share in worst), TOLD, ", ")
    warning = (
        f"a task waited for a CPU in {told}: times there may be partly this machine's, not the "
        "bench's; slow the bench down ([links] link_mbit_per_s, [generation] speed) or use more "
        "cores"
    )
    return [warning]


def _shares(metrics: Mapping[str, Metric]) -> list[tuple[str, float]]:
    """Return where and how much, in %, in the order of steps."""
    found = []
    for name, metric in metrics.items():
        base, labels = parse_metric(name)
        if base == WAITED:
            found.append((int(labels["step"]), labels.get("policy", ""), metric.value))
    return [
        (f"step {step} ({policy})" if policy else f"step {step}", share)
        for step, policy, share in sorted(found)
    ]
