"""What a switch of layouts changes, node by node, and in which order. Pure.

An instance that both layouts have is left alone. All nodes change in one wave, or each in its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.model.placement import Instance

Placed = Mapping[str, tuple[Instance, ...]]
"""Each node's instances."""


@dataclass(frozen=True)
class Wave:
    """Nodes that change together: what goes from each, and what comes."""

    gone: dict[str, tuple[Instance, ...]] = field(default_factory=dict)
    fresh: dict[str, tuple[Instance, ...]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """All that change."""
        return tuple(dict.fromkeys((*self.gone, *self.fresh)))

    @property
    def gone_names(self) -> tuple[str, ...]:
        """Instances that go."""
        return names(self.gone)

    @property
    def fresh_names(self) -> tuple[str, ...]:
        """Instances that come."""
        return names(self.fresh)


def names(placed: Placed) -> tuple[str, ...]:
    """Return the names of all instances."""
    return tuple(instance.name for instances in placed.values() for instance in instances)


def waves(
    before: Placed,
    after: Placed,
    order: Literal["at_once", "rolling"],
    dead: Iterable[str] = (),
) -> tuple[Wave, ...]:
    """Return the waves that lead from one to the other; none where nothing changes.

    Instances named in `dead` are built anew even where both have them.
    """
    dead = frozenset(dead)
    steps = []
    for node in dict.fromkeys((*before, *after)):
        old, new = before.get(node, ()), after.get(node, ())
        kept = {instance for instance in old if instance in new and instance.name not in dead}
        gone = tuple(instance for instance in old if instance not in kept)
        fresh = tuple(instance for instance in new if instance not in kept)
        if gone or fresh:
            steps.append(Wave({node: gone} if gone else {}, {node: fresh} if fresh else {}))
    if order == "rolling" or not steps:
        return tuple(steps)
    gone_all = {node: gone for step in steps for node, gone in step.gone.items()}
    fresh_all = {node: fresh for step in steps for node, fresh in step.fresh.items()}
    return (Wave(gone_all, fresh_all),)
