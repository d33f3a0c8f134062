"""A ToR that runs FRRouting, by ``vtysh`` over SSH: static routes with our own tag.

Tested on FRR 8.4. Our routes have tag 202 and administrative distance 10: they win over BGP's and
over static ones with a greater distance, which carry the electrical path. Routes that win over ours
(the operator's own static ones of distance 1, or put into the kernel by anybody else: distance 0)
are found out, and said. A route over several hops is as many lines of configuration. A change goes
out as one ``configure terminal``, new hops before old ones, and is never saved for the next start;
the same command reads it back.

FRR takes any route into its configuration and puts it in force a little later, or not at all (no
such interface, no link): so a change is first read back from the configuration, then waited for in
the routing table. Of several routes by one hop that it cannot resolve, it installs only the first
(FRRouting issue 18321): so each hop in use also has a host route of its own, with tag 201.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from drivers.base import NS_PER_S
from drivers.errors import Garbled, Refused
from drivers.tor.base import Delta, Hop, Route, differences
from drivers.tor.remote import Access, Remote
from drivers.tor.steering import Steering

TAG = 202
NEAR_TAG = 201
"""Of host routes to the far ends of uplinks."""
DISTANCE = 10
LINES_MAX = 200
"""Lines of configuration in one command: a shell takes 128 KiB."""
PAUSE_NS = 5_000_000
"""Between two looks at a routing table that is still on its way."""
SHOW = "show running-config"
CONFIGURATION = ("vtysh", "-c", SHOW)
IN_FORCE = ("vtysh", "-c", f"show ip route tag {TAG} json")
NOTHING = Delta((), (), ())
_NEAR = re.compile(rf"^ip route (\S+)/32 (\S+) tag {NEAR_TAG} {DISTANCE}$", re.MULTILINE)
_LINE = re.compile(rf"^ip route (\S+) (\S+) (\S+) (?:.* )?tag {TAG}(?: .*)?$", re.MULTILINE)


class FrrTor(Steering):
    """A ToR that is steered by ``vtysh`` over SSH; see `drivers.tor.base`.

    Opens its session at once: raises `Unreachable`, `Untrusted`, `AccessDenied`, `LinkLost`.
    """

    remote = True

    def __init__(self, access: Access) -> None:
        super().__init__(access.name)
        self._access = access
        self._remote = Remote(access)
        self._remote.open()
        self._near: frozenset[Hop] = frozenset()
        """Hops that have a host route, as read last."""

    def read(self) -> frozenset[Route]:
        """Return the steering routes in force: of those configured, the hops that are in use."""
        self._reach()
        return self._in_force()

    def close(self) -> None:
        """End the session; the routes stay."""
        self._remote.close()

    def _read(self) -> frozenset[Route]:
        return self._parsed(self._vtysh(CONFIGURATION))

    def _send(self, before: frozenset[Route], wanted: frozenset[Route]) -> frozenset[Route]:
        delta = Delta.between(before, wanted)
        return self._configure(batch(delta, self._near, hops_of(wanted)))

    def _configure(self, lines: list[str]) -> frozenset[Route]:
        """Enter lines into the configuration; return our routes as it holds them then."""
        text = ""
        for at in range(0, len(lines), LINES_MAX):
            text = self._vtysh(command(lines[at : at + LINES_MAX]))
        return self._parsed(text)

    def _parsed(self, configuration: str) -> frozenset[Route]:
        self._near = parse_near(configuration)
        return parse_configuration(configuration)

    def _confirm(
        self, before: frozenset[Route], found: frozenset[Route], wanted: frozenset[Route]
    ) -> None:
        super()._confirm(before, found, wanted)
        if self._near != hops_of(wanted):  # a change was cut between its routes and their hops
            self._configure(batch(NOTHING, self._near, hops_of(wanted)))
        changed = {route.prefix for route in before ^ wanted}
        expected = frozenset(route for route in wanted if route.prefix in changed)
        limit_ns = self._access.now_ns() + self._access.exchange_timeout_ns
        while changed:
            in_force = frozenset(r for r in self._in_force() if r.prefix in changed)
            if in_force == expected:
                return
            if self._access.now_ns() >= limit_ns:
                told = differences(in_force, expected)
                raise Refused(
                    "INACTIVE", f"ToR {self.name}: configured, but not so in force: {told}"
                )
            self._access.sleep(PAUSE_NS / NS_PER_S)

    def _in_force(self) -> frozenset[Route]:
        text = self._vtysh(IN_FORCE)
        try:
            return parse_table(text)
        except msgspec.DecodeError as error:
            raise Garbled(f"ToR {self.name}: no routing table: {text[:80]!r}") from error

    def _vtysh(self, argv: tuple[str, ...]) -> str:
        """Return what vtysh answers; raise `Refused` with its first complaint (``% ..``)."""
        finished = self._remote.run(argv)
        said = (finished.out + finished.err).splitlines()
        complaints = [line for line in said if line.startswith("% ")]
        if finished.status == 0 and not complaints:
            return finished.out
        words = (complaints or said or ["it gave no reason"])[0].removeprefix("% ")
        raise Refused(f"exit status {finished.status}", f"ToR {self.name}: {words}", argv[0])


def batch(delta: Delta, near: frozenset[Hop], needed: frozenset[Hop]) -> list[str]:
    """Return the lines of configuration that carry out `delta`, new hops before old ones.

    `near` are the hops that have a host route, `needed` those that are to have one.
    """
    makes = [(route.prefix, hop) for route in delta.make for hop in route.hops]
    breaks = [(route.prefix, hop) for route in delta.drop for hop in route.hops]
    for old, new in delta.move:
        makes += [(new.prefix, hop) for hop in new.hops if hop not in old.hops]
        breaks += [(old.prefix, hop) for hop in old.hops if hop not in new.hops]
    return [
        *(_near_words(hop) for hop in sorted(needed - near)),
        *(_words(prefix, hop) for prefix, hop in makes),
        *(f"no {_words(prefix, hop)}" for prefix, hop in breaks),
        *(f"no {_near_words(hop)}" for hop in sorted(near - needed)),
    ]


def hops_of(routes: frozenset[Route]) -> frozenset[Hop]:
    """Return every hop that `routes` lead by."""
    return frozenset(hop for route in routes for hop in route.hops)


def command(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the vtysh command that enters `lines` into the configuration, then shows it."""
    entered = ("configure terminal", *lines, "end", SHOW)
    return ("vtysh", *(word for line in entered for word in ("-c", line)))


