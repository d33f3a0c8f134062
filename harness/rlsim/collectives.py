"""One collective as stages: latency, what NVLink takes, and what flows from node to node.

A simulated bench waits a stage's latency, then carries its flows over whatever network there is,
under whatever else goes on; NVLink is busy beside them, and the stage ends with the longer of the
two. `time_ns` is what that comes to where nothing else goes on and nothing blocks.

NCCL: `harness.rlsim.tuner` chooses algorithm and protocol, `nvlink` knows latencies and NVLink,
`hops` who sends to whom. Measured tables go before both, where there is one of the same GPUs,
operation, ranks and nodes: inside its sizes it is the time (`table`), beyond them the model is
scaled to meet its edge (`scaled`). Either is the time on an idle network of the NICs given here.
gloo: steps and copies cost what was measured (`harness.model.simulation.Collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from harness.clock import NS_PER_US
from harness.errors import UsageError
from harness.model.scenario import Op
from harness.model.simulation import Backend, Collectives
from harness.rlsim import hops
from harness.rlsim.gloo import rounds
from harness.rlsim.hops import Hop, Nodes, Place
from harness.rlsim.nvlink import Node, kind_of, node_of, pairwise
from harness.rlsim.tables import Table
from harness.rlsim.tuner import (
    HIERARCHICAL,
    Allowed,
    Cpu,
    Group,
    Protocol,
    allowed,
    steps,
)

Basis = Literal["table", "scaled", "model"]

WIRE: dict[Protocol, float] = {"ll": 2.0, "ll128": 128 / 120, "simple": 1.0}
"""Bytes that go over a wire for one of payload: the rest are flags that say that it has come."""


class Stage(NamedTuple):
    """What goes on at once."""

    latency_ns: int
    """Of the algorithm's steps, before the flows begin."""
    local_ns: int
    """Over NVLink, or a host's copying, beside the flows: the stage takes the longer."""
    flows: tuple[Hop, ...]
    """(sender in the group, receiver, bytes) that cross nodes."""


class Planned(NamedTuple):
    """One collective: its stages, one after another; none where there is nobody to talk to."""

    stages: tuple[Stage, ...]
    algorithm: str
    protocol: str
    basis: Basis


@dataclass(frozen=True)
class Interconnect:
    """What joins ranks. `nccl` and `gloo` make one."""

    backend: Backend
    nics: int
    """Of each node; GPU i uses NIC i modulo this. gloo uses all."""
    nic_gb_per_s: float
    """Of each, one way."""
    node: Node | None = None
    gpu: str = ""
    may: Allowed = Allowed()  # noqa: RUF009 - it is immutable
    tables: tuple[Table, ...] = ()
    figures: Collectives | None = None


def nccl(
    gpu: str,
    *,
    nics: int,
    nic_gb_per_s: float,
    algorithms: str = "",
    protocols: str = "",
    tables: Sequence[Table] = (),
    cpu: Cpu = "intel",
) -> Interconnect:
    """Return nodes of one kind of GPU with NCCL; `algorithms`, `protocols` as in NCCL_ALGO, _PROTO.

    Raises `UsageError` on a GPU that nobody measured, or a name that is no algorithm's.
    """
    node = node_of(gpu, nics * nic_gb_per_s, cpu=cpu)
    may = allowed(algorithms, protocols)
    return Interconnect(
        "nccl", nics, nic_gb_per_s, node=node, gpu=kind_of(gpu), may=may, tables=tuple(tables)
    )


def gloo(figures: Collectives, *, nics: int, nic_gb_per_s: float) -> Interconnect:
    """Return nodes with gloo on their CPUs."""
    return Interconnect("gloo", nics, nic_gb_per_s, figures=figures)


def stages(
    op: Op,
    size_bytes: float,
    places: Sequence[Place],
    interconnect: Interconnect,
    *,
    one_way: bool = False,
) -> Planned:
    """Return one collective of ranks at `places`, in the order of their group.

    `size_bytes` as nccl-tests counts it (`harness.model.busbw`). A `send_recv` is its ring shift;
    `one_way`: the first of two sends to the second, as pipeline stages do. Raises `UsageError` on
    a group that the algorithm asked for can't serve.
    """
    if len(places) < 2:
        return Planned((), "none", "none", "model")
    if interconnect.backend == "gloo":
        return _by_gloo(op, size_bytes, places, interconnect, one_way)
    nodes = hops.nodes_of(places)
    if op in ("all_to_all", "send_recv"):
        modelled = _pairwise(op, size_bytes, places, interconnect, one_way)
    elif HIERARCHICAL in interconnect.may.algorithms:
        modelled = _hierarchical(op, size_bytes, nodes, interconnect)
    else:
        modelled = _chosen(op, size_bytes, nodes, _node(interconnect), interconnect.may)
    if one_way or interconnect.may != Allowed():
        return modelled  # tables are of NCCL as it is
    return _measured(modelled, op, size_bytes, places, interconnect)


