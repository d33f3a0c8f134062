"""Who is heard through which uplink: path verification, dark time and loss, all from beacons.

Agents on ToRs send a numbered beacon out of every uplink and tell what they hear. A far end that is
heard proves the whole path, cabling included; the longest silence of a moved uplink is its dark
time; a number missing on a circuit that stayed is a lost packet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.links import Link, Uplink
from harness.run.session import MESSAGE_NS, Session
from harness.wire.messages import Beacons, Done, Heard, StartBeacons, StopBeacons

BEACON_NS = NS_PER_MS
"""Shortest interval of beacons on a device."""
DEVICES_AT_FULL_RATE = 4
"""Uplinks of one ToR that may have it."""
HEAR_NS = 2 * NS_PER_S
"""How long a lit circuit may take until its far end is heard (NIC hold included)."""


def uplinks_of(links: frozenset[Link]) -> set[Uplink]:
    """Return both ends of every link."""
    return {end for link in links for end in (link.a, link.b)}


@dataclass(frozen=True)
class Watch:
    """ToRs that send and hear beacons, and how often: the resolution of the dark time."""

    tors: tuple[str, ...]
    interval_ns: int


async def beacons_on(session: Session, ends: Iterable[Uplink], every_ns: int = BEACON_NS) -> Watch:
    """Start beacons on uplinks where an agent can.

    A ToR with many uplinks sends less often on each: the load stays the same, and small.
    """
    devices: dict[str, list[str]] = {}
    there = set(session.watchers)
    for end in sorted(ends):
        if end.tor in there:
            devices.setdefault(end.tor, []).append(end.device)
    widest = max((len(names) for names in devices.values()), default=0)
    interval_ns = every_ns * max(1, ceil(widest / DEVICES_AT_FULL_RATE))
    await session.bench.ask_all(
        {
            tor: StartBeacons(devices=tuple(names), interval_ns=interval_ns)
            for tor, names in devices.items()
        },
        Done,
        MESSAGE_NS,
    )
    return Watch(tuple(devices), interval_ns)


async def beacons_off(session: Session, watch: Watch) -> dict[str, Beacons]:
    """Stop beacons; return what each ToR heard since they started."""
    stops = dict.fromkeys(watch.tors, StopBeacons())
    return await session.bench.ask_all(stops, Beacons, MESSAGE_NS)


def dark_ns(heard: Mapping[str, Beacons], moved: frozenset[Link]) -> int | None:
    """Return the longest silence on a moved uplink between two lit states; None if unseen."""
    ends = {str(end) for end in uplinks_of(moved)}
    silences = [
        gap.first_ns - gap.last_ns
        for tor, beacons in heard.items()
        for gap in beacons.gaps
        if f"{tor}:{gap.device}" in ends
    ]
    return max(silences, default=None)


def lost_on(heard: Mapping[str, Beacons], kept: frozenset[Link]) -> int:
    """Return how many beacons were lost on links that stayed."""
    ends = {str(end) for end in uplinks_of(kept)}
    return sum(
        lost
        for tor, beacons in heard.items()
        for device, lost in beacons.lost.items()
        if f"{tor}:{device}" in ends
    )


# -- paths -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What was heard of some links: stamps on the coordinator's clock, and what is wrong."""

    heard_ns: tuple[int, ...]
    wrong: Mapping[Link, str]


async def hear(
    session: Session, links: frozenset[Link], since_ns: int, wait_ns: int = HEAR_NS
) -> Verdict:
    """Wait until every far end of `links` is heard, each end by the other, or `wait_ns` is over.

    Links of which an end has no agent are left out: nobody can say.
    """
    there = set(session.watchers)
    watched = {link for link in links if {link.a.tor, link.b.tor} <= there}
    expect = expected_far_ends(watched)
    heard = await session.bench.ask_all(
        {
            tor: Heard(
                since_ns=session.bench.clocks[tor].to_node(since_ns),
                expect=far_ends,
                wait_ns=wait_ns,
            )
            for tor, far_ends in expect.items()
        },
        Beacons,
        wait_ns + MESSAGE_NS,
    )
    stamps = tuple(
        session.at(tor, heard[tor].first_ns[device])
        for tor, far_ends in expect.items()
        for device in far_ends
        if device in heard[tor].first_ns
    )
    return Verdict(stamps, unheard(watched, heard))


def expected_far_ends(links: Iterable[Link]) -> dict[str, dict[str, str]]:
    """Return, per ToR and device, the far end ("tor:device") that must be heard."""
    expect: dict[str, dict[str, str]] = {}
    for link in sorted(links):
        for sender, hearer in link.ways:
            expect.setdefault(hearer.tor, {})[hearer.device] = str(sender)
    return expect


def unheard(links: Iterable[Link], heard: Mapping[str, Beacons]) -> dict[Link, str]:
    """Return the links through which the wrong end, or nobody, is heard, with the reason."""
    wrong = {}
    for link in sorted(links):
        for far, near in link.ways:
            last = heard[near.tor].last.get(near.device, "")
            fresh = near.device in heard[near.tor].first_ns
            if last != str(far) or not fresh:
                found = f"hears {last}" if last and fresh else "hears nobody"
                wrong[link] = f"{near} {found} instead of {far}"
    return wrong
