"""Collectives among ranks of a simulated bench: their stages, as flows over the bench's network.

What a collective is made of is said by `harness.rlsim.collectives`. Here its ranks have nodes and
NICs, groups that do the same at once are one exchange, and as many times of it as come on end are
carried together: where nothing else changes they take as long as one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from harness.bench.simulated.world import Flow, World
from harness.clock import NS_PER_US
from harness.model.scenario import Op
from harness.model.training.axes import Members
from harness.rlsim import collectives
from harness.rlsim.collectives import Interconnect, Planned
from harness.rlsim.hops import Place

MBIT_PER_S_OF_A_GB = 8000
KEPT_MAX = 1000
"""Of what was worked out: more than a step has that differ."""
K = TypeVar("K")
V = TypeVar("V")
Ranks = tuple[int, ...]


class Stage(NamedTuple):
    """What goes on at once: flows, and beside them what nodes do within, after a latency."""

    latency_ns: int
    local_ns: int
    flows: tuple[Flow, ...]


class Exchange(NamedTuple):
    """A collective of all groups that do it at once, once or on end; stages come one by one."""

    stages: tuple[Stage, ...]

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent from node to node."""
        return not any(stage.flows for stage in self.stages)

    @property
    def local_ns(self) -> int:
        """Return how long it takes where nothing is sent."""
        return sum(stage.latency_ns + stage.local_ns for stage in self.stages)

    async def done(self, world: World, at_ns: int) -> int:
        """Do it from `at_ns` on; return when it is over: that is now, or soon."""
        clock = world.clock
        for latency_ns, local_ns, flows in self.stages:
            at_ns += latency_ns
            arrived_ns = at_ns
            if flows:
                await clock.sleep_ns(at_ns - clock.now_ns())
                await world.network.carry(flows)
                arrived_ns = clock.now_ns()
            at_ns = max(at_ns + local_ns, arrived_ns)
        return at_ns


def interconnect_of(world: World, gpu: str, env: Mapping[str, str] | None = None) -> Interconnect:
    """Return what joins the ranks of a bench whose GPUs are such; `env` has NCCL's variables.

    Raises `UsageError` on a GPU that nobody measured.
    """
    figures, topology = world.figures, world.topology
    nics = max(len(place.nics) for place in topology.nodes.values())
    rate = topology.rates.link_mbit_per_s / MBIT_PER_S_OF_A_GB * figures.network.link_share.value
    if figures.collectives.backend == "gloo":
        return collectives.gloo(figures.collectives, nics=nics, nic_gb_per_s=rate)
    asked = env or {}
    return collectives.nccl(
        gpu,
        nics=nics,
        nic_gb_per_s=rate,
        algorithms=asked.get("NCCL_ALGO", ""),
        protocols=asked.get("NCCL_PROTO", ""),
    )


class Exchanges:
    """Exchanges of ranks; `places` by rank: its node, and its GPU there."""

    def __init__(self, world: World, interconnect: Interconnect, places: Sequence[Place]) -> None:
        self._world, self._interconnect, self._places = world, interconnect, places
        self._counted_ns = 0
        """Of the network's latency, what is in a stage's latency already: NCCL's are from end to
        end, and the network adds its own."""
        if interconnect.backend == "nccl":
            self._counted_ns = round(world.figures.network.latency_us.value * NS_PER_US)
        self._patterns: dict[Ranks, tuple[Place, ...]] = {}
        self._planned: dict[tuple[Op, int, bool, tuple[Place, ...]], Planned] = {}
        """By what decides them: groups that lie alike do alike."""
        self._made: dict[tuple[Op, Members, int, int, bool], Exchange] = {}

    def of(
        self, op: Op, groups: Members, size_bytes: int, *, times: int = 1, one_way: bool = False
    ) -> Exchange:
        """Return what `groups` do, which have as many ranks; see `harness.rlsim.collectives`."""
        key = op, groups, size_bytes, times, one_way
        if key not in self._made:
            planned = [self._plan(op, group, size_bytes, one_way) for group in groups]
            stages = zip(*(plan.stages for plan in planned), strict=True)
            made = Exchange(tuple(self._together(groups, parts, times) for parts in stages))
            _keep(self._made, key, made)
        return self._made[key]

    def _together(self, groups: Members, parts: Sequence[collectives.Stage], times: int) -> Stage:
        """Return one stage of all groups, as often as it comes."""
        sent_bytes: dict[tuple[str, str, int | None], float] = defaultdict(float)
        for group, part in zip(groups, parts, strict=True):
            for sender, receiver, hop_bytes in part.flows:
                sent_bytes[self._way(group[sender], group[receiver])] += hop_bytes * times
        latency_ns = max(part.latency_ns for part in parts) * times
        if sent_bytes:
            latency_ns = max(0, latency_ns - self._counted_ns)
        return Stage(
            latency_ns,
            max(part.local_ns for part in parts) * times,
            tuple(Flow(source, to, sent, nic) for (source, to, nic), sent in sent_bytes.items()),
        )

    def _plan(self, op: Op, group: Ranks, size_bytes: int, one_way: bool) -> Planned:
        pattern = self._patterns.get(group)
        if pattern is None:
            pattern = self._patterns[group] = self._pattern(group)
        key = op, size_bytes, one_way, pattern
        if key not in self._planned:
            made = collectives.stages(op, size_bytes, pattern, self._interconnect, one_way=one_way)
            _keep(self._planned, key, made)
        return self._planned[key]

    def _pattern(self, group: Ranks) -> tuple[Place, ...]:
        """Return places that are alike where groups lie alike: nodes and GPUs as they come."""
        nodes: dict[str, str] = {}
        gpus: dict[int, int] = {}
        places = (self._places[rank] for rank in group)
        return tuple(
            (nodes.setdefault(node, f"{len(nodes)}"), gpus.setdefault(gpu, len(gpus)))
            for node, gpu in places
        )

    def _way(self, sender: int, receiver: int) -> tuple[str, str, int | None]:
        """Return from where to where, and over which rail: the receiver's; gloo takes all."""
        (source, _), (target, gpu) = self._places[sender], self._places[receiver]
        if self._interconnect.backend == "gloo":
            return source, target, None
        return source, target, self._world.topology.nodes[target].nic_of(gpu)


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    """Keep what was worked out, and forget all before it where it becomes too much."""
    if len(kept) == KEPT_MAX:
        kept.clear()
    kept[key] = value
