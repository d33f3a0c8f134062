"""When do requests that left one engine go on in another? Looked up in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.run.generation.ledger import Entry, Ledger
from harness.run.generation.places import Place


class Resumption:
    """Requests on their way: `ids` left at `since_ns`; of them, `ran` did not wait for a seat.

    Each that ran goes on with its next token, which is stamped in `resumed_ns`.
    """

    def __init__(
        self,
        ledger: Ledger,
        places: Mapping[str, Place],
        *,
        ids: Iterable[str] = (),
        ran: Iterable[str] = (),
        since_ns: int = 0,
    ) -> None:
        self._ledger, self._places, self._since_ns = ledger, places, since_ns
        self.ids = tuple(ids)
        self._turns = {id_: ledger.entries[id_].turn for id_ in ran}
        self.resumed_ns: dict[str, int] = {}

    @property
    def any_ran(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._turns)

    def sent(self) -> bool:
        """Whether all have been sent to an instance, or every instance is full."""
        queued = any(self._ledger.entries[id_].state == "queued" for id_ in self.ids)
        return not queued or self._all_full()

    def begun(self) -> bool:
        """Whether the first goes on, or none of them has to."""
        self._look()
        return bool(self.resumed_ns) or self.steady()

    def steady(self) -> bool:
        """Whether all go on, or wait for a seat where all are taken."""
        self._look()
        entries = (self._ledger.entries[id_] for id_ in self._turns)
        return all(self._goes_on(entry) or self._waits(entry) for entry in entries)

    def complete(self) -> bool:
        """Whether all go on: have a token, or have ended."""
        self._look()
        return all(self._goes_on(self._ledger.entries[id_]) for id_ in self._turns)

    def _look(self) -> None:
        for id_, turn in self._turns.items():
            entry = self._ledger.entries[id_]
            ended = entry.state == "finished" or entry.turn > turn
            first_ns = entry.last_token_ns if ended else entry.resumed_ns
            if first_ns > self._since_ns:
                self.resumed_ns.setdefault(id_, first_ns)

    def _goes_on(self, entry: Entry) -> bool:
        return entry.id in self.resumed_ns or entry.state in {"finished", "refused"}

    def _waits(self, entry: Entry) -> bool:
        """Whether there is no seat for it: where it is, or anywhere."""
        if entry.state == "queued":
            return self._all_full()
        return entry.at in self._places and self._full(self._places[entry.at])

    def _all_full(self) -> bool:
        accepting = [place for place in self._places.values() if place.accepting]
        return bool(accepting) and all(map(self._full, accepting))

    def _full(self, place: Place) -> bool:
        """Whether an instance that is at work lets requests wait, though it has none to prefill."""
        told = place.stats
        if told is None or told.last_token_ns <= self._since_ns:
            return False
        return told.waiting > 0 and not told.prefilling
