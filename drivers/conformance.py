"""The definition of done for a driver: what every switch and every transport must pass.

A test of a new driver is a *maker*, which starts a unit (emulated or real) with a given trouble and
yields a `Specimen`, and one call: ``check_ocs(maker)``. A failed requirement is an AssertionError
that says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol, TypeVar

from drivers.apply import apply, read_ours
from drivers.base import EMPTY, Applied, Circuit, Delta, Matching, Ocs, Transport
from drivers.errors import (
    BadMatching,
    DeadlineExpired,
    Indeterminate,
    LinkLost,
    Refused,
)

LIMIT_NS = 20_000_000_000
"""For one step of a check."""
SILENCE_NS = 50_000_000
ALL_BYTES_SENT = 1 << 14
"""More than a pty or a pipe takes at once."""
FLOOD_BYTES = 1 << 24
"""More than any line takes from a peer that does not read."""

E = TypeVar("E", bound=Exception)


class Trouble(StrEnum):
    """What is wrong with a specimen."""

    NONE = "none"
    LOST_REPLY = "the first change is obeyed, but its answer never comes"
    REFUSAL = "one circuit is refused"


@dataclass(frozen=True)
class Specimen:
    """A unit under test; nothing is connected but `foreign`."""

    ocs: Ocs
    ours: frozenset[int]
    """Our ports: at least four ingress and four egress, none of them `foreign`'s."""
    foreign: Matching
    """Circuits that stand from the start and are not ours; a unit without any is tested less."""
    changed_ports: Callable[[], list[int]]
    """Every port named by a change command that has passed the line so far, in order."""
    refused: Circuit | None = None
    """With `Trouble.REFUSAL`, a circuit of our ports that the unit refuses to make."""

    def sides(self) -> tuple[list[int], list[int]]:
        """Return our ingress and egress ports, sorted."""
        who = self.ocs.identify()
        ours = sorted(self.ours)
        return [p for p in ours if p in who.ingress], [p for p in ours if p in who.egress]

    def strangers(self) -> tuple[list[int], list[int]]:
        """Return ingress and egress ports that are not ours, those in use first."""
        who, used = self.ocs.identify(), {port for circuit in self.foreign for port in circuit}
        sides = ([p for p in side if p not in self.ours] for side in (who.ingress, who.egress))
        ingress, egress = (sorted(ports, key=lambda p: p not in used) for ports in sides)
        return ingress, egress

    def pairs(self, shift: int = 0) -> list[Circuit]:
        """Return circuits over all our ports; another `shift`, other circuits."""
        ingress, egress = self.sides()
        n = min(len(ingress), len(egress))
        return [(ingress[i], egress[(i + shift) % n]) for i in range(n)]

    def put(self, wanted: Iterable[Circuit]) -> Matching:
        """Apply a map of our ports and return what was asked for."""
        matching = Matching.of(wanted)
        applied = _apply(self, matching)
        assert applied.after == matching, f"asked for {matching}, apply says {applied.after}"
        assert applied.sent_ns <= applied.acknowledged_ns <= applied.done_ns, f"stamps: {applied}"
        return matching


OcsMaker = Callable[[Trouble], AbstractContextManager[Specimen]]


def check_ocs(maker: OcsMaker, *, without: Container[Trouble] = ()) -> None:
    """Check a switch driver against the contract of `drivers.base.Ocs` and `drivers.apply`.

    `without` names what the maker cannot arrange: a real unit refuses nothing on request.
    """
    with maker(Trouble.NONE) as specimen:
        _identifies(specimen)
        _applies_and_reads_back(specimen)
        _applying_twice_sends_nothing(specimen)
        _what_stays_is_not_disturbed(specimen)
        _connects_and_disconnects(specimen)
        _impossible_maps_are_refused_unsent(specimen)
        _preview_sends_nothing(specimen)
        _closes_twice(specimen)
    for trouble, check in _UNDER_TROUBLE:
        if trouble not in without:
            with maker(trouble) as specimen:
                check(specimen)


def _identifies(specimen: Specimen) -> None:
    who = specimen.ocs.identify()
    assert who.vendor, "the unit has no vendor"
    assert who.model, "the unit has no model"
    assert specimen.ours <= set(who.ingress) | set(who.egress), f"our ports are not on {who}"
    assert specimen.ocs.identify() == who, "the unit changed its identity"
    found = specimen.ocs.read()
    assert found == specimen.foreign, f"at the start the map is {found}"