def _words(prefix: str, hop: Hop) -> str:
    return f"ip route {prefix} {hop.via} {hop.device} tag {TAG} {DISTANCE} onlink"


def _near_words(hop: Hop) -> str:
    return f"ip route {hop.via}/32 {hop.device} tag {NEAR_TAG} {DISTANCE}"


def parse_near(text: str) -> frozenset[Hop]:
    """Read out of a running configuration which hops have a host route."""
    return frozenset(Hop(via, device) for via, device in _NEAR.findall(text))


def parse_configuration(text: str) -> frozenset[Route]:
    """Read our routes out of a running configuration; a VRF's (indented) are not ours."""
    hops: dict[str, set[Hop]] = {}
    for prefix, via, device in _LINE.findall(text):
        hops.setdefault(prefix, set()).add(Hop(via, device))
    return frozenset(Route(prefix, tuple(ways)) for prefix, ways in hops.items())


class _NextHop(msgspec.Struct, frozen=True):
    """A way out, as FRR lists it; `fib` says that it is in use."""

    ip: str = ""
    interface: str = msgspec.field(default="", name="interfaceName")
    fib: bool = False


class _Listed(msgspec.Struct, frozen=True):
    """A route of the routing table."""

    prefix: str
    nexthops: tuple[_NextHop, ...]
    installed: bool = False


def parse_table(text: str) -> frozenset[Route]:
    """Read which routes of ``show ip route .. json`` are in force; raise `msgspec.DecodeError`."""
    found = set()
    for entries in msgspec.json.decode(text or "{}", type=dict[str, list[_Listed]]).values():
        for listed in entries:
            hops = {Hop(way.ip, way.interface) for way in listed.nexthops if way.fib and way.ip}
            if listed.installed and hops:
                found.add(Route(listed.prefix, tuple(hops)))
    return frozenset(found)
