"""What follows from a sweep, plainly: who wins where, where optics lose, and by how much. Pure.

Every sentence is made of numbers by a rule; none is written beforehand. Two designs differ where
the 95 % interval of their ratio leaves 1 out; where there is one seed there is no interval, and
that is said. A bound (an ideal switch) is compared with, but wins nothing: it cannot be bought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.sweeps.grid import Place
from harness.sweeps.results import Estimate, Result, at, by_place, ratio
from harness.sweeps.sweep import Sweep
from harness.sweeps.table import told, unit_of

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
DETAIL = "  "
"""How lines begin that tell places one by one."""
SAME = 1e-9
"""Ratios that differ from 1 by less are a matter of how numbers are rounded."""


class Contest(NamedTuple):
    """The best two by a merit at a place, and how many times the second's the first has."""

    place: Place
    first: Result
    second: Result | None
    lead: Estimate | None


def conclusions(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """Return all of it as lines."""
    lines = [sweep.question, "", *_basis(sweep, results)]
    for merit, title in MERITS.items():
        lines += ["", f"## By {title}", "", *_winners(results, merit)]
    optical = [name for name, design in sweep.designs.items() if design.kind == "optical"]
    for name in optical:
        lines += ["", f"## {name} against the best electrical design", ""]
        lines += _against_electrical(results, name)
        if SWITCHING in sweep.axes and SWITCHING not in sweep.designs[name].ignores:
            lines += ["", f"How slow {name} may switch before it falls behind {sweep.baseline}:"]
            lines += _slowest_switch(results, name, sweep.baseline)
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
    if seeds > 1:
        yield "±: half of the 95 % interval over seeds, designs compared seed by seed."
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
    return lead is not None and abs(lead.value - 1) > max(lead.plus_minus or 0.0, SAME)


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
    for each in found:
        yield f"{DETAIL}{spoken(each.place)}: {_told(each)}"


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
        for versus, best in lost:
            where = spoken(best.place)
            yield f"{DETAIL}loses at {where}: {told(versus)} x {best.design}"


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
    """Yield, for each place but for its switching time, the longest that still pays."""
    gains: dict[str, list[tuple[float, Estimate]]] = {}
    for there in by_place(results):
        ours, theirs = at(there, name), at(there, baseline)
        if ours and theirs and (gain := ratio(ours, theirs)):
            rest = {axis: value for axis, value in ours.place.items() if axis != SWITCHING}
            switching_ms = float(ours.place[SWITCHING])
            gains.setdefault(spoken(rest) or "everywhere", []).append((switching_ms, gain))
    if not gains:
        yield f"{DETAIL}they meet nowhere"
    for where, found in gains.items():
        longest_ms = max(ms for ms, _ in found)
        pays = [(ms, gain) for ms, gain in found if gain.value > 1 and differs(gain)]
        if pays:
            ms, gain = max(pays, key=lambda each: each[0])
            limit = "the longest" if ms == longest_ms else f"of up to {longest_ms:g} ms"
            yield f"{DETAIL}{where}: {ms:g} ms ({limit} asked), {told(gain)} x there"
        else:
            most = max((gain for _, gain in found), key=lambda gain: gain.value)
            yield f"{DETAIL}{where}: it is ahead at no switching time asked, {told(most)} x at best"


# -- which divisor ---------------------------------------------------------------------------------


def _divisors(results: Sequence[Result]) -> Iterator[str]:
    """Yield where the network alone and the whole cluster name different winners."""
    network = {spoken(c.place): c.first.design for c in contests(results, "per_network_usd")}
    cluster = {spoken(c.place): c.first.design for c in contests(results, "per_usd")}
    if not network:
        yield "No design has a price."
        return
    apart = [place for place, design in network.items() if cluster.get(place) != design]
    yield (
        f"With GPUs in the divisor, another design is the first than with the network's price "
        f"alone at {len(apart)} of {len(network)} places."
    )
    for place in apart:
        yield f"{DETAIL}{place}: {network[place]} by the network alone, {cluster[place]} with GPUs"


def spoken(place: Place) -> str:
    """Write a place: ``gpus 1024, link 400 Gbit/s``."""
    return ", ".join(_one(axis, value) for axis, value in place.items())


def _one(axis: str, value: object) -> str:
    unit = unit_of(axis)
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    if unit in ("count", "name", "ratio"):
        return f"{axis.replace('_', ' ')} {shown}"
    stem = axis.removesuffix("_gbit_per_s").removesuffix(f"_{unit}")
    return f"{stem.replace('_', ' ')} {shown} {unit}"


def _percent(lead: float) -> str:
    return f"{100 * (lead - 1):.1f} %"
