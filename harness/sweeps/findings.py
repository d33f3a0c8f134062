"""What follows from a sweep, plainly: who wins where, where optics lose, and by how much. Pure.

Every sentence is made of numbers by a rule; none is written beforehand. Two designs differ where
the 95 % interval of their ratio leaves 1 out, and by 0.1 % at least; of one seed there is no
interval, and they differ by 1 % at least. A bound (an ideal switch) is compared with, but wins
nothing: it cannot be bought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.sweeps.grid import Place
from harness.sweeps.point import Scalar
from harness.sweeps.results import Estimate, Result, at, by_place, ratio
from harness.sweeps.sweep import Sweep
from harness.sweeps.table import COUNT, NAME, RATIO, stem_of, told, unit_of

MERITS: Mapping[str, str] = {
    "performance": "performance itself",
    "per_network_usd": "performance per network $",
    "per_usd": "performance per $ with GPUs",
    "per_network_w": "performance per network W",
    "per_w": "performance per W with GPUs",
}
SWITCHING = "switching_ms"
Versus = list[tuple[Estimate, Result]]
"""A design over the best other one, and that one."""
Values = dict[str, tuple[Scalar, ...]]
"""By axis: several places in one."""
DETAIL = "  "
"""How lines begin that tell places one by one."""
LEAST, LEAST_OF_ONE_SEED = 0.001, 0.01
"""How far from 1 a ratio must be that is told apart, at least."""
NO_UNITS = (COUNT, NAME, RATIO)


class Contest(NamedTuple):
    """The best two by a merit at a place, and how many times the second's the first has."""

    place: Place
    first: Result
    second: Result | None
    lead: Estimate | None


