"""Collectives among ranks of a simulated bench: their stages, as flows over the bench's network.

What a collective is made of is said by `harness.rlsim.collectives`. Here its ranks have nodes and
NICs, groups that do the same at once are one exchange, and as many times of it as come on end are
carried together: where nothing else changes they take as long as one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from harness.bench.simulated.world import Flow, World
from harness.model.scenario import Op
from harness.model.training.axes import Members
from harness.rlsim import collectives
from harness.rlsim.collectives import Interconnect, Planned
from harness.rlsim.hops import Place

MBIT_PER_S_OF_A_GB = 8000


class Stage(NamedTuple):
    """What goes on at once: flows, and beside them what nodes do within, after a latency."""

    latency_ns: int
    local_ns: int
    flows: tuple[Flow, ...]


class Exchange(NamedTuple):
    """One time of a collective, of all groups that do it at once; stages come one by one."""

    stages: tuple[Stage, ...]

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent from node to node."""
        return not any(stage.flows for stage in self.stages)

    @property
    def local_ns(self) -> int:
        """Return how long it takes where nothing is sent."""
        return sum(stage.latency_ns + stage.local_ns for stage in self.stages)


async def carried(world: World, exchange: Exchange, at_ns: int, times: int = 1) -> int:
    """Do an exchange so many times from `at_ns` on; return when that is over: now, or soon."""
    clock = world.clock
    for latency_ns, local_ns, flows in exchange.stages:
        at_ns += times * latency_ns
        arrived_ns = at_ns
        if flows:
            await clock.sleep_ns(at_ns - clock.now_ns())
            await world.network.carry(
                [flow._replace(bytes=flow.bytes * times) for flow in flows] if times > 1 else flows
            )
            arrived_ns = clock.now_ns()
        at_ns = max(at_ns + times * local_ns, arrived_ns)
    return at_ns


def interconnect_of(world: World, gpu: str) -> Interconnect:
    """Return what joins the ranks of a bench whose GPUs are such. Raises `UsageError`."""
    figures, topology = world.figures, world.topology
    nics = max(len(place.nics) for place in topology.nodes.values())
    rate = topology.rates.link_mbit_per_s / MBIT_PER_S_OF_A_GB * figures.network.link_share.value
    if figures.collectives.backend == "gloo":
        return collectives.gloo(figures.collectives, nics=nics, nic_gb_per_s=rate)
    return collectives.nccl(gpu, nics=nics, nic_gb_per_s=rate)


class Exchanges:
    """Exchanges of ranks; `places` by rank: its node, and its GPU there."""

    def __init__(self, world: World, interconnect: Interconnect, places: Sequence[Place]) -> None:
        self._world, self._interconnect, self._places = world, interconnect, places
        self._planned: dict[tuple[Op, int, bool, tuple[Place, ...]], Planned] = {}
        """By what decides them: groups that lie alike do alike."""

    def of(self, op: Op, groups: Members, size_bytes: int, *, one_way: bool = False) -> Exchange:
        """Return what `groups` do, which have as many ranks; see `harness.rlsim.collectives`."""
        stages: list[Stage] = []
        planned = [self._plan(op, group, size_bytes, one_way) for group in groups]
        for parts in zip(*(plan.stages for plan in planned), strict=True):
            sent_bytes: dict[tuple[str, str, int | None], float] = defaultdict(float)
            for group, part in zip(groups, parts, strict=True):
                for sender, receiver, hop_bytes in part.flows:
                    sent_bytes[self._way(group[sender], group[receiver])] += hop_bytes
            flows = (Flow(source, to, sent, nic) for (source, to, nic), sent in sent_bytes.items())
            latency_ns = max(part.latency_ns for part in parts)
            stages.append(Stage(latency_ns, max(part.local_ns for part in parts), tuple(flows)))
        return Exchange(tuple(stages))

    def _plan(self, op: Op, group: Sequence[int], size_bytes: int, one_way: bool) -> Planned:
        nodes: dict[str, str] = {}
        gpus: dict[int, int] = {}
        pattern = []
        for rank in group:
            node, gpu = self._places[rank]
            alike = nodes.setdefault(node, str(len(nodes))), gpus.setdefault(gpu, len(gpus))
            pattern.append(alike)
        key = op, size_bytes, one_way, tuple(pattern)
        if key not in self._planned:
            self._planned[key] = collectives.stages(
                op, size_bytes, pattern, self._interconnect, one_way=one_way
            )
        return self._planned[key]

    def _way(self, sender: int, receiver: int) -> tuple[str, str, int | None]:
        """Return from where to where, and over which rail: the receiver's; gloo takes all."""
        (source, _), (target, gpu) = self._places[sender], self._places[receiver]
        return source, target, self._rail(target, gpu)

    def _rail(self, node: str, gpu: int) -> int | None:
        if self._interconnect.backend == "gloo":
            return None
        return self._world.topology.nodes[node].nic_of(gpu)
