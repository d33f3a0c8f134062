"""A Linux ToR over SSH: Cumulus, the shell of a SONiC host, plain Debian; needs iproute2 >= 5.0.

Its routes bear the marks of `drivers.tor.netlink`, so both drivers see the same routes. A change is
one ``ip -batch`` in which new routes replace old ones before dead ones go, and whose last line
reads them back: one exchange. ``ip`` stops at the first line that the kernel refuses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from drivers.errors import Garbled, Refused
from drivers.tor.base import Delta, Hop, Route
from drivers.tor.netlink import METRIC, PROTOCOL
from drivers.tor.remote import Access, Remote
from drivers.tor.steering import Steering
from drivers.transports.commands import Finished

SHOW = ("route", "show", "table", "main", "proto", str(PROTOCOL))
READ = ("ip", "-json", *SHOW)
BATCH = ("ip", "-json", "-batch", "-")
_MARKS = f"proto {PROTOCOL} metric {METRIC}"
_FAILED_LINE = re.compile(r"^Command failed -:(\d+)$", re.MULTILINE)


class LinuxTor(Steering):
    """A ToR that is steered by ``ip`` over SSH; see `drivers.tor.base`.

    Opens its session at once: raises `Unreachable`, `Untrusted`, `AccessDenied`, `LinkLost`.
    """

    remote = True

    def __init__(self, access: Access) -> None:
        super().__init__(access.name)
        self._remote = Remote(access)
        self._remote.open()

    def close(self) -> None:
        """End the session; the routes stay."""
        self._remote.close()

    def _read(self) -> frozenset[Route]:
        return self._parsed(self._done(self._remote.run(READ), READ))

    def _send(self, before: frozenset[Route], wanted: frozenset[Route]) -> frozenset[Route]:
        lines = batch(Delta.between(before, wanted))
        finished = self._remote.run(BATCH, "\n".join([*lines, " ".join(SHOW), ""]))
        return self._parsed(self._done(finished, BATCH, lines))

    def _done(self, finished: Finished, argv: tuple[str, ...], lines: Sequence[str] = ()) -> str:
        """Return what a command wrote; raise `Refused` with the device's own words."""
        if finished.status == 0:
            return finished.out
        found = _FAILED_LINE.search(finished.err)
        at = int(found[1]) - 1 if found else len(lines)
        words = _FAILED_LINE.sub("", finished.err).strip() or "it gave no reason"
        command = lines[at] if at < len(lines) else " ".join(argv)
        raise Refused(f"exit status {finished.status}", f"ToR {self.name}: {words}", command)

    def _parsed(self, text: str) -> frozenset[Route]:
        try:
            return parse_routes(text)
        except msgspec.DecodeError as error:
            raise Garbled(f"ToR {self.name}: no list of routes: {text[:80]!r}") from error


def batch(delta: Delta) -> list[str]:
    """Return the lines of ``ip -batch`` that carry out `delta`."""
    return [
        *(f"route add {_words(route)}" for route in delta.make),
        *(f"route replace {_words(route)}" for _, route in delta.move),
        *(f"route del {route.prefix} {_MARKS}" for route in delta.drop),
    ]


def _words(route: Route) -> str:
    hops = [f"via {hop.via} dev {hop.device} onlink" for hop in route.hops]
    way = hops[0] if len(hops) == 1 else " ".join(f"nexthop {hop}" for hop in hops)
    return f"{route.prefix} {_MARKS} {way}"


class _NextHop(msgspec.Struct, frozen=True):
    """A way out, as ``ip`` lists it."""

    gateway: str = ""
    dev: str = ""


class _Listed(_NextHop, frozen=True, kw_only=True):
    """A route: its only hop stands in it, several in a list."""

    dst: str
    nexthops: tuple[_NextHop, ...] = ()


def parse_routes(text: str) -> frozenset[Route]:
    """Read what ``ip -json route show`` lists; raise `msgspec.DecodeError`."""
    found = set()
    for listed in msgspec.json.decode(text or "[]", type=list[_Listed]):
        ways = listed.nexthops or (listed,)
        if hops := {Hop(way.gateway, way.dev) for way in ways if way.gateway}:
            found.add(Route(_prefix(listed.dst), tuple(hops)))
    return frozenset(found)


def _prefix(destination: str) -> str:
    """Return the prefix that ``ip`` prints without a length where it is a host, or all."""
    if destination == "default":
        return "0.0.0.0/0"
    return destination if "/" in destination else f"{destination}/32"
