"""Uplinks, trunks, the links that circuits make of them, and plans of such. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from drivers.base import Circuit


@dataclass(frozen=True, order=True)
class Uplink:
    """One ToR port and the fibre pair of the switch that it lands on."""

    tor: str
    device: str
    switch: str
    ingress: int
    """Port that the uplink's transmit fibre enters."""
    egress: int
    """Port that the uplink's receive fibre leaves."""
    address: str

    def __str__(self) -> str:
        return f"{self.tor}:{self.device}"


@dataclass(frozen=True, order=True)
class Trunk:
    """A fibre pair between an aggregation switch and a core switch."""

    aggregation: str
    from_core: int
    """Port of the aggregation switch that the core's light enters."""
    to_core: int
    """Port of the aggregation switch that light for the core leaves."""
    core: str
    ingress: int
    """Port of the core that the aggregation switch's light enters."""
    egress: int
    """Port of the core that light for the aggregation switch leaves."""

    def __str__(self) -> str:
        return f"{self.aggregation}:{self.from_core}"


@dataclass(frozen=True, order=True)
class Link:
    """Two uplinks joined by circuits: on one switch, or through `trunks` in the order of a's light.

    With `both` false only a's light reaches b.
    """

    a: Uplink
    b: Uplink
    trunks: tuple[Trunk, ...] = ()
    both: bool = True

    @cached_property
    def circuits(self) -> tuple[tuple[str, Circuit], ...]:
        """The cross-connects by switch: those of a's light to b, then those of b's light to a."""
        there = tuple(_way(self.a, self.b, self.trunks))
        back = tuple(_way(self.b, self.a, self.trunks[::-1])) if self.both else ()
        return there + back

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """The switches that carry it, in the order of a's light."""
        return tuple(dict.fromkeys(switch for switch, _ in self.circuits))

    @property
    def ways(self) -> tuple[tuple[Uplink, Uplink], ...]:
        """Who sends to whom over it."""
        there = (self.a, self.b)
        return (there, there[::-1]) if self.both else (there,)

    def circuits_on(self, switch: str) -> tuple[Circuit, ...]:
        """Return its cross-connects on one switch."""
        return tuple(circuit for name, circuit in self.circuits if name == switch)

    def __str__(self) -> str:
        arrow = "-" if self.both else ">"
        return f"{self.a.tor}{arrow}{self.b.tor}@{'+'.join(self.switches)}"


Edge = tuple[str, str]
"""Two ToR names."""


@dataclass(frozen=True)
class Plan:
    """Links to bring up, and the pairs of ToRs that were asked for and that no switch can join."""

    links: frozenset[Link]
    unserved: tuple[Edge, ...] = ()


DARK = Plan(frozenset())


def _way(a: Uplink, b: Uplink, trunks: tuple[Trunk, ...]) -> Iterator[tuple[str, Circuit]]:
    """Yield the cross-connects that a's light passes on its way to b."""
    switch, entered = a.switch, a.ingress
    for trunk in trunks:
        if switch == trunk.aggregation:
            yield switch, (entered, trunk.to_core)
            switch, entered = trunk.core, trunk.ingress
        else:
            yield switch, (entered, trunk.egress)
            switch, entered = trunk.aggregation, trunk.from_core
    yield switch, (entered, b.egress)