def conclusions(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """Return all of it as lines."""
    lines = [sweep.question, "", *_basis(sweep, results)]
    if not any(result.performance for result in results):
        return lines
    for merit, title in MERITS.items():
        lines += ["", f"## By {title}", "", *_winners(results, merit)]
    optical = [name for name, design in sweep.designs.items() if design.kind == "optical"]
    for name in optical:
        lines += ["", f"## {name} against the best electrical design", ""]
        lines += _against_electrical(results, name)
        if SWITCHING in sweep.axes and SWITCHING not in sweep.designs[name].ignores:
            lines += ["", *_slowest_switch(results, name, sweep.baseline)]
    lines += ["", "## Which divisor", "", *_divisors(results)]
    return lines


# -- what it rests on ------------------------------------------------------------------------------


def _basis(sweep: Sweep, results: Sequence[Result]) -> Iterator[str]:
    good = sum(1 for result in results if result.performance)
    seeds = len(sweep.seeds)
    yield (
        f"Simulated: {good} of {len(results)} combinations have a result, of {seeds} "
        f"seed{'s' if seeds > 1 else ', so without a spread'}."
    )
    yield f"Performance is {sweep.performance}; gains are over {sweep.baseline}."
    if seeds == 1:
        yield "Of one seed, what differs by less than 1 % is not told apart."
    else:
        yield "±: half of the 95 % interval over seeds, designs compared seed by seed."
    yield f"A GPU counts as ${sweep.gpu_usd:,.0f} and {sweep.gpu_w:,.0f} W, where it is counted."
    notes = (note for result in results if result.bill for note in result.bill.notes)
    yield from dict.fromkeys(notes)
    for what, texts in (
        ("failed", (error for result in results for error in result.errors)),
        ("without a price", (doubt for result in results for doubt in result.doubts)),
        ("note", (note for result in results for note in result.notes)),
    ):
        for text, count in Counter(texts).items():
            yield f"{what} ({count} times): {text}" if count > 1 else f"{what}: {text}"


# -- who wins where --------------------------------------------------------------------------------


def contests(results: Sequence[Result], merit: str) -> Iterator[Contest]:
    """Yield the best two of each place; a place where nobody has the merit is left out."""
    for there in by_place(results):
        ranked = sorted(
            (result for result in there if result.kind != "bound" and result.merit(merit)),
            key=lambda result: -_merit(result, merit),
        )
        if ranked:
            second = ranked[1] if len(ranked) > 1 else None
            lead = ratio(ranked[0], second, merit) if second else None
            yield Contest(ranked[0].place, ranked[0], second, lead)


def _merit(result: Result, merit: str) -> float:
    found = result.merit(merit)
    assert found is not None
    return found.value


def differs(lead: Estimate | None) -> bool:
    """Whether a ratio can be told from 1."""
    if lead is None:
        return False
    least = LEAST if lead.n > 1 else LEAST_OF_ONE_SEED
    return abs(lead.value - 1) > max(lead.plus_minus or 0.0, least)


def _winners(results: Sequence[Result], merit: str) -> Iterator[str]:
    found = list(contests(results, merit))
    if not found:
        yield "Nobody has a figure."
        return
    wins = Counter(each.first.design for each in found if differs(each.lead))
    for design, count in wins.most_common():
        leads = sorted(
            each.lead.value for each in found
            if each.first.design == design and differs(each.lead) and each.lead
        )  # fmt: skip
        yield (
            f"{design} leads at {count} of {len(found)} places, "
            f"by {_percent(leads[0])} to {_percent(leads[-1])}."
        )
    if even := len(found) - wins.total():
        yield f"At {even} of {len(found)} places the first two cannot be told apart."
    yield ""
    yield from together((each.place, _told(each)) for each in found)


def _told(contest: Contest) -> str:
    first, second, lead = contest.first.design, contest.second, contest.lead
    if second is None or lead is None:
        return f"{first}, alone"
    if not differs(lead):
        return f"{first} and {second.design} alike ({told(lead)} x)"
    return f"{first}, {told(lead)} x {second.design}"


# -- where optics lose -----------------------------------------------------------------------------


def _against_electrical(results: Sequence[Result], name: str) -> Iterator[str]:
    """Yield, by merit, where a design wins and loses against the best electrical one there."""
    for merit, title in MERITS.items():
        won: Versus = []
        lost: Versus = []
        even = 0
        for there in by_place(results):
            ours = at(there, name)
            rivals = [r for r in there if r.kind == "electrical" and r.merit(merit)]
            if ours is None or not ours.merit(merit) or not rivals:
                continue
            best = max(rivals, key=lambda result: _merit(result, merit))
            versus = ratio(ours, best, merit)
            if versus is None or not differs(versus):
                even += 1
            else:
                (won if versus.value > 1 else lost).append((versus, best))
        places = len(won) + len(lost) + even
        if not places:
            yield f"By {title}: nothing to compare."
            continue
        yield f"By {title}, of {places} places: {_score(won, lost, even)}."
        yield from together(
            (best.place, f"loses, {told(versus)} x {best.design}") for versus, best in lost
        )


def _score(won: Versus, lost: Versus, even: int) -> str:
    parts = []
    for what, versus in (("wins", won), ("loses", lost)):
        if versus:
            values = sorted(estimate.value for estimate, _ in versus)
            parts.append(f"{what} at {len(versus)} ({values[0]:.3g} to {values[-1]:.3g} x)")
    if even:
        parts.append(f"cannot be told apart at {even}")
    return ", ".join(parts)


def _slowest_switch(results: Sequence[Result], name: str, baseline: str) -> Iterator[str]:
    """Yield, for places all alike but for the switching time, the longest that still pays."""
    gains: dict[str, list[tuple[float, Estimate]]] = {}
    for there in by_place(results):
        ours, theirs = at(there, name), at(there, baseline)
        if ours and theirs and (gain := ratio(ours, theirs)):
            rest = {axis: value for axis, value in ours.place.items() if axis != SWITCHING}
            switching_ms = float(ours.place[SWITCHING])
            gains.setdefault(spoken(rest) or "everywhere", []).append((switching_ms, gain))
    longest = {where: _last_ahead(found) for where, found in gains.items()}
    counts = Counter(
        "never" if best is None else f"up to {best[0]:g} ms" for best in longest.values()
    )
    score = ", ".join(f"{limit} at {count}" for limit, count in counts.items())
    yield f"Ahead of {baseline}, by switching time, at {len(longest)} places: {score or 'nowhere'}."
    for where, best in longest.items():
        if best is None:
            most = max((gain for _, gain in gains[where]), key=lambda gain: gain.value)
            yield f"{DETAIL}{where}: never, {told(most)} x at best"
        else:
            asked_ms = max(ms for ms, _ in gains[where])
            yield f"{DETAIL}{where}: up to {best[0]:g} of {asked_ms:g} ms, {told(best[1])} x there"


def _last_ahead(gains: list[tuple[float, Estimate]]) -> tuple[float, Estimate] | None:
    """Return the longest switching time up to which every one asked pays; None: not the first."""
    last = None
    for switching_ms, gain in sorted(gains, key=lambda each: each[0]):
        if gain.value <= 1 or not differs(gain):
            break
        last = (switching_ms, gain)
    return last


# -- which divisor ---------------------------------------------------------------------------------


def _divisors(results: Sequence[Result]) -> Iterator[str]:
    """Yield where the network alone and the whole cluster name different winners."""
    network, cluster = contests(results, "per_network_usd"), contests(results, "per_usd")
    both = [(one, other) for one, other in zip(network, cluster, strict=True)]
    if not both:
        yield "No design has a price."
        return
    apart = [(one, other) for one, other in both if one.first.design != other.first.design]
    yield (
        "With GPUs in the divisor, another design is the first than with the network's price "
        f"alone at {len(apart)} of {len(both)} places."
    )
    yield from together(
        (one.place, f"{one.first.design} by the network alone, {other.first.design} with GPUs")
        for one, other in apart
    )


def spoken(place: Place) -> str:
    """Write a place: ``gpus 1024, link 400 Gbit/s``."""
    return ", ".join(_axis(axis, (value,)) for axis, value in place.items())


def _axis(axis: str, values: Sequence[Scalar]) -> str:
    unit = unit_of(axis)
    shown = "/".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{stem_of(axis)} {shown}{'' if unit in NO_UNITS else f' {unit}'}"


def together(said: Iterable[tuple[Place, str]]) -> Iterator[str]:
    """Yield a line for each thing said, those of places that differ in one axis as one."""
    merged: list[tuple[Values, str]] = [
        ({axis: (value,) for axis, value in place.items()}, text) for place, text in said
    ]
    for axis in reversed(merged[0][0]) if merged else ():
        alike: dict[object, tuple[Values, str]] = {}
        for place, text in merged:
            rest = (text, *(found for other, found in place.items() if other != axis))
            before, _ = alike.get(rest, ({**place, axis: ()}, text))
            alike[rest] = ({**before, axis: (*before[axis], *place[axis])}, text)
        merged = list(alike.values())
    for place, text in merged:
        where = ", ".join(_axis(axis, found) for axis, found in place.items())
        yield f"{DETAIL}{where}: {text}"


def _percent(lead: float) -> str:
    return f"{100 * (lead - 1):.1f} %"
