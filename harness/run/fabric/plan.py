"""What `harness check` tells of circuits: what a step sends, over what, and why. Pure.

The trainer alone knows its communications, when it runs. Of paced training those that do not depend
on the samples are told beforehand: the gathering of parameters and the scattering of gradients. The
way of new weights is known exactly. Times are of bytes and rates alone, as decisions take them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness.fabric.course import course
from harness.fabric.decision import Decision, Links, Settings, decide, time_text
from harness.fabric.demand import Comm, Demand, total
from harness.fabric.drawing import matrix_lines
from harness.fabric.links import DARK, Plan
from harness.fabric.planner import plan_demand
from harness.fabric.prediction import capacity, finish_ns, ideal_ns
from harness.fabric.topology import Topology
from harness.fabric.windows import Window
from harness.model.degrees import Degrees
from harness.model.fabric_rules import CIRCUITS
from harness.model.scenario import Fabric, Op, Rl, Scenario
from harness.model.shape import GRADIENT_BYTES, ModelShape
from harness.model.training.phase import Phase
from harness.run.fabric.circuits import STEER_NS
from harness.run.fabric.controller import STEPS_AHEAD
from harness.run.fabric.traffic import Part
from harness.run.fabric.work import TRAIN, gather_part, sync_part, train_part
from harness.run.generation.asked import GenerationAsked
from harness.run.rl.asked import TrainingAsked
from harness.run.rl.edges import edges_of, sources_of

if TYPE_CHECKING:  # what is asked is told by this
    from harness.run.asked import Asked

Groups = tuple[tuple[int, ...], ...]
"""Global ranks that communicate with each other."""


# -- what is sent ----------------------------------------------------------------------------------


def phases_without_samples(
    shape: ModelShape, degrees: Degrees, bytes_scale: float
) -> tuple[Phase, ...]:
    """Return what a paced training step sends whatever its samples: parameters and gradients.

    As FSDP2 with ``reshard_after_forward=False`` does it: what TP (and of experts EP) leaves of a
    pipeline stage is gathered once along DP, and its gradients are scattered once. Sizes are those
    of one rank as nccl-tests counts them. Left out: activations along TP, PP and EP, which follow
    from the samples, the gradients' norm, and all computing in between (gaps are 0).
    """
    ranks = np.arange(degrees.ranks).reshape(degrees.pp, degrees.dp, degrees.tp)
    gathered: list[Phase] = []
    scattered: list[Phase] = []
    for stage, layers in enumerate(np.array_split(np.arange(shape.layers), degrees.pp)):
        along_dp: Groups = tuple(map(tuple, ranks[stage].T.tolist()))
        copies = tuple(
            ranks[first :: degrees.ep] for ranks in along_dp for first in range(degrees.ep)
        )
        dense, experts = _parameters(shape, degrees, stage, len(layers))
        for groups, parameters in ((along_dp, dense), (copies, experts)):
            if parameters and len(groups[0]) > 1:
                scaled = parameters * bytes_scale
                gathered.append(_phase("all_gather", groups, scaled * shape.dtype_bytes))
                scattered.append(_phase("reduce_scatter", groups, scaled * GRADIENT_BYTES))
    return (*gathered, *reversed(scattered))


def _phase(op: Op, groups: Groups, size_bytes: float) -> Phase:
    return Phase(name=op, op=op, axis="dp", groups=groups, bytes=round(size_bytes), gap_ns=0)


def _parameters(shape: ModelShape, degrees: Degrees, stage: int, layers: int) -> tuple[int, int]:
    """Return how many parameters TP leaves of a stage's dense part, and TP and EP of its experts.

    The last norm is left out, as it is by the trainer.
    """
    is_last = stage == degrees.pp - 1
    tables = (stage == 0) + (is_last and not (shape.tied_embeddings and stage == 0))
    dense = layers * shape.layer_parameters + tables * shape.embedding_parameters
    experts = shape.expert_parameters * layers // max(1, shape.layers)
    return dense // degrees.tp, experts // (degrees.tp * degrees.ep)


def weights_bytes(shape: ModelShape, bytes_scale: float) -> int:
    """Return the size of the file of weights that a paced trainer publishes, in whole words."""
    return max(shape.layers, round(shape.parameter_bytes * bytes_scale) // 8) * 8


def parts_of(
    topology: Topology,
    step: Rl,
    generation: GenerationAsked,
    training: TrainingAsked,
    *,
    layerwise: bool = True,
) -> tuple[Part, ...]:
    """Return what a step of the loop sends, as far as that is known; () of a real trainer."""
    spec = training.spec
    if spec.profile is None:
        return ()
    shape, trainers, receivers = spec.profile.shape, tuple(training.ranks_of), generation.gpus_of
    size_bytes = weights_bytes(shape, spec.bytes_scale)
    sources = sources_of(trainers, tuple(receivers), step.sync)
    edges = edges_of(sources, tuple(receivers), step.sync)
    phases = phases_without_samples(shape, spec.degrees, spec.bytes_scale)
    parts = (
        train_part(topology, phases, training.ranks_of, layerwise=layerwise),
        gather_part(topology, trainers, sources, size_bytes),
        sync_part(topology, edges, size_bytes),
    )
    return tuple(part for part in parts if part.comms)


# -- what would be decided -------------------------------------------------------------------------


class Leg(NamedTuple):
    """Communications on end that the same circuits carry: their kinds, and the decision before.

    `kind_ns`: how long each kind takes over `links`, with what the change adds to the first.
    """

    kinds: tuple[str, ...]
    decision: Decision
    links: Links
    demand: Demand
    kind_ns: Mapping[str, float]


class Outlook(NamedTuple):
    """What is to be expected over each fabric. `first` and `later`: rfabric's legs of a step."""

    kinds: tuple[str, ...]
    bytes_: Mapping[str, float]
    electrical_ns: Mapping[str, float]
    ideal_ns: Mapping[str, float]
    static: Leg
    first: tuple[Leg, ...]
    later: tuple[Leg, ...]

    def ns(self, fabric: str, kind: str) -> float:
        """Return how long a kind of traffic takes over a fabric; of rfabric from step 2 on."""
        match fabric:
            case "electrical":
                return self.electrical_ns[kind]
            case "ideal":
                return self.ideal_ns[kind]
            case "static":
                return self.static.kind_ns[kind]
            case _:
                return sum(leg.kind_ns.get(kind, 0.0) for leg in self.later)


