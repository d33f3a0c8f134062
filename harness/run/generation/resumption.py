"""When do requests that left one engine go on in another? Looked up in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from harness.run.generation.ledger import Entry, Ledger
from harness.run.generation.places import Place


class _Stop(NamedTuple):
    """Where a request stopped: the turn it was in, and when."""

    turn: int
    since_ns: int


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
        self._stopped = {id_: _Stop(ledger.entries[id_].turn, since_ns) for id_ in ran}
        """Those that do not go on yet."""
        self.any_ran = bool(self._stopped)
        self.resumed_ns: dict[str, int] = {}

    def add(self, other: Resumption) -> None:
        """Wait for those of another one too."""
        self.ids += other.ids
        self._stopped |= other._stopped
        self._since_ns = max(self._since_ns, other._since_ns)
        self.any_ran |= other.any_ran
        self.resumed_ns |= other.resumed_ns

    def sent(self) -> bool:
        """Whether all have been sent to an instance, or every instance is full."""
        full = self._full()
        there = self._there(self.ids)
        queued = any(entry.state == "queued" and entry.assigned not in full for entry in there)
        return not queued or self._none_has_room(full)

    def begun(self) -> bool:
        """Whether the first goes on, or none of them has to."""
        self._look()
        return bool(self.resumed_ns) or self._all_wait()

    def steady(self) -> bool:
        """Whether all go on, or wait for a seat where all are taken."""
        self._look()
        return self._all_wait()

    def complete(self) -> bool:
        """Whether all go on: have a token, or have ended."""
        self._look()
        return not self._stopped

    def _look(self) -> None:
        """Take those that go on, or have ended, from those that stopped."""
        for id_, stop in list(self._stopped.items()):
            entry = self._ledger.entries.get(id_)
            if entry is None:  # it has ended and was used, or nobody wants it any longer
                del self._stopped[id_]
                continue
            ended = entry.state in {"finished", "refused"} or entry.turn > stop.turn
            first_ns = entry.last_token_ns if ended else entry.resumed_ns
            if first_ns > stop.since_ns:
                self.resumed_ns[id_] = first_ns
            elif not ended:
                continue
            del self._stopped[id_]

    def _all_wait(self) -> bool:
        """Whether there is no seat for any that stopped: where it is, or anywhere."""
        if not self._stopped:
            return True
        full = self._full()
        return all(
            self._none_has_room(full) if entry.state == "queued" else entry.at in full
            for entry in self._there(self._stopped)
        )

    def _there(self, ids: Iterable[str]) -> Iterator[Entry]:
        """Yield the entries of those that the ledger still has."""
        return (entry for id_ in ids if (entry := self._ledger.entries.get(id_)))

    def _none_has_room(self, full: set[str]) -> bool:
        accepting = {name for name, place in self._places.items() if place.accepting}
        return bool(accepting) and accepting <= full

    def _full(self) -> set[str]:
        """Return instances at work that let requests wait, though they have none to prefill."""
        return {
            name
            for name, place in self._places.items()
            if (told := place.stats)
            and told.last_token_ns > self._since_ns
            and told.waiting
            and not told.prefilling
        }
