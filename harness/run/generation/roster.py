"""What the parts of a fleet share."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.run.generation.changes import Changes
from harness.run.generation.ledger import Ledger
from harness.run.generation.nodes import Nodes
from harness.run.generation.places import Place
from harness.run.session import Session
from harness.scheduling.speed import Speeds


@dataclass
class Roster:
    """The session, the nodes to ask, all requests, all instances by name, and who waits."""

    session: Session
    nodes: Nodes
    speeds: Speeds
    changes: Changes
    ledger: Ledger = field(default_factory=Ledger)
    places: dict[str, Place] = field(default_factory=dict)
    preemptions: int = 0
    """Of all instances so far, also of those that are gone."""

    @property
    def living(self) -> list[Place]:
        """Instances that are not given up."""
        return [place for place in self.places.values() if not place.dead]

    def now_ns(self) -> int:
        """Return the coordinator's time."""
        return self.session.bench.clock.now_ns()

    def note(self, who: str, text: str) -> None:
        """Record a warning."""
        self.session.record.event("note", {"level": "warning", "who": who, "text": text})