def time_ns(
    op: Op,
    size_bytes: float,
    places: Sequence[Place],
    interconnect: Interconnect,
    *,
    one_way: bool = False,
) -> int:
    """Return how long it takes where nothing else goes on, and only NICs bound what flows."""
    planned = stages(op, size_bytes, places, interconnect, one_way=one_way)
    return idle_ns(planned.stages, places, interconnect)


def idle_ns(planned: Sequence[Stage], places: Sequence[Place], interconnect: Interconnect) -> int:
    """Return the same of stages that are known."""
    return sum(
        stage.latency_ns + max(stage.local_ns, _flowing_ns(stage.flows, places, interconnect))
        for stage in planned
    )


def _flowing_ns(flows: Sequence[Hop], places: Sequence[Place], interconnect: Interconnect) -> int:
    """Return how long the busiest NIC sends or receives; bytes per ns are GB/s."""
    spread = interconnect.nics if interconnect.backend == "gloo" else 1
    loads: dict[tuple[str, int, bool], float] = {}
    for sender, receiver, size_bytes in flows:
        for rank, sends in ((sender, True), (receiver, False)):
            node, gpu = places[rank]
            end = (node, gpu % interconnect.nics if spread == 1 else 0, sends)
            loads[end] = loads.get(end, 0.0) + size_bytes
    return round(max(loads.values(), default=0.0) / (spread * interconnect.nic_gb_per_s))


def _ns(us: float) -> int:
    return round(us * NS_PER_US)


# -- NCCL ------------------------------------------------------------------------------------------


def _group(nodes: Nodes) -> Group:
    return Group(sum(len(on) for on in nodes.ranks), len(nodes.ranks), nodes.fewest)


def _node(interconnect: Interconnect) -> Node:
    assert interconnect.node is not None
    return interconnect.node


def _chosen(op: Op, size_bytes: float, nodes: Nodes, node: Node, may: Allowed) -> Planned:
    """Return what NCCL would take, as one stage: it pipelines all it does."""
    group = _group(nodes)
    choice = node.tuner.choose(op, size_bytes, group, may)
    took = node.time(op, (choice.algorithm, choice.protocol), size_bytes, group)
    wire_bytes = size_bytes * WIRE[choice.protocol]
    flows: list[Hop] = []
    if group.nodes > 1 and size_bytes:
        if choice.algorithm != "ring":
            flows = list(hops.tree(nodes, wire_bytes))
        elif op == "broadcast":
            flows = list(hops.ring(nodes, wire_bytes, closed=False))
        else:
            share = steps(op, group.ranks) / group.ranks
            flows = list(hops.ring(nodes, share * wire_bytes))
    stage = Stage(_ns(took.latency_us), _ns(took.bytes_us), tuple(flows))
    return Planned((stage,), choice.algorithm, choice.protocol, "model")


def _pairwise(
    op: Op,
    size_bytes: float,
    places: Sequence[Place],
    interconnect: Interconnect,
    one_way: bool,
) -> Planned:
    """Return point to point, as one stage: PXN passes on what has come while more comes."""
    nodes, node = hops.nodes_of(places), _node(interconnect)
    group = _group(nodes)
    if op == "all_to_all":
        block = own = size_bytes / group.ranks
        peers = group.ranks - 1
        sent, within = hops.all_to_all(nodes, block)
    else:
        block, own, peers = size_bytes, 0.0, 1
        (shift,) = rounds(op, size_bytes, group.ranks, one_way=one_way)
        sent = list(shift.edges)
        within = max(places[hop.sender][0] == places[hop.receiver][0] for hop in sent)
    protocol, took = pairwise(peers, block, block * within, own, node.links)
    latency = took.latency_us
    crossing = hops.crossing(sent, places)
    if group.nodes > 1:
        latency += node.tuner.between_us("ring", protocol, group._replace(fewest=2))
    flows = tuple(hop._replace(bytes=hop.bytes * WIRE[protocol]) for hop in crossing)
    stage = Stage(_ns(latency), _ns(took.bytes_us), flows)
    return Planned((stage,), "pairwise", protocol, "model")


