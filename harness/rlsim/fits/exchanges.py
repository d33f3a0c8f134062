"""What collectives say, by themselves and in steps of training: gloo's steps, copies and links.

A step of training is chained: what one communication is late by, the next one begins later. So the
time of each is counted from when its last rank was there to when the last rank is at the next one,
less what is computed before that. What each rank takes in between is told by itself.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from harness.clock import NS_PER_S
from harness.model.degrees import Degrees
from harness.model.scenario import Op
from harness.model.training.axes import Axis, Members, expert_copies, groups_along, place_of
from harness.model.training.schedule import stages
from harness.rlsim.fits.control import MESSAGE
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Figures, Row
from harness.rlsim.fits.wires import Loads, Networks, Wires
from harness.rlsim.gloo import rounds

STEP, COPY = "collectives.step_us", "collectives.copy_ns_per_kb"
FINDING, COMPUTE = "training.phase_us", "training.compute_share"
BEGUN = "training.step_fixed_s"
NS = 1 / NS_PER_S

Stamped = Mapping[str, Any]


# -- one collective --------------------------------------------------------------------------------


class _Stage(NamedTuple):
    steps: int
    most_bytes: float
    loads: Loads


class Exchange(NamedTuple):
    """One time of a collective, of all groups that do it at once, over some network."""

    stages: tuple[_Stage, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """Figures that it depends on."""
        loads = (name for stage in self.stages for name in stage.loads.needs)
        return tuple(dict.fromkeys((STEP, COPY, *loads)))

    def takes_s(self, figures: Figures, idle_s: float = 0.0, times: int = 1) -> float:
        """Return how long it takes, as `harness.rlsim.collectives` has it for gloo.

        So many times on end, which are carried together; the network was idle before for a while.
        """
        took_s = 0.0
        for steps, most_bytes, loads in self.stages:
            stepping_s = times * steps * figures[STEP] / 1e6
            copying_s = times * most_bytes / 1000 * figures[COPY] * NS
            flowing_s = loads.takes_s(figures, idle_s + stepping_s, times)
            took_s += stepping_s + max(copying_s, flowing_s)
        return took_s


def exchange_of(
    op: Op, groups: Members, size_bytes: int, places: Sequence[str], wires: Wires
) -> Exchange | None:
    """Return what groups of as many ranks do at once; `places`: each rank's node. None: no way."""
    found = []
    one_way = op == "send_recv" and len(groups[0]) == 2
    parts = [list(rounds(op, size_bytes, len(group), one_way=one_way)) for group in groups]
    for at_once in zip(*parts, strict=True):
        loads = wires.loads(
            (places[group[hop.sender]], places[group[hop.receiver]], hop.bytes)
            for group, part in zip(groups, at_once, strict=True)
            for hop in part.edges
        )
        if loads is None:
            return None
        most_bytes = max(part.most_bytes for part in at_once)
        found.append(_Stage(at_once[0].steps, most_bytes, loads))
    return Exchange(tuple(found))


def collectives(measured: Measured) -> Iterator[Row]:
    """Yield the rows of collectives with gloo on networks that are known."""
    networks = Networks(measured)
    for (path, op, size_bytes), batch in groupby(
        measured.rows("collective"), lambda row: (row["path"], row["op"], row["size_bytes"])
    ):
        told = [row for row in batch if row["backend"] == "gloo"]
        wires = networks.of_shape(path)
        if not told or wires is None or measured.has_rails:
            continue
        places = measured.nodes_with_ranks
        groups = tuple(_members(row, len(places)) for row in told)
        exchange = exchange_of(op, groups, size_bytes, places, wires)
        if exchange is None or not exchange.stages:
            continue
        key = (op, size_bytes, groups, exchange)
        for row in told:
            for ranks_ns in zip(*row["times_ns"], strict=True):
                kind, took_s = f"collective.{op}", fmean(ranks_ns) * NS
                yield Row(kind, measured.name, key, took_s, exchange.needs, exchange.takes_s)


def _members(row: Stamped, world_size: int) -> tuple[int, ...]:
    if row["group"] == "all":
        return tuple(range(world_size))
    return tuple(map(int, row["group"].split("-")))


# -- phases of a step ------------------------------------------------------------------------------

_BLOCK = re.compile(r"layers? (\d+)(?:-(\d+))?")


class _Told(NamedTuple):
    """One communication of one step, by all nodes that told it."""

    name: str
    op: Op
    axis: Axis
    bytes: int
    gap_s: float
    ready_ns: int
    """Of the last node."""
    end_ns: int
    """The same."""
    nodes: frozenset[str]

    @property
    def times(self) -> int:
        """How often on end: by its name, once for each layer, or twice where those exchange."""
        found = _BLOCK.match(self.name)
        if found is None:
            return 1
        layers = int(found[2] or found[1]) - int(found[1]) + 1
        return layers if self.axis == "dp" else 2 * layers


def phases(measured: Measured) -> Iterator[Row]:
    """Yield the rows of training's communications, and of what surrounds them in a step."""
    if measured.degrees is None or measured.has_rails:
        return
    yield from _between(measured)
    networks = Networks(measured)
    told = list(_told(measured.rows("phase")))
    for row in measured.rows("rl_step"):
        begin_ns, end_ns = row["train_begin_ns"], row["train_end_ns"]
        inside = [one for one in told if begin_ns <= one.ready_ns <= end_ns]
        wires = networks.during(row["policy"], begin_ns, end_ns)
        for one, after in zip_longest(inside, inside[1:]):
            until_ns = one.end_ns if after is None else after.ready_ns
            at = wires or networks.during(row["policy"], one.ready_ns, until_ns)
            if at is not None:
                yield from _phase(measured, one, after, at)
        if inside and wires is not None:
            yield from _around(measured, row, (inside[0], inside[-1]), wires)


