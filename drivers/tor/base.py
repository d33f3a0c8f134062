"""What a steerable top-of-rack switch (ToR) can be asked: its routes, read and applied whole.

Below every steering route lies the electrical route to the same prefix with a worse metric. Taking
a steering route away therefore *is* steering to the electrical path: traffic is never stranded.
A prefix is a ToR's hosts (/24) or one host (/32): the longest prefix wins, so a /32 pins a host to
one of several parallel circuits.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from drivers.errors import Misuse

DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")
"""What the kernel takes for a name (15 bytes), less what a shell could trip over."""


@dataclass(frozen=True, order=True)
class Hop:
    """One way out: an uplink `device`, and `via`, the IPv4 address at its far end."""

    via: str
    device: str

    def __str__(self) -> str:
        return f"via {self.via} dev {self.device}"


@dataclass(frozen=True, order=True)
class Route:
    """Traffic for `prefix` leaves by `hops`: one, or several that share it flow by flow (ECMP).

    Hops are kept sorted, so that equal routes are equal; raises `Misuse` without one, or when one
    occurs twice.
    """

    prefix: str
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        hops = tuple(sorted(self.hops))
        if not hops:
            raise Misuse(f"route to {self.prefix}: it needs a hop or more")
        if len(set(hops)) != len(hops):
            raise Misuse(f"route to {self.prefix}: a hop occurs twice")
        object.__setattr__(self, "hops", hops)

    @classmethod
    def one(cls, prefix: str, via: str, device: str) -> Route:
        """Return the route over a single hop."""
        return cls(prefix, (Hop(via, device),))

    def __str__(self) -> str:
        return f"{self.prefix} {', '.join(map(str, self.hops))}"


@dataclass(frozen=True)
class Delta:
    """What turns one set of routes into another, each part sorted."""

    make: tuple[Route, ...]
    """Routes to prefixes that have none yet."""
    move: tuple[tuple[Route, Route], ...]
    """(before, after) where the hops of a prefix change."""
    drop: tuple[Route, ...]

    @classmethod
    def between(cls, before: frozenset[Route], after: frozenset[Route]) -> Delta:
        """Compute the least change."""
        held = {route.prefix: route for route in before}
        kept = {route.prefix for route in after}
        new = sorted(after - before)
        return cls(
            make=tuple(route for route in new if route.prefix not in held),
            move=tuple((held[route.prefix], route) for route in new if route.prefix in held),
            drop=tuple(sorted(route for route in before if route.prefix not in kept)),
        )

    def __bool__(self) -> bool:
        return bool(self.make or self.move or self.drop)


class Tor(Protocol):
    """The verbs of a steerable ToR. Only routes that bear our own mark are touched."""

    name: str

    @property
    def remote(self) -> bool:
        """Whether a call crosses a network, and so takes milliseconds: give such a ToR a thread."""

    def read(self) -> frozenset[Route]:
        """Return the steering routes in force."""

    def apply(self, wanted: frozenset[Route]) -> None:
        """Make `wanted` the whole set: only the difference is sent, then read back and compared.

        To undo, apply what `read` returned before. Raises `drivers.errors.Misuse` before anything
        is sent; `Refused` once the previous routes are back; `Indeterminate` when they are not, or
        cannot be read; `Unreachable`, `LinkLost` and the like when nothing was sent.
        """

    def close(self) -> None:
        """Release the connection; the routes stay. Safe to call twice."""


def check(name: str, wanted: frozenset[Route]) -> None:
    """Raise `Misuse`, naming ToR `name` and the route, unless `wanted` can be a set of routes."""
    for route in wanted:
        if fault := _fault(route):
            raise Misuse(f"ToR {name}: route to {route}: {fault}")
    if len({route.prefix for route in wanted}) != len(wanted):
        raise Misuse(f"ToR {name}: two steering routes for one prefix")


@lru_cache(maxsize=4096)
def _fault(route: Route) -> str:
    """Return what is wrong with a route. Remembered: the same routes come and go all the time."""
    try:
        network = ipaddress.IPv4Network(route.prefix)
        for hop in route.hops:
            ipaddress.IPv4Address(hop.via)
    except ValueError as error:
        return str(error)
    if str(network) != route.prefix:
        return f"write {network}"
    strange = [hop.device for hop in route.hops if not DEVICE.fullmatch(hop.device)]
    return f"{strange[0]!r} is no name of an interface" if strange else ""


def differences(found: frozenset[Route], wanted: frozenset[Route]) -> str:
    """Return in words what `found` lacks and has too much."""
    parts = [f"{route} missing" for route in sorted(wanted - found)]
    parts += [f"{route} unexpected" for route in sorted(found - wanted)]
    return "; ".join(parts)