def _hierarchical(op: Op, size_bytes: float, nodes: Nodes, interconnect: Interconnect) -> Planned:
    """Return stages inside nodes and one across: there each of g rails has n / g to carry.

    Across go rings among the nodes, one for each rail. Raises `UsageError` on nodes with different
    GPUs, and on a broadcast.
    """
    if op == "broadcast":
        raise UsageError("hierarchical are all_reduce, all_gather and reduce_scatter, no broadcast")
    node, rails, count = _node(interconnect), nodes.rails(), len(nodes.ranks)
    may = Allowed(protocols=interconnect.may.protocols)

    def within(part: Op) -> tuple[Stage, ...]:
        if len(rails) == 1:
            return ()
        return _chosen(part, size_bytes, Nodes(nodes.ranks[:1]), node, may).stages

    if count == 1:
        return _chosen(op, size_bytes, nodes, node, may)
    # all rails together have the size and the network of the whole: chosen alike
    group = Group(count, count, 1)
    protocol = node.tuner.choose(op, size_bytes, group, may._replace(algorithms=("ring",))).protocol
    took = node.time(op, ("ring", protocol), size_bytes / len(rails), group)
    passed = steps(op, count) / count * size_bytes * WIRE[protocol]
    flows = tuple(hops.ring(nodes, passed)) if size_bytes else ()
    across = (Stage(_ns(took.latency_us), _ns(took.bytes_us), flows),)
    before = within("reduce_scatter") if op != "all_gather" else ()
    after = within("all_gather") if op != "reduce_scatter" else ()
    return Planned(before + across + after, HIERARCHICAL, protocol, "model")


# -- tables ----------------------------------------------------------------------------------------


def _measured(
    modelled: Planned,
    op: Op,
    size_bytes: float,
    places: Sequence[Place],
    interconnect: Interconnect,
) -> Planned:
    """Return the same as long as a table of this group says, where there is one."""
    nodes = len({node for node, _ in places})
    table = _table(op, len(places), nodes, interconnect)
    if table is None:
        return modelled
    us = table.time_us(size_bytes)
    if us is not None:
        modelled_ns = idle_ns(modelled.stages, places, interconnect)
        return _scaled(modelled, us * NS_PER_US / modelled_ns, "table")
    edge = table.sizes_bytes[0 if size_bytes < table.sizes_bytes[0] else -1]
    edge_us = table.time_us(edge)
    assert edge_us is not None
    bare = replace(interconnect, tables=())
    return _scaled(modelled, edge_us * NS_PER_US / time_ns(op, edge, places, bare), "scaled")


def _table(op: Op, ranks: int, nodes: int, interconnect: Interconnect) -> Table | None:
    return next(
        (
            table
            for table in interconnect.tables
            if table.key[1:] == (op, ranks, nodes) and kind_of(table.key.gpu) == interconnect.gpu
        ),
        None,
    )


def _scaled(planned: Planned, share: float, basis: Basis) -> Planned:
    """Return all of it so many times as long; of flows, as many bytes more: rates are the NICs'."""
    scaled = tuple(
        Stage(
            round(stage.latency_ns * share),
            round(stage.local_ns * share),
            tuple(hop._replace(bytes=hop.bytes * share) for hop in stage.flows),
        )
        for stage in planned.stages
    )
    return planned._replace(stages=scaled, basis=basis)


# -- gloo ------------------------------------------------------------------------------------------


def _by_gloo(
    op: Op,
    size_bytes: float,
    places: Sequence[Place],
    interconnect: Interconnect,
    one_way: bool,
) -> Planned:
    """Return gloo's rounds, one stage each."""
    figures = interconnect.figures
    assert figures is not None
    found = []
    for part in rounds(op, size_bytes, len(places), one_way=one_way):
        latency_us = part.steps * figures.step_us.value
        copy_ns = part.most_bytes / 1000 * figures.copy_ns_per_kb.value
        found.append(Stage(_ns(latency_us), round(copy_ns), hops.crossing(part.edges, places)))
    algorithm = {"all_to_all": "pairwise", "send_recv": "pairwise", "broadcast": "tree"}
    return Planned(tuple(found), algorithm.get(op, "ring"), "tcp", "model")
