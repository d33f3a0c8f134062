"""A meeting as it crosses the network: stages of latency, of work within nodes, and of flows.

What a collective is made of is said by `harness.rlsim.collectives`; here its ranks have GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.errors import UsageError
from harness.fabric.topology import Topology
from harness.model.bench import Role
from harness.model.scenario import Op
from harness.model.simulation import Calibration
from harness.rlsim import collectives
from harness.rlsim.collectives import Interconnect, Planned
from harness.rlsim.hops import Hop, Place
from harness.rlsim.kernels import Floats
from harness.rlsim.paths import Paths
from harness.rlsim.tables import Table
from harness.rlsim.traces.meetings import Meeting
from harness.rlsim.traces.model import Ranks
from harness.rlsim.traces.wires import NOWHERE, Wires, over_all, over_rail

MBIT_PER_S_OF_A_GB = 8000


class Stage(NamedTuple):
    """After the latency, what goes on at once; flows cross the network, or there are none."""

    latency_ns: int
    local_ns: int
    paths: Paths
    sizes_bytes: Floats


@dataclass(frozen=True, eq=False)
class Talk:
    """What a meeting takes, and by what that was reckoned."""

    stages: tuple[Stage, ...]
    planned: Planned
    lost: str
    """Between which GPUs no way leads; "" where all have one."""


def seats_of(topology: Topology, ranks: int, pod: Role | None = None) -> list[Place]:
    """Return the node and the GPU of each rank: nodes in their order, and their GPUs in theirs.

    Raises `UsageError` where there are more ranks than GPUs.
    """
    nodes = [place for place in topology.nodes.values() if pod in (None, place.pod)]
    seats = [(place.name, gpu) for place in nodes for gpu in range(place.seats)]
    if ranks > len(seats):
        those = f"nodes of pod {pod!r}" if pod else "nodes"
        raise UsageError(
            f"{ranks} ranks, but the bench has {len(seats)} GPUs on its {len(nodes)} {those}:"
            f" {'rank' if ranks == len(seats) + 1 else 'ranks'} from {len(seats)} on have no place"
        )
    return seats[:ranks]


def interconnect_of(
    topology: Topology, figures: Calibration, gpu: str, tables: Sequence[Table] = ()
) -> Interconnect:
    """Return what joins ranks. Raises `UsageError` where NCCL is asked of a GPU nobody measured."""
    nics = max(len(place.nics) for place in topology.nodes.values())
    rate = topology.rates.link_mbit_per_s / MBIT_PER_S_OF_A_GB * figures.network.link_share.value
    if figures.collectives.backend == "gloo":
        return collectives.gloo(figures.collectives, nics=nics, nic_gb_per_s=rate)
    return collectives.nccl(gpu, nics=nics, nic_gb_per_s=rate, tables=tables)


class Talks:
    """All that ranks say to each other; `seats` by rank."""

    def __init__(self, interconnect: Interconnect, seats: Sequence[Place], wires: Wires) -> None:
        self._interconnect, self.seats, self._wires = interconnect, seats, wires
        self._planned: dict[tuple[Op, int, bool, tuple[Place, ...]], Planned] = {}
        """By what decides them: groups that lie alike do alike."""
        self._talks: dict[tuple[Op, int, bool, Ranks], Talk] = {}

    def of(self, meeting: Meeting) -> Talk:
        """Return what a meeting takes."""
        one_way = not meeting.group
        key = (meeting.op, meeting.bytes, one_way, meeting.ranks)
        if key not in self._talks:
            planned = self._plan(*key)
            lost: list[str] = []
            stages = tuple(self._stage(stage, meeting.ranks, lost) for stage in planned.stages)
            self._talks[key] = Talk(stages, planned, lost[0] if lost else "")
        return self._talks[key]

    def _plan(self, op: Op, size_bytes: int, one_way: bool, ranks: Ranks) -> Planned:
        nodes: dict[str, str] = {}
        pattern = []
        for rank in ranks:
            node, gpu = self.seats[rank]
            pattern.append((nodes.setdefault(node, str(len(nodes))), gpu))
        key = (op, size_bytes, one_way, tuple(pattern))
        if key not in self._planned:
            self._planned[key] = collectives.stages(
                op, size_bytes, pattern, self._interconnect, one_way=one_way
            )
        return self._planned[key]

    def _stage(self, stage: collectives.Stage, ranks: Ranks, lost: list[str]) -> Stage:
        paths: list[tuple[int, ...]] = []
        sizes: list[float] = []
        for hop in stage.flows:
            ways = self._ways(hop, ranks)
            if NOWHERE in ways[0]:
                a, b = (self._told(ranks[end]) for end in (hop.sender, hop.receiver))
                lost.append(f"no way leads from {a} to {b}")
            paths += ways
            sizes += [hop.bytes / len(ways)] * len(ways)
        return Stage(stage.latency_ns, stage.local_ns, Paths.of(paths), np.array(sizes))

    def _told(self, rank: int) -> str:
        node, gpu = self.seats[rank]
        return f"rank {rank} (GPU {gpu} of {node})"

    def _ways(self, hop: Hop, ranks: Ranks) -> list[tuple[int, ...]]:
        nodes = self._wires.topology.nodes
        source = nodes[self.seats[ranks[hop.sender]][0]]
        node, gpu = self.seats[ranks[hop.receiver]]
        if self._interconnect.backend == "gloo":
            return [self._wires.path(*way) for way in over_all(source, nodes[node])]
        return [self._wires.path(*over_rail(source, nodes[node], gpu))]