def _applies_and_reads_back(specimen: Specimen) -> None:
    for wanted in (specimen.pairs(), specimen.pairs(1), specimen.pairs()[:2], []):
        matching = specimen.put(wanted)
        found = specimen.ocs.read()
        whole = Matching.of([*matching, *specimen.foreign])
        assert found == whole, f"applied {matching} beside {specimen.foreign}, the unit has {found}"


def _applying_twice_sends_nothing(specimen: Specimen) -> None:
    wanted = specimen.put(specimen.pairs())
    sent = specimen.changed_ports()
    again = _apply(specimen, wanted)
    assert specimen.changed_ports() == sent, "applying the map that is there sent changes"
    assert not again.delta, f"applying the map that is there found a difference: {again.delta}"
    assert again.sent_ns == again.done_ns, "nothing was sent, yet the stamps differ"


def _what_stays_is_not_disturbed(specimen: Specimen) -> None:
    first, second, *rest = specimen.put(specimen.pairs())
    sent = len(specimen.changed_ports())
    crossed = [(first[0], second[1]), (second[0], first[1])]
    specimen.put([*crossed, *rest])
    touched = set(specimen.changed_ports()[sent:])
    assert touched, "a change passed the line unseen: changed_ports does not work"
    kept = {port for circuit in [*rest, *specimen.foreign] for port in circuit}
    assert not touched & kept, f"circuits that stay were disturbed: ports {sorted(touched & kept)}"


def _connects_and_disconnects(specimen: Specimen) -> None:
    specimen.put([])
    circuits = specimen.pairs()
    specimen.ocs.connect(circuits[:2])
    specimen.ocs.connect(circuits[2:3])
    found = read_ours(specimen.ocs, specimen.ours)
    assert found == Matching.of(circuits[:3]), f"connected {circuits[:3]}, the unit has {found}"
    specimen.ocs.disconnect(circuits[1:2])
    found = read_ours(specimen.ocs, specimen.ours)
    assert found == Matching.of([circuits[0], circuits[2]]), f"after disconnecting: {found}"


def _impossible_maps_are_refused_unsent(specimen: Specimen) -> None:
    who = specimen.ocs.identify()
    ingress, egress = specimen.sides()
    impossible: dict[str, list[Circuit]] = {
        "one egress for two ingresses": [(ingress[0], egress[0]), (ingress[1], egress[0])],
        "one ingress for two egresses": [(ingress[0], egress[0]), (ingress[0], egress[1])],
        "a port beyond the unit": [(ingress[0], max(who.ingress[-1], who.egress[-1]) + 1)],
        "port zero": [(0, egress[0])],
        "a circuit back to front": [(egress[0], ingress[0])],
    }
    strange_ingress, strange_egress = specimen.strangers()
    if strange_ingress:
        impossible["a foreign ingress"] = [(strange_ingress[0], egress[0])]
    if strange_egress:
        impossible["a foreign egress"] = [(ingress[0], strange_egress[0])]
    before, sent = specimen.ocs.read(), specimen.changed_ports()
    for what, circuits in impossible.items():
        wanted = Matching(frozenset(circuits))  # not by `of`, which would refuse some of them
        _raises(BadMatching, partial(_apply, specimen, wanted), what)
        assert specimen.changed_ports() == sent, f"{what}: something was sent"
    assert specimen.ocs.read() == before, "an impossible map changed the unit"


def _preview_sends_nothing(specimen: Specimen) -> None:
    sent = specimen.changed_ports()
    lines = specimen.ocs.preview(Delta.between(EMPTY, Matching.of(specimen.pairs())))
    assert lines, "preview of a change shows no command"
    assert specimen.changed_ports() == sent, "preview sent a change"
    assert specimen.ocs.preview(Delta((), (), ())) == [], "preview of nothing shows a command"


def _closes_twice(specimen: Specimen) -> None:
    specimen.ocs.close()
    specimen.ocs.close()
    _raises(LinkLost, specimen.ocs.read, "read after close")


def _a_lost_reply_is_unknown_until_read(specimen: Specimen) -> None:
    circuits = specimen.pairs()[:2]
    _raises(Indeterminate, lambda: specimen.ocs.connect(circuits), "a change without an answer")
    found = read_ours(specimen.ocs, specimen.ours)
    assert found == Matching.of(circuits), f"after the lost reply the unit has {found}"


