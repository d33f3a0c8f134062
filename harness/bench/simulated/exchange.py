"""What a collective among ranks takes: a time that is fixed, and flows from node to node.

Who sends to whom with gloo is said in `harness.fabric.demand`. Beside the network, each step of the
algorithm takes `step_us`, and each rank copies what it sends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import ceil, log2
from typing import NamedTuple

from harness.bench.simulated.world import Flow
from harness.clock import NS_PER_US
from harness.model.scenario import Op
from harness.model.simulation import Calibration

Group = tuple[str, ...]
"""The node of each rank, in the group's order."""
Edges = Iterable[tuple[str, str, float]]
"""From a rank's node, to a rank's node, and how much of the size."""


class Exchange(NamedTuple):
    """One time of a collective, of all groups that do it at once."""

    fixed_ns: int
    flows: tuple[Flow, ...] = ()

    def repeated(self, times: int) -> tuple[Flow, ...]:
        """Return what so many of them send together."""
        return tuple(flow._replace(bytes=flow.bytes * times) for flow in self.flows)


def exchange_of(figures: Calibration, op: Op, groups: Sequence[Group], size_bytes: int) -> Exchange:
    """Return one time of `op` in each of these groups, which have as many ranks.

    `size_bytes` as nccl-tests counts it; `send_recv` is its ring shift.
    """
    if len(groups[0]) == 1:
        return Exchange(0)
    steps, share = _work(op, len(groups[0]))
    edges = (edge for group in groups for edge in _edges(op, group))
    return _taken(figures, steps, share * size_bytes, edges, size_bytes)


def handing_on(figures: Calibration, pairs: Sequence[Group], size_bytes: int) -> Exchange:
    """Return the same of pairs whose first sends `size_bytes` to the second."""
    edges = ((source, target, 1.0) for source, target in pairs)
    return _taken(figures, 1, size_bytes, edges, size_bytes)


def _taken(
    figures: Calibration, steps: int, copied_bytes: float, edges: Edges, size_bytes: int
) -> Exchange:
    sent_bytes: dict[tuple[str, str], float] = defaultdict(float)
    for source, target, share in edges:
        if source != target:
            sent_bytes[source, target] += share * size_bytes
    own = figures.collectives
    step_ns = steps * own.step_us.value * NS_PER_US
    copy_ns = copied_bytes / 1000 * own.copy_ns_per_kb.value
    flows = (Flow(source, target, sent) for (source, target), sent in sent_bytes.items())
    return Exchange(round(step_ns + copy_ns), tuple(flows))


def _work(op: Op, ranks: int) -> tuple[int, float]:
    """Return the steps of the algorithm, and how much of the size each rank sends in them."""
    rest = ranks - 1
    match op:
        case "all_reduce" | "reduce_scatter":  # which gloo does as an all_reduce
            return 2 * rest, 2 * rest / ranks
        case "all_gather" | "all_to_all":
            return rest, rest / ranks
        case "broadcast":
            return ceil(log2(ranks)), 1.0
        case "send_recv":
            return 1, 1.0


def _edges(op: Op, group: Group) -> Edges:
    ranks = len(group)
    if op == "all_to_all":  # of nodes: pairs of ranks may be a million
        there = Counter(group)
        return ((a, b, m * n / ranks) for a, m in there.items() for b, n in there.items())
    if op == "broadcast":
        parents = (k - (1 << k.bit_length() - 1) for k in range(1, ranks))
        return ((group[p], group[k], 1.0) for k, p in enumerate(parents, start=1))
    share = _work(op, ranks)[1]
    back = op in ("all_reduce", "reduce_scatter")
    return (
        (group[k], group[k - 1] if back else group[(k + 1) % ranks], share) for k in range(ranks)
    )
