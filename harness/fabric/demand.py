"""Who sends how many bytes to whom, from ToR to ToR; what stays under one ToR is not in it. Pure.

Bytes are payload. What a collective sends follows the algorithms that libraries really run, with
ranks in the order of their group and sizes as nccl-tests counts them (`harness.model.busbw`):

    operation        gloo (torch 2.13, measured by socket)      nccl (ring; facts of its tuning)
    all_reduce       ring to the rank before, 2(p-1)/p n        ring to the next, 2(p-1)/p n
    all_gather       ring to the next, (p-1)/p n                the same
    reduce_scatter   an all_reduce: 2(p-1)/p n                  ring to the next, (p-1)/p n
    all_to_all       everyone to everyone, n/p                  the same
    broadcast        binomial tree from the first, n            chain from the first, n
    send_recv        everyone to the next, n                    the same

Hierarchical collectives reduce (or gather) under each ToR first; across ToRs goes one
representative each, the same bytes as one rail per rank would send together.

Who sends and gets is told by endpoints (`harness.fabric.endpoints`): a rank by its NIC, whoever
acts for a whole node by the node. NCCL's rings have a channel for each NIC that ranks of theirs
have on a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.fabric.endpoints import Ends, Ints, ends_of
from harness.fabric.topology import Topology
from harness.model.layout import Layout
from harness.model.scenario import Op
from harness.model.training.axes import Axis
from harness.model.training.phase import Phase

Floats = NDArray[np.float64]
Backend = Literal["gloo", "nccl"]
RINGS: tuple[Op, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, eq=False)
class Demand:
    """`sent_bytes[i, j]`: from ToR `tors[i]` to ToR `tors[j]`; the diagonal is 0.

    Two are equal when their ToRs and bytes are, whatever their names.
    """

    name: str
    tors: tuple[str, ...]
    sent_bytes: Floats

    def __post_init__(self) -> None:
        n = len(self.tors)
        found = np.array(self.sent_bytes, np.float64)
        if found.shape != (n, n) or not (np.isfinite(found).all() and (found >= 0).all()):
            raise ValueError(f"demand {self.name}: not {n} x {n} finite bytes from 0 on")
        np.fill_diagonal(found, 0.0)
        found.flags.writeable = False
        object.__setattr__(self, "sent_bytes", found)

    @property
    def total_bytes(self) -> float:
        """All that crosses ToRs."""
        return float(self.sent_bytes.sum())

    def __add__(self, other: Demand) -> Demand:
        if self.tors != other.tors:
            raise ValueError(f"{self.name} and {other.name} are demands of different ToRs")
        name = f"{self.name} + {other.name}" if self.name and other.name else self.name + other.name
        return Demand(name, self.tors, self.sent_bytes + other.sent_bytes)

    def __mul__(self, times: float) -> Demand:
        return Demand(self.name, self.tors, self.sent_bytes * times)

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Demand):
            return NotImplemented
        return self.tors == other.tors and np.array_equal(self.sent_bytes, other.sent_bytes)

    def __hash__(self) -> int:
        return hash((self.tors, self.sent_bytes.tobytes()))


class Comm(NamedTuple):
    """One communication of a step: the demand of one time of it, `times` on end.

    `gap_ns`: nothing is sent before each of them.
    """

    name: str
    axis: Axis
    demand: Demand
    gap_ns: float
    times: int = 1

    @property
    def whole(self) -> Demand:
        """The demand of all times."""
        return self.demand * self.times


class Served(NamedTuple):
    """One engine as it lies: degrees of one instance, and where each rank is (TP fastest)."""

    layout: Layout
    endpoints: tuple[str, ...]


# -- builders --------------------------------------------------------------------------------------


def nothing(topology: Topology, name: str = "nothing") -> Demand:
    """Return the demand of nobody."""
    n = len(topology.tors)
    return Demand(name, tuple(topology.tors), np.zeros((n, n)))


def total(topology: Topology, demands: Iterable[Demand], name: str) -> Demand:
    """Return them all together, as one."""
    whole = reduce(add, demands, nothing(topology, ""))
    return Demand(name, whole.tors, whole.sent_bytes)


def of_moves(
    topology: Topology, moves: Iterable[tuple[str, str, float]], name: str = "moves"
) -> Demand:
    """Return what (from, to, bytes) add up to: KV that migrates, shards that move.

    Raises `UsageError` on a node that the bench has not, like all that take endpoints here.
    """
    listed = list(moves)
    row_of = {end: row for row, end in enumerate(dict.fromkeys(e for m in listed for e in m[:2]))}
    edges = _Edges(
        np.array([row_of[move[0]] for move in listed], np.int64),
        np.array([row_of[move[1]] for move in listed], np.int64),
        np.array([move[2] for move in listed], np.float64),
    )
    sent = np.zeros((len(topology.tors),) * 2)
    _add(sent, ends_of(topology, list(row_of)), edges)
    return Demand(name, tuple(topology.tors), sent)


def of_sync(topology: Topology, edges: Iterable[tuple[str, str]], size_bytes: float) -> Demand:
    """Return a weight sync: over each edge, from node to node, goes the whole file."""
    return of_moves(topology, ((a, b, size_bytes) for a, b in edges), "sync")


def of_collective(
    topology: Topology,
    op: Op,
    groups: Sequence[Sequence[str]],
    size_bytes: float,
    times: int = 1,
    *,
    backend: Backend = "gloo",
    hierarchical: bool = False,
) -> Demand:
    """Return what `groups` of ranks, given by endpoints, send when all do `op`, `times` over.

    `size_bytes`: of one group, as nccl-tests counts a size. `send_recv` is its ring shift.
    """
    sent = np.zeros((len(topology.tors),) * 2)
    for group in groups:
        ends = ends_of(topology, group)
        if hierarchical:
            _add_hierarchical(sent, op, ends)
        else:
            _add_collective(sent, op, ends, backend)
    return Demand(op, tuple(topology.tors), sent * (size_bytes * times))


def of_training(
    topology: Topology,
    phases: Sequence[Phase],
    place_of_rank: Sequence[str] | Mapping[int, str],
    *,
    backend: Backend = "gloo",
) -> tuple[Comm, ...]:
    """Return the communications of a training step, in order; `send_recv` goes one way there.

    `place_of_rank`: the endpoint of each.
    """
    ranks = sorted({rank for phase in phases for group in phase.groups for rank in group})
    row_of = {rank: row for row, rank in enumerate(ranks)}
    ends = ends_of(topology, [place_of_rank[rank] for rank in ranks])
    names = tuple(topology.tors)

    @cache
    def of_one_byte(op: Op, groups: tuple[tuple[int, ...], ...]) -> Floats:
        sent = np.zeros((len(names),) * 2)
        for group in groups:
            of_group = ends.some([row_of[rank] for rank in group])
            if op == "send_recv":
                _add(sent, of_group, _one_way())
            else:
                _add_collective(sent, op, of_group, backend)
        return sent

    return tuple(
        Comm(
            phase.name,
            phase.axis,
            Demand(phase.name, names, of_one_byte(phase.op, phase.groups) * phase.bytes),
            phase.gap_ns,
            phase.times,
        )
        for phase in phases
    )


def of_layout(
    topology: Topology,
    engines: Iterable[Served],
    *,
    tp_bytes: float,
    pp_bytes: float = 0.0,
    ep_bytes: float = 0.0,
    backend: Backend = "gloo",
) -> Demand:
    """Return what engines send among their ranks, per second or per token, as the bytes are given.

    Each TP group all-reduces `tp_bytes`; each rank hands `pp_bytes` to the next stage; with EP all
    TP x DP ranks of a stage exchange `ep_bytes`. Ranks count TP fastest, then PP, then DP.
    """
    found = [nothing(topology, "")]
    for layout, endpoints in engines:
        cube = np.array(endpoints, object).reshape(layout.dp, layout.pp, layout.tp)
        rows = cube.reshape(-1, layout.tp).tolist()
        found.append(of_collective(topology, "all_reduce", rows, tp_bytes, backend=backend))
        hops = zip(cube[:, :-1].flat, cube[:, 1:].flat, strict=True)
        found.append(of_moves(topology, ((a, b, pp_bytes) for a, b in hops)))
        if layout.ep > 1:
            stages = cube.transpose(1, 0, 2).reshape(layout.pp, -1).tolist()
            found.append(of_collective(topology, "all_to_all", stages, ep_bytes, backend=backend))
    return total(topology, found, "generation")


# -- collectives by pairs of ranks -----------------------------------------------------------------


class _Edges(NamedTuple):
    """From which rank to which, and how much of the size."""

    froms: Ints
    tos: Ints
    shares: Floats


@cache
def _edges(op: Op, p: int, backend: Backend) -> _Edges:
    """Return who sends to whom among p ranks; nobody where there is one."""
    ranks = np.arange(p if p > 1 else 0)
    back = backend == "gloo"
    match op:
        case "all_reduce":
            return _each(ranks, (ranks + (-1 if back else 1)) % p, 2 * (p - 1) / p)
        case "reduce_scatter" if back:
            return _edges("all_reduce", p, backend)
        case "all_gather" | "reduce_scatter":
            return _each(ranks, (ranks + 1) % p, (p - 1) / p)
        case "all_to_all":
            froms, tos = np.repeat(ranks, p), np.tile(ranks, len(ranks))
            return _each(froms, tos, 1 / p)
        case "broadcast":
            parents = [k - (1 << k.bit_length() - 1) if back else k - 1 for k in range(1, p)]
            return _each(np.array(parents, np.int64), np.arange(1, p), 1.0)
        case "send_recv":
            return _each(ranks, (ranks + 1) % p, 1.0)


def _one_way() -> _Edges:
    """Return a pair whose first sends to its second."""
    return _each(np.array([0]), np.array([1]), 1.0)


def _each(froms: Ints, tos: Ints, share: float) -> _Edges:
    return _Edges(froms, tos, np.full(len(froms), share))


# -- what goes from where to where -----------------------------------------------------------------


def _add_collective(sent: Floats, op: Op, ends: Ends, backend: Backend) -> None:
    """Add what one group of ranks sends, of a size of 1."""
    ringed = backend == "nccl" and op in RINGS
    _add(sent, ends.with_channels() if ringed else ends, _edges(op, len(ends.nodes), backend))


def _add(sent: Floats, ends: Ends, edges: _Edges) -> None:
    """Add what goes over these edges."""
    froms, tos, shares = ends.between(edges.froms, edges.tos, edges.shares)
    np.add.at(sent, (froms, tos), shares)


def _add_hierarchical(sent: Floats, op: Op, ends: Ends) -> None:
    """Add one group: each rail's share by itself, for nodes reduce (or gather) inside first."""
    if op in ("all_to_all", "send_recv"):  # nothing is reduced or doubled that could be left out
        _add(sent, ends, _edges(op, len(ends.nodes), "nccl"))
        return
    rails = ends.rails()
    for tors in rails:
        _add_representatives(sent, op, tors, 1 / len(rails))


def _add_representatives(sent: Floats, op: Op, tors: Ints, share: float) -> None:
    """Add a share of the size, for ranks given by their ToRs: representatives send it, in order.

    A ring of T of them passes each ToR's block, its ranks' share of the size, over all of its
    edges but one: gathered blocks not to where they began, reduced ones not beyond their end.
    """
    ranks_under = dict.fromkeys(tors.tolist(), 0)
    for tor in tors.tolist():
        ranks_under[tor] += 1
    over = np.array(list(ranks_under))
    blocks = np.array(list(ranks_under.values())) / len(tors)
    here = np.arange(len(over) if len(over) > 1 else 0)
    after = (here + 1) % max(1, len(over))
    if op == "all_gather":
        edges = _Edges(here, after, 1 - blocks[after])
    elif op == "reduce_scatter":
        edges = _Edges(here, after, 1 - blocks[here])
    else:
        edges = _edges(op, len(over), "nccl")
    np.add.at(sent, (over[edges.froms], over[edges.tos]), edges.shares * share)
