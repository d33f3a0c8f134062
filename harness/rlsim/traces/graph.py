"""Nodes of one program and what they wait for: what is wrong with them, and their order. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.rlsim.traces.model import (
    Collective,
    Compute,
    Gpu,
    Mark,
    Memory,
    Node,
    Recv,
    Send,
    depends,
    told,
    work_ns,
)

DURATION_NS_MAX = 24 * 3600 * 10**9
"""A day: beyond, a unit was mistaken, or a number below 0 was written without its sign."""
BYTES_MAX = 10**15
SHOWN_MAX = 12
"""Nodes of a cycle that are named."""


class Graph(NamedTuple):
    """Nodes by their places in the program, which are not their ids."""

    followers: tuple[tuple[int, ...], ...]
    """Who waits for each."""
    waits: tuple[int, ...]
    """For how many each waits."""
    order: Sequence[int]
    """Each after all that it waits for; else as they are listed."""


def graph_of(nodes: Sequence[Node]) -> Graph:
    """Return the graph of nodes that `problems` finds nothing wrong with.

    Of nodes in a cycle, and those that wait for them, none is in the order.
    """
    place = {node.id: at for at, node in enumerate(nodes)}
    followers: list[list[int]] = [[] for _ in nodes]
    waits = []
    listed = True
    for at, node in enumerate(nodes):
        before = [place[id_] for id_ in depends(node) if id_ in place]
        for earlier in before:
            followers[earlier].append(at)
        waits.append(len(before))
        listed = listed and all(earlier < at for earlier in before)
    graph = Graph(tuple(map(tuple, followers)), tuple(waits), range(len(nodes)))
    return graph if listed else graph._replace(order=_sorted(graph))


def _sorted(graph: Graph) -> list[int]:
    left = list(graph.waits)
    ready = [at for at, count in enumerate(left) if not count]
    order = []
    while ready:
        at = heapq.heappop(ready)
        order.append(at)
        for follower in graph.followers[at]:
            left[follower] -= 1
            if not left[follower]:
                heapq.heappush(ready, follower)
    return order


# -- what is wrong ---------------------------------------------------------------------------------


def problems(nodes: Sequence[Node], gpu: Gpu) -> Iterator[str]:
    """Yield what is wrong with the nodes of one rank, whatever other ranks do."""
    if not nodes:
        yield "no nodes: there is nothing in it"
    counts = Counter(node.id for node in nodes)
    for id_, count in counts.items():
        if count > 1:
            yield f"node {id_}: {count} nodes have this id"
    for node in nodes:
        yield from (f"{told(node)}: {problem}" for problem in _figures(node, gpu))
        for id_ in depends(node):
            if id_ not in counts:
                yield f"{told(node)}: depends on node {id_}, which is not there"
    graph = graph_of(nodes)
    yield from (f"a cycle of dependencies: {cycle}" for cycle in _cycles(nodes, graph))


def _figures(node: Node, gpu: Gpu) -> Iterator[str]:
    if isinstance(node, Mark):
        return
    if not 0 <= node.bytes <= BYTES_MAX:
        yield f"bytes = {node.bytes:g}; expected 0 to {BYTES_MAX:g}"
    if isinstance(node, Collective | Send | Recv):
        return
    if node.duration_ns is not None:
        if not 0 <= node.duration_ns <= DURATION_NS_MAX:
            yield f"duration_ns = {node.duration_ns}; expected 0 to {DURATION_NS_MAX}, a day"
        return
    yield from _rates(node, gpu)


def _rates(node: Compute | Memory, gpu: Gpu) -> Iterator[str]:
    flops = node.flops if isinstance(node, Compute) else 0.0
    if flops < 0:
        yield f"flops = {flops:g}; expected 0 or more"
    elif not flops and not node.bytes:
        states = (
            "duration_ns, flops or bytes" if isinstance(node, Compute) else "duration_ns or bytes"
        )
        yield f"takes no time that is stated; expected {states}"
    elif work_ns(node, gpu) is None:
        lacks = (
            [("flops", "gpu_tflop_per_s", "--tflop-per-s")] if flops and not gpu.flop_per_s else []
        )
        if node.bytes and not gpu.memory_bytes_per_s:
            lacks.append(("bytes", "gpu_memory_gb_per_s", "--memory-gb-per-s"))
        for what, key, option in lacks:
            yield f"states {what}, but nothing says at what rate: {option}, or {key} in the trace"


def _cycles(nodes: Sequence[Node], graph: Graph) -> Iterator[str]:
    """Yield cycles in words that share no node, each from its node that is listed first."""
    left = sorted({*range(len(nodes))} - {*graph.order})
    before: dict[int, list[int]] = {at: [] for at in left}
    for at in left:
        for follower in graph.followers[at]:
            before[follower].append(at)
    while left:
        cycle = _cycle(left[0], before)
        shown = [told(nodes[at]) for at in cycle[:SHOWN_MAX]]
        if len(cycle) > SHOWN_MAX:
            shown.append(f"... ({len(cycle) - SHOWN_MAX} more)")
        yield " -> ".join([*shown, told(nodes[cycle[0]])])
        gone = set(cycle)
        while gone:  # and whoever now waits for none that is left
            left = [at for at in left if at not in gone]
            before = {at: [one for one in before[at] if one not in gone] for at in left}
            gone = {at for at in left if not before[at]}


def _cycle(at: int, before: Mapping[int, Sequence[int]]) -> list[int]:
    """Return one that is reached from a node over those it waits for; all wait for some."""
    seen: dict[int, int] = {}
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = before[at][0]
    cycle = path[seen[at] :][::-1]  # from who is waited for to who waits
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