def _apply_resolves_a_lost_reply(specimen: Specimen) -> None:
    specimen.put(specimen.pairs())
    found = read_ours(specimen.ocs, specimen.ours)
    assert found == Matching.of(specimen.pairs()), f"after the lost reply the unit has {found}"


def _a_refusal_leaves_the_old_map(specimen: Specimen) -> None:
    refused = specimen.refused
    assert refused is not None, "the maker names no circuit that the unit refuses"
    before = specimen.put(c for c in specimen.pairs(1) if not set(c) & set(refused))
    wanted = [c for c in specimen.pairs() if not set(c) & set(refused)] + [refused]
    error = _raises(Refused, lambda: specimen.put(wanted), f"{refused} refused")
    assert error.code, "a refusal without the unit's code"
    assert f"{refused[0]}->{refused[1]}" in str(error), f"{error} does not name {refused}"
    found = read_ours(specimen.ocs, specimen.ours)
    assert found == before, f"after the refusal the unit has {found}, before it had {before}"


_UNDER_TROUBLE: tuple[tuple[Trouble, Callable[[Specimen], None]], ...] = (
    (Trouble.LOST_REPLY, _a_lost_reply_is_unknown_until_read),
    (Trouble.LOST_REPLY, _apply_resolves_a_lost_reply),
    (Trouble.REFUSAL, _a_refusal_leaves_the_old_map),
)


def _apply(specimen: Specimen, wanted: Matching) -> Applied:
    limit_ns = time.monotonic_ns() + LIMIT_NS
    return apply(specimen.ocs, wanted, specimen.ours, deadline_ns=limit_ns)


def _raises(kind: type[E], act: Callable[[], object], what: str) -> E:
    """Return the error of `kind` that `act` must raise."""
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"{what}: {kind.__name__} was not raised")


# -- transports -----------------------------------------------------------------------------------


class Peer(Protocol):
    """The device's end of a line under test."""

    def send(self, data: bytes) -> None:
        """Send to the transport."""

    def receive(self, count: int) -> bytes:
        """Return exactly `count` bytes from the transport, within a limit of its own."""

    def hang_up(self) -> None:
        """Close the device's end."""


TransportMaker = Callable[[], AbstractContextManager[tuple[Transport, Peer]]]


def check_transport(maker: TransportMaker) -> None:
    """Check a transport against the contract of `drivers.base.Transport`."""
    with maker() as (transport, peer):
        _carries_bytes_whole(transport, peer)
        _silence_ends_at_the_deadline(transport, peer)
        transport.close()
        transport.close()
        _raises(LinkLost, lambda: transport.send(b"x", _soon()), "send after close")
        _raises(LinkLost, lambda: transport.receive(_soon()), "receive after close")
    with maker() as (transport, _):
        flood = bytes(FLOOD_BYTES)
        _raises(
            DeadlineExpired, lambda: transport.send(flood, _soon()), "a peer that reads nothing"
        )
    with maker() as (transport, peer):
        peer.send(b"last words")
        assert _receive(transport, 10) == b"last words"
        peer.hang_up()
        _raises(LinkLost, lambda: transport.receive(time.monotonic_ns() + LIMIT_NS), "peer gone")


def _carries_bytes_whole(transport: Transport, peer: Peer) -> None:
    assert transport.name, "a transport without a name"
    data = bytes(33 + i % 94 for i in range(ALL_BYTES_SENT))
    for start in range(0, len(data), 2048):
        piece = data[start : start + 2048]
        transport.send(piece, time.monotonic_ns() + LIMIT_NS)
        assert peer.receive(len(piece)) == piece, "what was sent arrived otherwise"
        peer.send(piece)
        assert _receive(transport, len(piece)) == piece, "what the peer sent arrived otherwise"


def _silence_ends_at_the_deadline(transport: Transport, peer: Peer) -> None:
    begun = time.monotonic_ns()
    _raises(DeadlineExpired, lambda: transport.receive(begun + SILENCE_NS), "a silent peer")
    assert time.monotonic_ns() >= begun + SILENCE_NS, "receive gave up before its deadline"
    peer.send(b"late")
    assert _receive(transport, 4) == b"late", "an expired deadline broke the line"


def _receive(transport: Transport, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = transport.receive(time.monotonic_ns() + LIMIT_NS)
        assert chunk, "receive returned nothing"
        data += chunk
    return data


def _soon() -> int:
    return time.monotonic_ns() + SILENCE_NS
