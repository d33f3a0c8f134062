"""Instances that are given up: their requests go elsewhere, and they are started anew, or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from harness.errors import AgentLost, StepFailed
from harness.run.generation.changes import Background, Changing
from harness.run.generation.places import Place
from harness.run.generation.roster import Roster
from harness.scheduling.watchdog import may_restart
from harness.wire.asks import CommandFailed


class Keeper:
    """Gives instances up. `take_all` queues what one has, `tear_down` kills it.

    A restart waits for `changing`: whoever changes the layout deals with the dead himself, and one
    that he has replaced is not started again.
    """

    def __init__(
        self,
        roster: Roster,
        changing: Changing,
        *,
        take_all: Callable[[Place], Iterable[str]],
        tear_down: Callable[[Place], Awaitable[object]],
        build: Callable[[Place], Awaitable[object]],
    ) -> None:
        self._roster, self._places, self._nodes = roster, roster.places, roster.nodes
        self._changes, self._changing = roster.changes, changing
        self._take_all, self._tear_down, self._build = take_all, tear_down, build
        self._background = Background(roster.changes)
        roster.nodes.on_lost, changing.then = self.node_lost, self.check_alive
        self._restarts: Counter[str] = Counter()
        self._starting = 0
        self._out: dict[str, str] = {}

    def give_up(self, place: Place, reason: str) -> None:
        """Send what an instance has elsewhere and start it anew, unless it was given up before."""
        if place.dead or self._places.get(place.name) is not place:
            return
        place.dead = reason
        self._out[place.name] = reason
        taken = list(self._take_all(place))
        row = {"instance": place.name, "reason": reason, "requests": len(taken)}
        self._roster.session.record.event("given_up", row)
        if place.node not in self._nodes.lost:
            self._starting += 1
            self._background.start(self._end(place))
        self.check_alive()
        self._changes.happened()

    def node_lost(self, node: str, reason: str) -> None:
        """Give up all instances of a node."""
        for place in [place for place in self._places.values() if place.node == node]:
            self.give_up(place, reason)
        self.check_alive()
        self._changes.happened()

    @property
    def starting(self) -> int:
        """Instances that are to come back."""
        return self._starting

    def check_alive(self) -> None:
        """Fail whoever waits, if no instance lives and nobody is about to change that."""
        if self._starting or self._changing.locked():
            return
        if self._out and not self._roster.living:
            told = "; ".join(f"{name}: {reason}" for name, reason in sorted(self._out.items()))
            self._changes.fail(StepFailed(f"no instance is left to generate: {told}"))

    def stays_out(self, name: str, reason: str) -> None:
        """Note why nothing of this name can be built."""
        self._out[name] = reason

    def built(self, *names: str) -> None:
        """Note that an instance, and its node, are up."""
        for name in names:
            self._out.pop(name, None)

    async def close(self) -> None:
        """Stop restarts that are under way."""
        await self._background.close()

    async def _end(self, place: Place) -> None:
        """Tear a place down, and build it anew if that was not done too often."""
        try:
            async with self._changing:
                if self._places.get(place.name) is place and place.node not in self._nodes.lost:
                    wanted = place.wanted
                    await self._tear_down(place)
                    await self._start_again(place, wanted=wanted)
        except (CommandFailed, AgentLost) as error:
            self.stays_out(place.name, f"{place.dead}; not started again: {error}")
            self._roster.note("generation", f"{place.name} stays out: {error}")
        finally:
            self._starting -= 1
        self.check_alive()
        self._changes.happened()

    async def _start_again(self, place: Place, *, wanted: bool) -> None:
        restarts = self._restarts[place.name]
        if may_restart(restarts):
            self._restarts[place.name] += 1
            await self._build(place)
            self._places[place.name].wanted = wanted
        else:
            text = f"{place.name} stays out: it was started again {restarts} times"
            self._roster.note("generation", text)
