"""What a steerable top-of-rack switch (ToR) can be asked: its routes, read and applied whole.

Below every steering route lies the electrical route to the same prefix with a worse metric. Taking
a steering route away therefore *is* steering to the electrical path: traffic is never stranded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, order=True)
class Route:
    """Traffic for `prefix` leaves by `device`, an uplink, towards `via`, the far end's address."""

    prefix: str
    via: str
    device: str


class Tor(Protocol):
    """The verbs of a steerable ToR. Only routes with our own protocol number are touched."""

    name: str

    def read(self) -> frozenset[Route]:
        """Return the steering routes in force."""

    def apply(self, wanted: frozenset[Route]) -> None:
        """Make `wanted` the whole set: only the difference is sent, then read back and compared.

        Raises `drivers.errors.Refused` or `drivers.errors.Unreachable`.
        """

    def close(self) -> None:
        """Release the connection; the routes stay."""
