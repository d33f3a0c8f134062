"""What a trace is: for each rank, a graph of nodes that compute, move bytes, and wait for others.

A node begins when all that it depends on has ended; data and control dependencies count alike.
Ranks that do the same share a *program*. A *group* of a name is one or more lists of ranks, no rank
in two of them: a collective of that group goes on among those of the rank's own list. Sizes are
bytes as nccl-tests counts them (`harness.model.busbw`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from harness.model.bench import Strict
from harness.model.scenario import Op

WORLD = "world"
"""The group of all ranks, which is always there."""
Lane = Literal["gpu", "cpu", "memory"]
"""What works on one node at a time, each of its own."""
GroupOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


class Named(Strict, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base of all nodes: its id among the nodes of a rank, and the ids that it depends on."""

    id: int
    name: str = ""
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()


class Compute(Named, frozen=True, kw_only=True, tag="compute"):
    """A kernel: takes `duration_ns`; else the longer of its `flops` and its `bytes` (roofline)."""

    duration_ns: int | None = None
    flops: float = 0.0
    bytes: float = 0.0
    on: Literal["gpu", "cpu"] = "gpu"


class Memory(Named, frozen=True, kw_only=True, tag="memory"):
    """A copy to or from memory that goes on beside the kernels."""

    to: Literal["load", "store"]
    duration_ns: int | None = None
    bytes: float = 0.0


class Collective(Named, frozen=True, kw_only=True, tag="collective"):
    """A collective among the rank's list of a group; of 0 bytes, only latency."""

    op: GroupOp
    bytes: int
    group: str = WORLD


class Send(Named, frozen=True, kw_only=True, tag="send"):
    """Bytes to another rank; it ends when they have been received, as NCCL's does."""

    peer: int
    bytes: int
    tag: int = 0


class Recv(Named, frozen=True, kw_only=True, tag="recv"):
    """Bytes from another rank: the n-th of a tag meets the n-th that is sent with it."""

    peer: int
    bytes: int
    tag: int = 0


class Mark(Named, frozen=True, kw_only=True, tag="mark"):
    """Something that takes no time, such as a label."""


Node = Compute | Memory | Collective | Send | Recv | Mark
Works = Compute | Memory
"""What takes a lane."""
Ranks = tuple[int, ...]


class Program(NamedTuple):
    """What some ranks do alike. Nodes of one lane that could begin go in their order here."""

    ranks: Ranks
    nodes: tuple[Node, ...]


class Gpu(NamedTuple):
    """What the GPUs are that a trace was made for; "" and 0: not said."""

    kind: str = ""
    flop_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Trace:
    """A whole trace; `where` is its file. Its ranks should be 0 to n - 1: see `checks`."""

    where: str
    programs: tuple[Program, ...]
    groups: Mapping[str, tuple[Ranks, ...]] = field(default_factory=dict)
    question: str = ""
    gpu: Gpu = Gpu()  # noqa: RUF009 - it is immutable
    notes: tuple[str, ...] = ()
    """What a reader should know of how it was read."""

    def on(self, gpu: Gpu) -> Trace:
        """Return the same of other GPUs, as far as they are said."""
        own = self.gpu
        kind, memory = gpu.kind or own.kind, gpu.memory_bytes_per_s or own.memory_bytes_per_s
        return replace(self, gpu=Gpu(kind, gpu.flop_per_s or own.flop_per_s, memory))

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return sum(len(program.ranks) for program in self.programs)

    @property
    def nodes(self) -> int:
        """Return how many nodes all ranks have together."""
        return sum(len(program.ranks) * len(program.nodes) for program in self.programs)

    def lists(self, group: str) -> tuple[Ranks, ...] | None:
        """Return the lists of a group; None where there is none of that name."""
        if group == WORLD and group not in self.groups:
            return (tuple(sorted(rank for program in self.programs for rank in program.ranks)),)
        return self.groups.get(group)


def depends(node: Node) -> tuple[int, ...]:
    """Return the ids that a node depends on, each once."""
    if not node.ctrl_deps:
        return node.data_deps if len(node.data_deps) < 2 else tuple(dict.fromkeys(node.data_deps))
    return tuple(dict.fromkeys((*node.data_deps, *node.ctrl_deps)))


def lane_of(node: Works) -> Lane:
    """Return who works on it."""
    return "memory" if isinstance(node, Memory) else node.on


def work_ns(node: Works, gpu: Gpu) -> int | None:
    """Return how long it takes; None where the rate that it needs is not known."""
    if node.duration_ns is not None:
        return node.duration_ns
    flops = node.flops if isinstance(node, Compute) else 0.0
    if (flops and not gpu.flop_per_s) or (node.bytes and not gpu.memory_bytes_per_s):
        return None
    computes_s = flops / gpu.flop_per_s if flops else 0.0
    moves_s = node.bytes / gpu.memory_bytes_per_s if node.bytes else 0.0
    return round(max(computes_s, moves_s) * 1e9)


def told(node: Node) -> str:
    """Return how a message names a node."""
    return f"node {node.id} {node.name!r}" if node.name else f"node {node.id}"


def told_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, in ranges: ``ranks 0-7,9``.

    >>> told_ranks([0, 1, 2, 5]), told_ranks([3])
    ('ranks 0-2,5', 'rank 3')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def ranges(ranks: Sequence[int]) -> str:
    """Return rising whole numbers as text that `parse_ranges` reads."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] + 1 == rank:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def op_of(node: Collective | Send | Recv) -> Op:
    """Return what it does, as the rest of the house calls it."""
    return node.op if isinstance(node, Collective) else "send_recv"


def communications(nodes: Sequence[Node]) -> Iterator[tuple[int, Collective | Send | Recv]]:
    """Yield those that wait for other ranks, each with its place."""
    for place, node in enumerate(nodes):
        if isinstance(node, Collective | Send | Recv):
            yield place, node
