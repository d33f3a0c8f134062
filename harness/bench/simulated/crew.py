"""The ranks that train, of all nodes together: what they know, and what they do in step.

There is one for each world of ranks that was opened. Nodes that are asked the same meet, and one
answers for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar
from zlib import crc32

from harness.bench.simulated.exchange import Exchange, Exchanges, interconnect_of
from harness.bench.simulated.foretold import Foretold
from harness.bench.simulated.march import March, Took
from harness.bench.simulated.muster import Muster
from harness.bench.simulated.world import Flow, World
from harness.clock import NS_PER_S, NS_PER_US
from harness.model.training.axes import Members, place_of
from harness.model.training.phase import Phase
from harness.model.training.schedule import Where
from harness.model.training.shards import WORD_BYTES, layer_words, shard_of, weights_bytes
from harness.model.training.step import Step, step_of
from harness.model.training.trainer import flops_per_s, profile_of
from harness.wire.generation import Span
from harness.wire.training import OpenTraining, PhaseHappened, Sample, Trained

T = TypeVar("T")

Team = tuple[tuple[Where, ...], Members]
"""Squads that wait for each other in a phase, and their groups of ranks."""


class Gathered(NamedTuple):
    """When shards began to be sent, and had all arrived."""

    begin_ns: int
    end_ns: int


class Crew:
    """See the module; squads are those of `harness.bench.simulated.march`. Raises `UsageError`."""

    def __init__(self, world: World, asked: OpenTraining) -> None:
        spec = self.spec = asked.spec
        self.profile = profile_of(spec)
        self.muster = Muster(asked.world_size)
        self.told = defaultdict[str, Foretold](lambda: Foretold(world.clock))
        """By node."""
        self._world, self._key = world, _key(asked)
        self._flops_per_s = flops_per_s(spec, self.profile)
        self._interconnect = interconnect_of(world, self.profile.gpu.name)
        self._layers = layer_words(self.profile.shape, spec.bytes_scale)
        self._planned: tuple[tuple[int, ...], Step] | None = None
        self._lengths: tuple[tuple[Sample, ...], tuple[int, ...]] | None = None
        self._teams: dict[Members, list[Team]] = {}
        self._version = 0
        """Of the step under way."""
        places = (place_of(rank, spec.degrees) for rank in range(spec.degrees.ranks))
        self._squad_of = [(place.pp, place.dp) for place in places]
        """By rank."""

    @classmethod
    def of(cls, world: World, asked: OpenTraining) -> Crew:
        """Return the one of an opening; whoever asks first makes it. Raises `UsageError`."""
        key = _key(asked)
        if key not in world.shared:
            world.shared[key] = cls(world, asked)
        crew: Crew = world.shared[key]
        return crew

    def disband(self) -> None:
        """Let nobody join any more: a later opening is another one's."""
        if self._world.shared.get(self._key) is self:
            del self._world.shared[self._key]

    async def _together(self, what: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Meet all nodes, do something once, and return its result to each."""
        return await self._world.meet((self, what), len(self.muster.ranks_of), work)

    # -- who is where ---------------------------------------------------------------------------

    @cached_property
    def _exchanges(self) -> Exchanges:
        return Exchanges(self._world, self._interconnect, self.muster.places)

    @cached_property
    def _slowness(self) -> dict[Where, float]:
        """By squad: how much longer its slowest node computes than the profile says."""
        nodes, share = self._world.bench.nodes, self._world.figures.training.compute_share.value
        slowest: dict[Where, float] = {}
        for squad, (node, _) in zip(self._squad_of, self.muster.places, strict=True):
            slowest[squad] = max(slowest.get(squad, 0.0), share / nodes[node].speed)
        return slowest

    @cached_property
    def _tellers(self) -> dict[Where, list[tuple[str, int]]]:
        """By squad, each node whose lowest rank is in it, with that rank."""
        tellers: dict[Where, list[tuple[str, int]]] = defaultdict(list)
        for node, ranks in self.muster.ranks_of.items():
            tellers[self._squad_of[ranks[0]]].append((node, ranks[0]))
        return tellers

    # -- a step ---------------------------------------------------------------------------------

    def lengths(self, samples: tuple[Sample, ...]) -> tuple[int, ...]:
        """Return the tokens of each sample; all nodes are asked with the same ones."""
        if self._lengths is None or self._lengths[0] is not samples:
            tokens = tuple(sample.prompt_tokens + sample.response_tokens for sample in samples)
            self._lengths = samples, tokens
        return self._lengths[1]

    def plan(self, tokens: Sequence[int]) -> Step:
        """Return the step on samples of these lengths."""
        lengths = tuple(tokens)
        known = self._planned and self._planned[0]
        if self._planned is None or (known is not lengths and known != lengths):
            self._planned = lengths, step_of(self.spec, self.profile, lengths)
        return self._planned[1]

    async def step(self, version: int, tokens: Sequence[int]) -> dict[Where, Took]:
        """Have all ranks take a step, as soon as all nodes have come to take it."""

        async def march() -> dict[Where, Took]:
            self._version = version
            figures = self._world.figures.training
            going = March(
                self._world,
                self,
                self.plan(tokens).schedule,
                lead_ns=round(figures.step_fixed_s.value * NS_PER_S),
                finding_ns=round(figures.phase_us.value * NS_PER_US),
            )
            return await going.run(self._slowness)

        return await self._together("step", march)

    def trained(
        self, node: str, version: int, tokens: Sequence[int], took: dict[Where, Took]
    ) -> Trained:
        """Return a node's answer: the times are those of the rank that computed longest."""
        ranks = self.muster.ranks_of[node]
        squads = dict.fromkeys(self._squad_of[rank] for rank in ranks)
        longest = max((took[squad] for squad in squads), key=lambda one: one.compute_ns)
        dealt = self.plan(tokens).dealt
        shards = [dealt[dp] for dp in dict.fromkeys(dp for _, dp in squads)]
        begin_ns, end_ns = longest.begin_ns, longest.end_ns
        return Trained(
            version=version,
            tokens=sum(tokens[i] for shard in shards for batch in shard for i in batch),
            micro_batches=max(map(len, shards)),
            spans=(
                Span(stage="compute", begin_ns=begin_ns, end_ns=begin_ns + longest.compute_ns),
                Span(stage="communicate", begin_ns=end_ns - longest.communicate_ns, end_ns=end_ns),
            ),
            figures={"late_ms": 0.0} if 0 in ranks else {},
        )

    # -- what a march has to know -----------------------------------------------------------------

    def compute_ns(self, squad: Where, flops: float) -> int:
        """Return how long each rank of a squad takes for so many operations of its own."""
        return round(flops / self._flops_per_s * self._slowness[squad] * NS_PER_S)

    def teams(self, phase: Phase) -> Iterator[tuple[tuple[Where, ...], Exchange]]:
        """Yield squads that wait for each other in a phase, and what all times of it are."""
        one_way = phase.op == "send_recv"
        for squads, groups in self._teams_of(phase.groups):
            exchange = self._exchanges.of(
                phase.op, groups, phase.bytes, times=phase.times, one_way=one_way
            )
            yield squads, exchange

    def _teams_of(self, groups: Members) -> Sequence[Team]:
        if groups not in self._teams:
            together: dict[tuple[Where, ...], list[tuple[int, ...]]] = defaultdict(list)
            for ranks in groups:
                squads = tuple(dict.fromkeys(self._squad_of[rank] for rank in ranks))
                together[squads].append(ranks)
            self._teams[groups] = [(squads, tuple(parts)) for squads, parts in together.items()]
        return self._teams[groups]

    def tell(self, squad: Where, index: int, phase: Phase, begin_ns: int, end_ns: int) -> None:
        """Have the phase told by the lowest rank of each node, if it is of this squad."""
        for node, rank in self._tellers.get(squad, ()):
            happened = PhaseHappened(
                version=self._version,
                index=index,
                name=phase.name,
                op=phase.op,
                axis=phase.axis,
                bytes=phase.bytes,
                begin_ns=begin_ns,
                end_ns=end_ns,
                rank=rank,
            )
            self.told[node].add(happened)

    # -- weights --------------------------------------------------------------------------------

    @property
    def weights_bytes(self) -> int:
        """Return the size of the file of weights."""
        return weights_bytes(self._layers)

    @cached_property
    def held_bytes(self) -> dict[str, int]:
        """By node, the weights that its ranks hold."""
        degrees = self.spec.degrees

        def shard_bytes(rank: int) -> int:
            return WORD_BYTES * sum(
                map(len, shard_of(place_of(rank, degrees), degrees, self._layers))
            )

        return {node: sum(map(shard_bytes, ranks)) for node, ranks in self.muster.ranks_of.items()}

    async def gather(self, writers: tuple[int, ...]) -> Gathered:
        """Send all shards to the nodes of `writers`, as soon as all nodes have come to do that."""
        clock, held = self._world.clock, self.held_bytes

        async def gathering() -> Gathered:
            begin_ns = clock.now_ns()
            await self._world.takes(self._world.figures.sync.gather_fixed_s)
            there = [self.muster.places[writer][0] for writer in writers]
            flows = [Flow(n, to, held[n]) for to in there for n in held if n != to]
            await self._world.network.carry(flows)
            return Gathered(begin_ns, clock.now_ns())

        return await self._together("gather", gathering)

    def checksum(self, version: int) -> int:
        """Return what stands for the file's contents."""
        return crc32(f"{self.spec.seed} {version}".encode())


def _key(asked: OpenTraining) -> tuple[Hashable, ...]:
    return "crew", asked.store, asked.attempt
