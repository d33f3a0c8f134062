"""All ranks on their way through one step of training: who computes, who waits, who sends when.

Ranks of one stage and one shard, a *squad*, compute alike and go together. A squad computes before
each time of a communication, waits for the other squads of it, and goes on when all are done: a
rank computes or communicates. What needs no network is reckoned ahead; what does waits for its
moment and is carried then, among all else that is under way. All times of one phase are carried
together: alone on the network, or where nothing changes meanwhile, they take as long as one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from harness.bench.simulated.exchange import Exchange
from harness.bench.simulated.world import World
from harness.model.training.phase import Phase
from harness.model.training.schedule import Schedule, Where


class Took(NamedTuple):
    """How a step went for one squad; it computed from its begin on, and communicated to its end."""

    begin_ns: int
    end_ns: int
    compute_ns: int
    communicate_ns: int


class Terms(Protocol):
    """What a march has to know of those that take part."""

    def compute_ns(self, squad: Where, flops: float) -> int:
        """Return how long each rank of a squad takes for so many operations of its own."""

    def teams(self, phase: Phase) -> Iterator[tuple[tuple[Where, ...], Exchange]]:
        """Yield squads that wait for each other in a phase, and what all times of it are."""

    def tell(self, squad: Where, index: int, phase: Phase, begin_ns: int, end_ns: int) -> None:
        """Have the phase told by whoever of the squad tells; `end_ns` 0: it begins."""


@dataclass(eq=False, slots=True)
class _Part:
    """One team's part of a move: by squad, what is computed before each time of it."""

    index: int
    phase: Phase
    gaps_ns: Mapping[Where, int]
    exchange: Exchange
    ready_ns: dict[Where, int] = field(default_factory=dict)
    """When each squad was there."""


class March:
    """One step, from now on; `lead_ns` passes before anything else does.

    `finding_ns` is what a rank takes before each communication, beside what it computes.
    """

    def __init__(
        self, world: World, terms: Terms, schedule: Schedule, *, lead_ns: int, finding_ns: int
    ) -> None:
        self._world, self._terms, self._schedule = world, terms, schedule
        self._begin_ns = world.clock.now_ns()
        self._free_ns: dict[Where, int] = {}
        """When each squad is done with what it has done so far."""
        self._computed_ns: dict[Where, int] = {}
        self._communicated_ns: dict[Where, int] = {}
        self._lead_ns, self._finding_ns = lead_ns, finding_ns

    async def run(self, squads: Iterable[Where]) -> dict[Where, Took]:
        """Return how it went, once the last squad is done."""
        self._free_ns = dict.fromkeys(squads, self._begin_ns + self._lead_ns)
        self._computed_ns = dict.fromkeys(self._free_ns, 0)
        self._communicated_ns = dict.fromkeys(self._free_ns, 0)
        self._programs = {squad: iter(parts) for squad, parts in self._parts().items()}
        async with asyncio.TaskGroup() as self._carrying:
            self._go_on(self._free_ns)
        for squad, flops in self._schedule.after.items():
            self._compute(squad, self._terms.compute_ns(squad, flops))
        await self._world.clock.sleep_ns(max(self._free_ns.values()) - self._world.clock.now_ns())
        return {squad: self._took(squad) for squad in self._free_ns}

    def _took(self, squad: Where) -> Took:
        return Took(
            self._begin_ns,
            self._free_ns[squad],
            self._computed_ns[squad],
            self._communicated_ns[squad],
        )

    def _parts(self) -> dict[Where, list[_Part]]:
        """Return each squad's parts, in order."""
        programs: dict[Where, list[_Part]] = {squad: [] for squad in self._free_ns}
        for index, (phase, flops) in enumerate(self._schedule.moves):
            for squads, exchange in self._terms.teams(phase):
                gaps_ns = {
                    squad: self._terms.compute_ns(squad, flops[squad] / phase.times)
                    for squad in squads
                }
                part = _Part(index, phase, gaps_ns, exchange)
                for squad in squads:
                    programs[squad].append(part)
        return programs

    # -- on the way ------------------------------------------------------------------------------

    def _go_on(self, squads: Iterable[Where]) -> None:
        """Let squads go on, each until it waits for others or the network, or is done."""
        free = list(squads)
        while free:
            squad = free.pop()
            part = next(self._programs[squad], None)
            if part is None:
                continue
            ready_ns = self._free_ns[squad] + self._finding_ns + part.gaps_ns[squad]
            part.ready_ns[squad] = ready_ns
            self._terms.tell(squad, part.index, part.phase, ready_ns, 0)
            if len(part.ready_ns) < len(part.gaps_ns):
                continue
            all_ready_ns = max(part.ready_ns.values())
            if part.exchange.is_local:
                self._end(part, all_ready_ns + part.exchange.local_ns)
                free += part.gaps_ns
            else:
                self._carrying.create_task(self._carry(part, all_ready_ns))

    async def _carry(self, part: _Part, at_ns: int) -> None:
        """Send what a part sends, from `at_ns` on; then let its squads go on."""
        self._end(part, await part.exchange.done(self._world, at_ns))
        self._go_on(part.gaps_ns)

    def _end(self, part: _Part, exchanged_ns: int) -> None:
        """End a part, all of whose exchanges are reckoned; computing between them is not yet."""
        times = part.phase.times
        end_ns = exchanged_ns + (times - 1) * max(part.gaps_ns.values())
        for squad, gap_ns in part.gaps_ns.items():
            ready_ns = part.ready_ns[squad]
            self._free_ns[squad] = end_ns
            self._computed_ns[squad] += times * gap_ns
            self._communicated_ns[squad] += end_ns - ready_ns - (times - 1) * gap_ns
            self._terms.tell(squad, part.index, part.phase, ready_ns, end_ns)

    def _compute(self, squad: Where, duration_ns: int) -> None:
        self._free_ns[squad] += duration_ns
        self._computed_ns[squad] += duration_ns