def foresee(
    topology: Topology, parts: Sequence[Part], fabric: Fabric, static: Plan | None = None
) -> Outlook:
    """Return what the controller would decide, step after step, if all goes as announced.

    `static`: the circuits of that arm; None: planned for all traffic of a step together.
    """
    settings = Settings.of(fabric, STEER_NS, waits=not topology.is_steered)
    tagged = [(part.kind, comm) for part in parts for comm in part.comms]
    comms = [comm for _, comm in tagged]
    if static is None:
        sent_bytes = total(topology, (comm.whole for comm in comms), "step").sent_bytes
        static = plan_demand(topology, sent_bytes)
    first = tuple(_legs(topology, tagged, DARK.links, settings))
    lit = first[-1].links if first else DARK.links
    return Outlook(
        tuple(part.kind for part in parts),
        {p.kind: sum(comm.whole.total_bytes for comm in p.comms) for p in parts},
        {p.kind: _sum_ns(topology, p.comms, DARK.links) for p in parts},
        {p.kind: sum(ideal_ns(topology, comm.whole) for comm in p.comms) for p in parts},
        _leg(topology, tagged, DARK.links, static, window=None, settings=settings),
        first,
        tuple(_legs(topology, tagged, lit, settings)),
    )


Tagged = Sequence[tuple[str, Comm]]
"""Communications, each with its kind."""


