"""What the steps of a running scenario share: the bench, the record, and what is up right now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from harness.bench.base import Bench
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError
from harness.fabric.links import DARK, Link, Plan
from harness.model.scenario import Scenario
from harness.run.generation.asked import GenerationAsked
from harness.run.pressure import Pressure
from harness.run.rl.asked import TrainingAsked
from harness.wire.messages import (
    DestroyGroups,
    Done,
    Groups,
    MakeGroups,
    Message,
    RanksReady,
    StartRanks,
    StopRanks,
)

if TYPE_CHECKING:  # a fleet is built from a session
    from harness.run.fabric.controller import Controller
    from harness.run.generation.fleet import Fleet
    from harness.run.rl.trainees import Trainees

R = TypeVar("R", bound=Message)

ELECTRICAL = "electrical"
MESSAGE_NS = 10 * NS_PER_S
"""Limit of a command that does no work."""
RANKS_TIMEOUT_NS = 90 * NS_PER_S
"""Starting ranks imports torch: seconds each where cores are few."""


class Record(Protocol):
    """Where events go: the journal and whoever watches the run."""

    def event(self, stream: str, data: Mapping[str, object]) -> None:
        """Write one event of a declared stream, stamped now."""


@dataclass
class Session:
    """The mutable state of one run. `lit` is what is steered to, `shape` how it is called."""

    bench: Bench
    scenario: Scenario
    record: Record
    plans: Mapping[str, Plan]
    shape: str = ELECTRICAL
    lit: frozenset[Link] = DARK.links
    generation: int = 0
    subgroups: tuple[tuple[int, ...], ...] = ()
    backend: str = ""
    ranks_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks by agent; empty until ranks run."""
    generation_asked: GenerationAsked | None = None
    fleet: Fleet | None = None
    """Engines that generate, from the first ``generate`` step on."""
    training_asked: TrainingAsked | None = None
    fabric: Controller | None = None
    """What decides about circuits, as long as a loop runs over a fabric of its own."""
    trainees: Trainees | None = None
    """Ranks that train without learning, from the first loop on."""
    porters: dict[str, str] = field(default_factory=dict)
    """By node, where its porter of weights listens; they stay as long as engines may be built."""
    keep: Path = Path("checkpoint")
    """Where loops leave their checkpoints."""
    resume: Path | None = None
    """The same of an earlier run, from which the first loop goes on."""
    pressure: Pressure = field(default_factory=Pressure)
    """How short CPUs are, where all of the bench is on this machine."""
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What steps leave open for later steps; it is closed whichever way the run ends."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(ranks) for ranks in self.ranks_of.values())

    @property
    def workers(self) -> tuple[str, ...]:
        """Agents that run ranks, in rank order."""
        return tuple(self.ranks_of)

    @property
    def watchers(self) -> tuple[str, ...]:
        """ToRs whose agent can send and hear beacons."""
        return tuple(tor for tor in self.bench.topology.tors if tor in self.bench.hellos)

    def at(self, agent: str, t_ns: int) -> int:
        """Map an agent's stamp onto the coordinator's clock."""
        return self.bench.clocks[agent].to_coordinator(t_ns)

    def bound_ns(self) -> int:
        """Return the largest clock bound among the agents now."""
        now_ns = self.bench.clock.now_ns()
        return max(
            (fit.bound_at(fit.to_node(now_ns)) for fit in self.bench.clocks.values()), default=0
        )

    async def everyone(self, body: Message, reply: type[R], timeout_ns: int) -> dict[str, R]:
        """Ask every worker the same."""
        return await self.bench.ask_all(dict.fromkeys(self.workers, body), reply, timeout_ns)

    # -- how short CPUs are --------------------------------------------------------------

    @contextmanager
    def pressed(self, step: int, policy: str = "") -> Iterator[None]:
        """Tell, once the body is over, how much of its time some task waited for a CPU."""
        self.all_up()
        try:
            yield
        finally:
            if row := self.pressure.row(self.bench.clock.now_ns(), step, policy):
                self.record.event("pressure", row)

    def all_up(self) -> None:
        """Let what is told of a step begin now: starting processes is no part of what it times."""
        self.pressure.begin(self.bench.clock.now_ns())

    # -- ranks and communicators ---------------------------------------------------------

    def lay_out_ranks(self) -> None:
        """Give ranks their numbers: one per GPU of a node, one on a node without, in node order."""
        first = 0
        for node, place in self.bench.topology.nodes.items():
            found = self.bench.hellos[node].gpus
            gpus = found if place.gpus is None else place.gpus
            if gpus > found:
                raise InfrastructureError(
                    f"{node}: the bench file says {gpus} GPUs, its agent found {found}"
                )
            count = max(1, gpus)
            self.ranks_of[node] = tuple(range(first, first + count))
            first += count

    async def ensure_groups(self, subgroups: Sequence[tuple[int, ...]] = ()) -> None:
        """Have ranks running with these subgroups; starts them, or makes groups anew."""
        wanted = tuple(subgroups)
        if self.generation and wanted == self.subgroups:
            return
        if self.generation:
            await self.destroy_groups()
            await self.make_groups(wanted)
        else:
            await self._start_ranks(wanted)

    async def _start_ranks(self, subgroups: tuple[tuple[int, ...], ...]) -> None:
        if not self.ranks_of:
            self.lay_out_ranks()
        self.generation, self.subgroups = 1, subgroups
        ready = await self.bench.ask_all(
            {
                agent: StartRanks(
                    ranks=ranks, groups=self._groups(agent), nccl_env=self.scenario.nccl_env
                )
                for agent, ranks in self.ranks_of.items()
            },
            RanksReady,
            RANKS_TIMEOUT_NS,
        )
        self.backend = next(iter(ready.values())).backend
        for agent, answer in ready.items():
            self.record.event(
                "note",
                {
                    "level": "info",
                    "who": agent,
                    "text": f"{_ranks(answer.pids)} on {answer.backend}",
                },
            )
        self.all_up()

    async def destroy_groups(self) -> int:
        """Destroy all communicators; return the last rank's stamp, mapped."""
        done = await self.everyone(DestroyGroups(), Done, RANKS_TIMEOUT_NS)
        return max(self.at(agent, answer.t_ns) for agent, answer in done.items())

    async def make_groups(self, subgroups: tuple[tuple[int, ...], ...]) -> int:
        """Make communicators under a fresh generation; return the last rank's stamp, mapped."""
        self.generation += 1
        self.subgroups = subgroups
        ready = await self.bench.ask_all(
            {agent: MakeGroups(groups=self._groups(agent)) for agent in self.workers},
            RanksReady,
            RANKS_TIMEOUT_NS,
        )
        return max(self.at(agent, answer.ready_ns) for agent, answer in ready.items())

    async def stop_ranks(self) -> None:
        """Stop all ranks, after the last step."""
        if self.generation:
            await self.everyone(StopRanks(), Done, RANKS_TIMEOUT_NS)

    def _groups(self, agent: str) -> Groups:
        nodes = self.bench.topology.nodes
        return Groups(
            generation=self.generation,
            world_size=self.world_size,
            store=self.bench.store,
            interface=nodes[agent].interface,
            backend="auto" if any(place.gpus != 0 for place in nodes.values()) else "gloo",
            subgroups=self.subgroups,
            timeout_ns=round(self.scenario.timeout_s * NS_PER_S),
        )

    # -- steering ------------------------------------------------------------------------

    async def steer(self, links: frozenset[Link]) -> None:
        """Send traffic over `links` and nothing else over circuits; the rest is electrical."""
        await self.bench.steer(self.bench.topology.routes(links))
        self.lit = links


def _ranks(pids: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank} (pid {pid})" for rank, pid in sorted(pids.items()))
