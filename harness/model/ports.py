"""Ports, cables and circuits as a person writes them, and as values.

Pure. Every function raises `ValueError` with one line that says what is wrong and what would be
right; `harness.model.load` adds the file and the key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PORT_MAX = 65_535
"""Above any unit on the market; keeps a mistyped range from filling memory."""

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_NEAR = re.compile(r"([^:@/\s]+):u(\d{1,9})", re.ASCII)
_FAR = re.compile(r"([^:@/\s]+):(\d{1,9})(?:/(\d{1,9}))?", re.ASCII)
_FAR_AS_TEXT = 'a switch and its ingress port, such as "agg0:1", or both ports, such as "agg0:1/17"'
_CIRCUIT = re.compile(
    r"([^-@:/\s]+)(?::(u\d{1,9}))?-([^-@:/\s]+)(?::(u\d{1,9}))?@([^@:/\s]+)", re.ASCII
)


@dataclass(frozen=True)
class Cable:
    """One ToR uplink on one fibre pair of a switch.

    `egress` is None where the file leaves it to the unit: the port of the same ordinal.
    """

    tor: str
    uplink: str
    switch: str
    ingress: int
    egress: int | None


def parse_ports(text: str) -> frozenset[int]:
    """Parse ``"1-8,17-24"`` into port numbers. Raises `ValueError` on anything else."""
    ports: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f'{part.strip()!r} is not a port or a range such as "1-8,17-24"')
        first = int(found[1])
        last = int(found[2] or found[1])
        if not 1 <= first <= last <= PORT_MAX:
            raise ValueError(
                f"{part.strip()!r}: ports count from 1 to {PORT_MAX} and ranges go upwards"
            )
        both = ports.intersection(range(first, last + 1))
        if both:
            raise ValueError(f"port {min(both)} is listed twice")
        ports.update(range(first, last + 1))
    return frozenset(ports)


def parse_cable(near: str, far: str) -> Cable:
    """Parse one row of `cables`: ``"tor0:u1"`` and ``"agg0:1"`` or ``"agg0:1/20"``."""
    ours = _NEAR.fullmatch(near)
    if not ours or not int(ours[2]):
        raise ValueError(
            'the left side is a ToR and its uplink, such as "tor0:u1", or a switch and its port, '
            'such as "agg0:5"'
        )
    theirs = _fibres(far)
    if theirs is None:
        raise ValueError(f"the right side is {_FAR_AS_TEXT}")
    return Cable(
        tor=ours[1],
        uplink=f"u{int(ours[2])}",
        switch=theirs.switch,
        ingress=theirs.ingress,
        egress=theirs.egress,
    )


@dataclass(frozen=True)
class Fibres:
    """A fibre pair of a switch: the port that light enters, and the one that it leaves.

    `egress` is None where the file leaves it to the unit: the port of the same ordinal.
    """

    switch: str
    ingress: int
    egress: int | None


def is_trunk(near: str) -> bool:
    """Return whether the left side of a row of `cables` is a switch: two switches are joined."""
    return _FAR.fullmatch(near) is not None


def parse_trunk(near: str, far: str) -> tuple[Fibres, Fibres]:
    """Parse a row of `cables` that joins two switches: ``"agg0:5"`` and ``"core0:1"``."""
    ours, theirs = _fibres(near), _fibres(far)
    if ours is None or theirs is None:
        raise ValueError(f"both sides of a trunk are {_FAR_AS_TEXT}")
    if ours.switch == theirs.switch:
        raise ValueError(f"a trunk joins two switches, not {ours.switch} to itself")
    return ours, theirs


def _fibres(text: str) -> Fibres | None:
    found = _FAR.fullmatch(text)
    if not found or not int(found[2]) or (found[3] and not int(found[3])):
        return None
    return Fibres(found[1], int(found[2]), int(found[3]) if found[3] else None)


@dataclass(frozen=True)
class ListedCircuit:
    """Two ToRs to be joined on one switch; an uplink that is None is any that is free."""

    tors: tuple[str, str]
    uplinks: tuple[str | None, str | None]
    switch: str


def parse_circuit(text: str) -> ListedCircuit:
    """Parse ``"tor0-tor1@agg0"``, or ``"tor0:u1-tor1:u2@agg0"`` which names the uplinks too."""
    found = _CIRCUIT.fullmatch(text)
    if not found:
        raise ValueError(
            'a circuit is two ToRs and a switch, such as "tor0-tor1@agg0" or "tor0:u1-tor1:u2@agg0"'
        )
    if found[1] == found[3]:
        raise ValueError(f"{found[1]} cannot be joined to itself")
    return ListedCircuit((found[1], found[3]), (found[2], found[4]), found[5])


def format_ports(ports: frozenset[int]) -> str:
    """Write port numbers as `parse_ports` reads them: ``"1-8,17-24"``."""
    runs: list[list[int]] = []
    for port in sorted(ports):
        if runs and runs[-1][1] == port - 1:
            runs[-1][1] = port
        else:
            runs.append([port, port])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