def _legs(topology: Topology, tagged: Tagged, lit: Links, settings: Settings) -> Iterator[Leg]:
    """Yield a step's legs, begun with the circuits that are up; as the controller sets a course."""
    if not tagged:
        return
    segments = course(
        topology,
        lit,
        [comm for _, comm in tagged],
        lambda demand, lit: plan_demand(topology, demand.sent_bytes, lit=lit),
        settings=settings,
        steps=STEPS_AHEAD,
    ).segments
    ends = [segment.first for segment in segments[1:]]
    for (begin, plan), end in zip(segments, [*ends, len(tagged)], strict=True):
        window = Window(tagged[begin][1].gap_ns) if begin else None
        leg = _leg(topology, tagged[begin:end], lit, plan, window=window, settings=settings)
        lit = leg.links
        yield leg


def _leg(
    topology: Topology,
    tagged: Tagged,
    lit: Links,
    plan: Plan,
    *,
    window: Window | None,
    settings: Settings,
) -> Leg:
    kinds = tuple(dict.fromkeys(kind for kind, _ in tagged))
    demand = total(topology, (comm.whole for _, comm in tagged), kinds[0])
    decision = decide(topology, lit, demand, [plan], window, settings=settings)
    changes = decision.action in ("change", "electrical")
    links = decision.plan.links if changes else lit
    kind_ns = {
        kind: _sum_ns(topology, [comm for own, comm in tagged if own == kind], links)
        for kind in kinds
    }
    if changes:
        kind_ns[kinds[0]] += decision.numbers.total_ns - decision.numbers.change_ns
    return Leg(kinds, decision, links, demand, kind_ns)


def _sum_ns(topology: Topology, comms: Sequence[Comm], links: Links) -> float:
    """Return how long communications take, one after the other."""
    return sum(finish_ns(topology, comm.whole, links) for comm in comms)


# -- in words --------------------------------------------------------------------------------------

MATRIX_TORS_MAX = 24
"""More do not fit on a line."""
STAYS_SHOWN = 4
"""Pairs of ToRs on the electrical path that are named."""


def outlook_of(
    topology: Topology,
    scenario: Scenario,
    step: Rl,
    plans: Mapping[str, Plan],
    *,
    generation: GenerationAsked | None,
    training: TrainingAsked | None,
) -> Outlook | None:
    """Return what is to be expected of an rl step; None where nothing is asked, or known."""
    if not step.fabrics or generation is None or training is None:
        return None
    fabric = scenario.fabric
    parts = parts_of(topology, step, generation, training, layerwise=fabric.layerwise)
    return foresee(topology, parts, fabric, plans.get(fabric.static)) if parts else None


def tell_fabrics(
    topology: Topology, step: Rl, outlook: Outlook | None, degrees: Degrees
) -> Iterator[str]:
    """Yield what a step sends, how long that takes over each fabric, and which circuits are lit."""
    if outlook is None:
        yield "  circuits follow what is announced; a real trainer tells that when it runs"
        return
    yield "  traffic between ToRs in a step, MB; times by bytes and rates alone, without latency"
    yield from (f"    {line}" for line in _table(step, outlook))
    if TRAIN in outlook.kinds:
        yield f"    train is an estimate: {_left_out(degrees)}"
    if {*CIRCUITS} & {*step.fabrics} and len(topology.tors) <= MATRIX_TORS_MAX:
        over = "; + goes over a core switch" if topology.trunks else ""
        yield f"  matrices: how many circuits lead from a row's ToR to a column's{over}"
    if "static" in step.fabrics:
        yield from _tell_leg(topology, "static, all of it", outlook.static, set())
    if "rfabric" not in step.fabrics:
        return
    shown: set[Links] = set()
    for leg in outlook.first:
        yield from _tell_leg(topology, f"rfabric, {_and(leg.kinds)}", leg, shown)
    if outlook.later:
        leg = outlook.later[0]
        yield from _tell_leg(topology, f"rfabric, {_and(leg.kinds)} again", leg, shown)


