"""What every switch driver speaks: circuits, matchings, and the small protocols a unit may satisfy.

A *circuit* is one cross-connect, ``(ingress, egress)``, in the unit's own port numbers. A
*matching* is a set of circuits in which no port occurs twice: the whole state of a switch. Drivers
are plain synchronous code; whoever needs concurrency gives each device one worker thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from drivers.errors import BadMatching

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

Circuit = tuple[int, int]
"""(ingress, egress), in the unit's own port numbers."""


@dataclass(frozen=True)
class Matching:
    """A set of circuits in which every port occurs at most once."""

    circuits: frozenset[Circuit]

    @classmethod
    def of(cls, circuits: Iterable[Circuit]) -> Matching:
        """Build a matching; raise `BadMatching` naming every port that occurs twice."""
        pairs = frozenset(circuits)
        for side, ports in (("ingress", [a for a, _ in pairs]), ("egress", [b for _, b in pairs])):
            if doubled := sorted(port for port, n in Counter(ports).items() if n > 1):
                raise BadMatching(f"{side} ports used twice: {', '.join(map(str, doubled))}")
        return cls(pairs)

    def __iter__(self) -> Iterator[Circuit]:
        return iter(sorted(self.circuits))

    def __len__(self) -> int:
        return len(self.circuits)

    def __contains__(self, circuit: object) -> bool:
        return circuit in self.circuits

    def __repr__(self) -> str:
        return "Matching(" + ", ".join(f"{a}->{b}" for a, b in self) + ")"


EMPTY = Matching(frozenset())


@dataclass(frozen=True)
class Delta:
    """What turns one matching into another; `keep` is what stays lit throughout."""

    drop: tuple[Circuit, ...]
    make: tuple[Circuit, ...]
    keep: tuple[Circuit, ...]

    @classmethod
    def between(cls, before: Matching, after: Matching) -> Delta:
        """Compute the least change; each part sorted, so that equal deltas print equal."""
        return cls(
            drop=tuple(sorted(before.circuits - after.circuits)),
            make=tuple(sorted(after.circuits - before.circuits)),
            keep=tuple(sorted(before.circuits & after.circuits)),
        )

    def __bool__(self) -> bool:
        return bool(self.drop or self.make)


@dataclass(frozen=True)
class Identity:
    """Who answers: vendor, model, serial number, firmware, and its port numbers."""

    vendor: str
    model: str
    serial: str
    firmware: str
    ingress: range
    egress: range


@dataclass(frozen=True)
class Capabilities:
    """What a unit can do, as its family and model tell."""

    has_power: bool
    has_shutters: bool
    hitless_add: bool
    """Making one circuit leaves the others lit."""
    steals_busy_ports: bool
    """Connecting a busy port moves it silently; otherwise the unit refuses."""
    batch_max: int
    """Circuits in one command."""
    typical_switch_ns: int


@dataclass(frozen=True)
class Applied:
    """What one `apply` did, with its stamps on the caller's monotonic clock (ns).

    Where nothing had to change, `delta` is false and the three stamps are equal: nothing was sent.
    """

    before: Matching
    after: Matching
    delta: Delta
    sent_ns: int
    """Last change command handed to the line."""
    acknowledged_ns: int
    """First sign that the device took it: completion line, or the answer after a silent set."""
    done_ns: int
    """The map read back equals the map asked for."""


class PortState(StrEnum):
    """A port as the device reports it."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    FAILED = "failed"


class Transport(Protocol):
    """A byte line to a device. Deadlines are absolute, on ``time.monotonic_ns``."""

    name: str
    """The device URL without secrets, for messages."""

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Send all of `data`; raise `DeadlineExpired` or `LinkLost`."""

    def receive(self, deadline_ns: int) -> bytes:
        """Return one byte or more as soon as there are any; raise `DeadlineExpired`, `LinkLost`."""

    def close(self) -> None:
        """Release the line; safe to call twice."""


class Ocs(Protocol):
    """The verbs that every optical circuit switch has. None of them retries by itself."""

    name: str
    capabilities: Capabilities

    @property
    def waited_ns(self) -> int:
        """Time spent so far blocked on the unit's line: the device's share of what a caller saw."""

    def identify(self) -> Identity:
        """Ask the unit who it is; cached after the first answer."""

    def read(self) -> Matching:
        """Read the whole map."""

    def connect(self, circuits: Sequence[Circuit]) -> None:
        """Make circuits; raise `Refused`, or `Indeterminate` when the outcome is not known."""

    def disconnect(self, circuits: Sequence[Circuit]) -> None:
        """Drop circuits; errors as for `connect`."""

    @staticmethod
    def preview(delta: Delta) -> list[str]:
        """Return the exact command lines that `apply` would send for `delta`; needs no unit."""

    def close(self) -> None:
        """End the session; safe to call twice."""


@dataclass(frozen=True)
class Receipt:
    """What a unit that took a whole change has shown for it; stamps as in `Applied`.

    `after` is the whole map, read back in the same exchange; None where the unit cannot do that.
    """

    sent_ns: int
    acknowledged_ns: int
    after: Matching | None = None


@runtime_checkable
class Rewires(Protocol):
    """A unit that takes deletes and makes in one exchange: the least time in the dark."""

    def rewire(self, drop: Sequence[Circuit], make: Sequence[Circuit]) -> Receipt:
        """Drop circuits, then make circuits; errors as for `Ocs.connect`."""


@runtime_checkable
class PowerMonitor(Protocol):
    """A unit that measures optical power."""

    def power_dbm(self, ports: Sequence[int]) -> Mapping[int, float]:
        """Return dBm per port; a dark port reads the unit's floor (about -60)."""


@runtime_checkable
class Shutters(Protocol):
    """A unit whose ports can be closed and report their health."""

    def port_states(self, ports: Sequence[int]) -> Mapping[int, PortState]:
        """Return the state of each port."""

    def set_shutter(self, ports: Sequence[int], *, closed: bool) -> None:
        """Close or open ports."""