def _told(rows: Iterable[Stamped]) -> Iterator[_Told]:
    """Yield the communications of all steps, in order."""

    def place(row: Stamped) -> tuple[int, int, int]:
        return row["step"], row["version"], row["index"]

    for _, same in groupby(sorted(rows, key=place), place):
        nodes = list(same)
        first = nodes[0]
        yield _Told(
            first["name"],
            first["op"],
            first["axis"],
            first["bytes"],
            (first["expected_gap_ms"] or 0.0) / 1e3,
            max(row["begin_ns"] for row in nodes),
            max(row["end_ns"] for row in nodes),
            frozenset(row["node"] for row in nodes),
        )


def _between(measured: Measured) -> Iterator[Row]:
    """Yield what each node takes from one communication to the next: it computes, and finds it."""

    def place(row: Stamped) -> tuple[str, int, int, int]:
        return row["node"], row["step"], row["version"], row["index"]

    for before, row in pairwise(sorted(measured.rows("phase"), key=place)):
        if place(before)[:3] != place(row)[:3] or row["expected_gap_ms"] is None:
            continue
        gap_s = row["expected_gap_ms"] / 1e3

        def model(figures: Figures, gap_s: float = gap_s) -> float:
            return figures[FINDING] / 1e6 + gap_s * figures[COMPUTE]

        took_s = (row["begin_ns"] - before["end_ns"]) * NS
        needs = (FINDING, COMPUTE) if gap_s else (FINDING,)
        yield Row("gap", measured.name, round(gap_s, 4), took_s, needs, model)


def _phase(measured: Measured, one: _Told, after: _Told | None, wires: Wires) -> Iterator[Row]:
    """Yield one communication, up to the next one of the same nodes, or to its own end."""
    exchange = _exchange(measured, one, wires)
    if exchange is None:
        return
    chained = after if after is not None and after.nodes == one.nodes else None
    times = one.times
    took_s = ((chained.ready_ns if chained else one.end_ns) - one.ready_ns) * NS
    computed_s = (times - 1) * one.gap_s + (chained.gap_s if chained else 0.0)

    def model(figures: Figures) -> float:
        finding_s = figures[FINDING] / 1e6
        idle_s = finding_s + one.gap_s * figures[COMPUTE]
        exchanged_s = exchange.takes_s(figures, idle_s, times)
        found_s = finding_s if chained else 0.0
        return exchanged_s + found_s + computed_s * figures[COMPUTE]

    needs = (FINDING, *exchange.needs, *((COMPUTE,) if computed_s or one.gap_s else ()))
    key: Hashable = (exchange, times, round(computed_s, 5), round(one.gap_s, 5))
    yield Row(f"phase.{one.op}", measured.name, key, took_s, needs, model)


def _around(
    measured: Measured, row: Stamped, ends: tuple[_Told, _Told], wires: Wires
) -> Iterator[Row]:
    """Yield what a step takes before its first communication, and from its last one on."""
    first, last = ends
    exchange = _exchange(measured, last, wires)
    if exchange is None or last.times > 1:
        return
    took_ns = row["train_end_ns"] - row["train_begin_ns"] - (last.ready_ns - first.ready_ns)
    messages = 4 if "@" in row["policy"] else 2  # ports are counted before and after, too

    def model(figures: Figures) -> float:
        sent_s = (messages * figures[MESSAGE] + figures[FINDING]) / 1e6 + exchange.takes_s(figures)
        return figures[BEGUN] + sent_s + first.gap_s * figures[COMPUTE]

    needs = (BEGUN, MESSAGE, FINDING, *exchange.needs, *((COMPUTE,) if first.gap_s else ()))
    key = (exchange, messages, round(first.gap_s, 5))
    yield Row("step", measured.name, key, took_ns * NS, needs, model)


def _exchange(measured: Measured, one: _Told, wires: Wires) -> Exchange | None:
    degrees = measured.degrees
    assert degrees is not None
    groups = groups_of(one.name, one.axis, degrees, measured.layers)
    if not groups or len(groups[0]) < 2:
        return None
    return exchange_of(one.op, groups, one.bytes, measured.nodes_that_train, wires)


def groups_of(name: str, axis: Axis, degrees: Degrees, layers: int | None) -> Members:
    """Return the groups of a phase, as `harness.model.training.schedule` has them by its name.

    None where a pipeline's stage would have to be known, and the model's `layers` are not.
    """
    if name.startswith("stage "):
        here, there = map(int, re.findall(r"\d+", name)[:2])
        along = groups_along("pp", degrees)
        return tuple((ranks[here], ranks[there]) for ranks in along)
    groups = expert_copies(degrees) if "of experts" in name else groups_along(axis, degrees)
    if degrees.pp == 1 or name == "gradient norm":
        return groups
    block = _BLOCK.match(name)
    if block is None:
        stage = degrees.pp - 1 if name.startswith("head") else 0
    elif layers is None:
        return ()
    else:
        held = stages(layers, degrees.pp)
        stage = next(number for number, part in enumerate(held) if int(block[1]) in part)
    return tuple(ranks for ranks in groups if place_of(ranks[0], degrees).pp == stage)


def rows(measured: Measured) -> Iterator[Row]:
    """Yield all of it."""
    yield from collectives(measured)
    yield from phases(measured)