def _table(step: Rl, outlook: Outlook) -> Iterator[str]:
    """Yield a line for each kind of traffic: megabytes, and how long they take over each fabric."""
    rows = [("", "sent", *step.fabrics)]
    for kind in outlook.kinds:
        times = (time_text(outlook.ns(fabric, kind)) for fabric in step.fabrics)
        rows.append((kind, f"{outlook.bytes_[kind] / 1e6:,.1f}", *times))
    sums = (sum(outlook.ns(fabric, k) for k in outlook.kinds) for fabric in step.fabrics)
    rows.append(("all", f"{sum(outlook.bytes_.values()) / 1e6:,.1f}", *map(time_text, sums)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        told = (cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *told])


def _left_out(degrees: Degrees) -> str:
    """Return what the estimate of training counts, and what it cannot."""
    axes = [axis.upper() for axis in ("tp", "pp", "ep") if getattr(degrees, axis) > 1]
    activations = f"activations along {_and(axes)}, which samples decide, and " if axes else ""
    return (
        "parameters gathered and gradients scattered along DP; without "
        f"{activations}the gradients' norm"
    )


def _tell_leg(topology: Topology, title: str, leg: Leg, shown: set[Links]) -> Iterator[str]:
    """Yield the decision, the circuits as a matrix where they are new, and what goes without."""
    yield f"  {title}: {leg.decision.reason}"
    if leg.links and leg.links not in shown:
        yield from (f"    {line}" for line in _circuits(topology, leg.links))
    shown.add(leg.links)
    if stays := _stays(topology, leg):
        yield f"    stays electrical: {stays}"


def _circuits(topology: Topology, links: Links) -> list[str]:
    """Return them as a matrix, as long as a terminal can hold that."""
    if len(topology.tors) <= MATRIX_TORS_MAX:
        return matrix_lines(topology, links)
    joined = {frozenset((link.a.tor, link.b.tor)) for link in links}
    return [f"{len(links)} links join {len(joined)} pairs of ToRs; --picture FILE.svg draws them"]


def _stays(topology: Topology, leg: Leg) -> str:
    """Return which pairs of ToRs have no circuit for what they send, the largest first."""
    lit, names = capacity(topology, leg.links).circuits > 0, leg.demand.tors
    rest = np.where(lit, 0.0, leg.demand.sent_bytes)
    largest = np.argsort(-rest, axis=None, kind="stable")[: np.count_nonzero(rest)].tolist()
    pairs = [divmod(place, len(names)) for place in largest]
    told = [f"{names[i]}>{names[j]} {rest[i, j] / 1e6:,.1f} MB" for i, j in pairs[:STAYS_SHOWN]]
    more = [f"{len(pairs) - STAYS_SHOWN} more pairs"] if len(pairs) > STAYS_SHOWN else []
    return ", ".join([*told, *more])


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


# -- as a picture ----------------------------------------------------------------------------------


def panels(asked: Asked) -> dict[str, Links]:
    """Return what `harness check --picture` draws: shapes, then the circuits of each rl step."""
    found = {name: plan.links for name, plan in asked.plans.items()}
    for number, step in enumerate(asked.scenario.steps):
        if not isinstance(step, Rl):
            continue
        outlook = outlook_of(
            asked.topology,
            asked.scenario,
            step,
            asked.plans,
            generation=asked.generation,
            training=asked.training,
        )
        if outlook is None:
            continue
        if "static" in step.fabrics:
            found[f"step {number}, static"] = outlook.static.links
        if "rfabric" in step.fabrics:
            for leg in outlook.first:
                found[f"step {number}, rfabric, {_and(leg.kinds)}"] = leg.links
    return found
