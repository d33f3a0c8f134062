"""Taking requests out of instances, with all of their output and nothing under way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from harness.errors import StepFailed
from harness.model.requests import Carried
from harness.run.generation.places import Place, by_node
from harness.run.generation.roster import Roster
from harness.run.generation.watching import Watching
from harness.wire.generation import KvTarget, Span, Verb, Withdraw, Withdrawn


@dataclass
class Left:
    """What a withdrawal took: now `held` in the ledger, with all of its output delivered.

    `carried` as the engines told it, by id; `sent_bytes` by id; spans by node, mapped onto the
    coordinator's clock. `ids` also has requests that an engine did not know.
    """

    ids: tuple[str, ...] = ()
    carried: dict[str, Carried] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[Span, ...]] = field(default_factory=dict)


@dataclass
class Withdrawing:
    """How requests are withdrawn: what is under way arrives first, what was told is delivered."""

    roster: Roster
    watching: Watching

    async def take(
        self,
        places: Sequence[Place],
        ids: tuple[str, ...],
        verb: Verb,
        to: KvTarget | None,
        *,
        timeout_ns: int,
    ) -> Left:
        """Withdraw `ids`, or all, from places; the dead have none. See `Fleet.withdraw`.

        Raises `StepFailed` where what was sent before is not answered, or output is not told.
        """
        if not await self.roster.changes.until(
            lambda: not any(_arriving(p, ids) for p in places if not p.dead), timeout_ns
        ):
            raise StepFailed(f"{_names(places)}: requests sent there were not answered in time")
        bodies = {
            node: Withdraw(instances=there, ids=ids, verb=verb, to=to)
            for node, there in by_node(p for p in places if not p.dead).items()
        }
        asked = {place.name: ids or self.roster.ledger.at(place.name) for place in places}
        for place in places:
            place.leaving.update(asked[place.name])
        try:
            answers = await self.roster.nodes.each(bodies, Withdrawn, timeout_ns)
            left = Left()
            for node, answer in answers.items():
                if not await self.watching.delivered(node, answer.upto, timeout_ns):
                    raise StepFailed(f"{node}: did not tell the output of what was withdrawn")
                carried = {found.id: found for found in answer.left}
                for place in places:
                    if place.node == node:
                        left.ids += self._hold(place, asked[place.name], carried)
                left.carried |= carried
                left.sent_bytes |= answer.sent_bytes
                left.spans[node] = tuple(self._mapped(node, span) for span in answer.spans)
            answers.complete()
            return left
        finally:
            for place in places:
                place.leaving.difference_update(asked[place.name])

    def _hold(
        self, place: Place, ids: Iterable[str], carried: dict[str, Carried]
    ) -> tuple[str, ...]:
        """Hold what left a place, or should have; return it without what ended meanwhile."""
        held = []
        for id_ in ids:
            entry = self.roster.ledger.entries.get(id_)
            if entry is None:
                continue  # it has ended meanwhile, and was used
            left_before = entry.state == "held" and entry.home == place.name
            if entry.at == place.name or left_before:
                self.roster.ledger.hold(id_, carried.get(id_))
                held.append(id_)
        return tuple(held)

    def _mapped(self, node: str, span: Span) -> Span:
        return msgspec.structs.replace(
            span,
            begin_ns=self.roster.session.at(node, span.begin_ns),
            end_ns=self.roster.session.at(node, span.end_ns),
        )


def _arriving(place: Place, ids: Collection[str]) -> bool:
    """Whether any of these, or of all, is on its way to a place: it could not be withdrawn yet."""
    return not place.arriving.isdisjoint(ids) if ids else bool(place.arriving)


def _names(places: Iterable[Place]) -> str:
    return ", ".join(place.name for place in places)
