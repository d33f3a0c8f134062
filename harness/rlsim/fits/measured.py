"""A run that was measured: what was asked of which bench, and the events that came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.fabric.circuits import plan_shape
from harness.fabric.links import Link
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.model.degrees import Degrees
from harness.model.documents import Event
from harness.model.profile import Profile
from harness.model.scenario import Rl, Scenario

Hops = tuple[tuple[str, str], ...]
"""Who sends a whole file to whom."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run, its files read."""

    name: str
    """Its id."""
    bench: Bench
    topology: Topology
    scenario: Scenario
    events: tuple[Event, ...]
    ranks_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of each node that trains."""
    degrees: Degrees | None = None
    """Of training."""
    hops: Mapping[str, Hops] = field(default_factory=dict)
    """By the kind of a sync, how weights get from all that train to all that generate."""
    profile: Profile | None = None
    """What paces generation, where it could be read."""
    layers: int | None = None
    """Of the model that trains, where its profile could be read."""
    one_machine: bool = False
    """Whether all hosts share one, as those of an emulated bench do."""

    @cached_property
    def _rows(self) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
        found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        for event in self.events:
            found.setdefault(event.stream, []).append((event.t_ns, event.data))
        return found

    def rows(self, stream: str) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of a stream, in order."""
        return (row for _, row in self._rows.get(stream, ()))

    def stamped(self, stream: str) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the same with their stamps in ns."""
        return self._rows.get(stream, [])

    @cached_property
    def links_of(self) -> Mapping[str, frozenset[Link]]:
        """What is lit under a label of results: ``electrical``, or the name of a whole shape."""
        shapes = self.scenario.shapes.items()
        whole = {name: plan_shape(self.topology, name, shape).links for name, shape in shapes}
        return {**whole, "electrical": frozenset()}

    @cached_property
    def nodes_with_ranks(self) -> tuple[str, ...]:
        """The node of each rank of collectives: one per GPU, one on a node without."""
        return tuple(
            node
            for node, place in self.topology.nodes.items()
            for _ in range(max(1, place.seats if place.gpus is None else place.gpus))
        )

    @cached_property
    def nodes_that_train(self) -> tuple[str, ...]:
        """The node of each rank that trains."""
        return tuple(node for node, ranks in self.ranks_of.items() for _ in ranks)

    @property
    def has_rails(self) -> bool:
        """Whether a node has several NICs."""
        return any(place.rails for place in self.topology.nodes.values())

    @cached_property
    def loop(self) -> Rl | None:
        """The first RL loop of the scenario."""
        return next((step for step in self.scenario.steps if isinstance(step, Rl)), None)
