"""New weights from each node's memory into its engines, the way that `across_sync` says.

An engine that fails to load has no weights that anybody knows: it is given up, and started anew
with the new ones like any other that is built from now on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.clock import NS_PER_S, Clock
from harness.errors import AgentLost, StepFailed
from harness.model.scenario import Rl
from harness.run.generation.fleet import Fleet
from harness.run.generation.loading import load_weights
from harness.run.generation.places import by_node
from harness.tasks import together
from harness.wire.generation import Span


class Load(NamedTuple):
    """How long engines loaded, and how long asking them took beyond that; of nodes, the longest."""

    load_s: float = 0.0
    rpc_s: float = 0.0


class Loading:
    """Of the fleet's `version`, from its `sources`; whoever loads holds its `changing`."""

    def __init__(self, fleet: Fleet, clock: Clock, step: Rl) -> None:
        self._fleet, self._clock, self._step = fleet, clock, step

    async def everywhere(self) -> Load:
        """Have every engine that lives load."""
        places = by_node(place for place in self._fleet.places.values() if not place.dead)
        return _longest(await together(self._load_node(there) for there in places.values()))

    async def _load_node(self, names: Sequence[str]) -> Load:
        """Give a node's engines the weights: all at once, or each as soon as it is empty."""
        if self._step.across_sync != "finish":
            return await self._load_these(names)
        one_at_a_time = asyncio.Lock()  # a node changes one thing at a time

        async def drained(name: str) -> Load:
            if not await self._empty(name):
                return Load()
            async with one_at_a_time:
                return await self._load_these([name])

        return _longest(await together(map(drained, names)))

    async def _empty(self, name: str) -> bool:
        """Let what runs in an engine end under the old weights; whether it did."""
        fleet, timeout_ns = self._fleet, round(self._step.stage_timeout_s * NS_PER_S)
        reason = f"requests still run after {self._step.stage_timeout_s:g} s, and weights wait"
        try:
            await fleet.admission(self._alive([name]), allowed=False, timeout_ns=timeout_ns)
            if await fleet.drained(self._alive([name]), timeout_ns):
                return True
        except (StepFailed, AgentLost) as error:
            reason = str(error)
        fleet.give_up([name], reason)
        return False

    async def _load_these(self, names: Sequence[str]) -> Load:
        """Give engines of one node the weights; those that fail are given up."""
        fleet, timeout_ns = self._fleet, round(self._step.stage_timeout_s * NS_PER_S)
        drop_kv = self._step.across_sync != "continue"
        begin_ns = self._clock.now_ns()
        try:
            answers = await load_weights(
                fleet, self._alive(names), drop_kv=drop_kv, timeout_ns=timeout_ns
            )
            if self._step.across_sync == "finish":
                await fleet.admission(self._alive(names), allowed=True, timeout_ns=timeout_ns)
        except (StepFailed, AgentLost) as error:
            fleet.give_up(names, f"it could not be given weights {fleet.version}: {error}")
            return Load()
        load_s = longest_s({node: answer.spans for node, answer in answers.items()})
        return Load(load_s, (self._clock.now_ns() - begin_ns) / NS_PER_S - load_s)

    def _alive(self, names: Sequence[str]) -> list[str]:
        places = self._fleet.places
        return [name for name in names if name in places and not places[name].dead]


def _longest(loads: Sequence[Load]) -> Load:
    return Load(
        max((load.load_s for load in loads), default=0.0),
        max((load.rpc_s for load in loads), default=0.0),
    )


def longest_s(spans: Mapping[str, Sequence[Span]]) -> float:
    """Return the time from the first begin to the last end on the node that took longest."""
    took_ns = (
        max(span.end_ns for span in there) - min(span.begin_ns for span in there)
        for there in spans.values()
        if there
    )
    return max(took_ns, default=0) / NS_PER_S
