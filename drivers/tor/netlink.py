"""A Linux ToR in a network namespace, steered by routes that carry our own protocol number.

Steering routes have metric 10 and protocol 202 (``ip route show proto 202``). The electrical routes
below them have metric 100 and another protocol number; they and all foreign routes are never
touched. A change is one datagram in which new routes replace old ones before dead ones go: at no
instant is a prefix without a route, so no packet is lost to steering.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from typing import TypeVar

from drivers.errors import Misuse, Refused, Unreachable
from drivers.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    RequestFailed,
    Requests,
    attribute,
    attributes,
    interfaces_in,
)
from drivers.tor.base import Route

T = TypeVar("T")

PROTOCOL = 202
"""Our number in ``/etc/iproute2/rt_protos``'s free range: marks a steering route as ours."""
METRIC = 10
ELECTRICAL_PROTOCOL = 203
ELECTRICAL_METRIC = 100

_RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE = 24, 25, 26
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY = 1, 4, 5, 6
_RT_TABLE_MAIN, _RTN_UNICAST, _RTNH_F_ONLINK = 254, 1, 4
_RTMSG = struct.Struct("=BBBBBBBBI")
_U32 = struct.Struct("=I")


class NetlinkTor:
    """A ToR whose uplinks live in network namespace `netns` here; see `drivers.tor.base`.

    Raises `Unreachable` when the namespace is not there.
    """

    def __init__(self, name: str, netns: str) -> None:
        self.name = name
        self._netns = netns
        try:
            self._requests = Requests(netns)
            self._index_of = interfaces_in(netns)
        except OSError as error:
            raise Unreachable(f"ToR {name}: namespace {netns}: {error.strerror}") from error
        self._name_of = {index: device for device, index in self._index_of.items()}
        self._seen: frozenset[Route] | None = None
        """What was read back last."""

    def read(self) -> frozenset[Route]:
        """Return the steering routes in force."""
        return self._guard(self._dump)

    def apply(self, wanted: frozenset[Route]) -> None:
        """Make `wanted` the whole set of steering routes; see `drivers.tor.base.Tor.apply`."""
        if len({route.prefix for route in wanted}) != len(wanted):
            raise Misuse(f"ToR {self.name}: two steering routes for one prefix")
        if self._seen is not None and wanted != self._seen and self._change(self._seen, wanted):
            return
        # Nothing is known yet, nothing should be to do, or somebody else changed our routes since.
        self._seen = self.read()
        if wanted != self._seen and not self._change(self._seen, wanted):
            raise Refused("READBACK", f"ToR {self.name}: {_differences(self._seen, wanted)}")

    def _change(self, current: frozenset[Route], wanted: frozenset[Route]) -> bool:
        """Send the difference and read back; tell whether `wanted` is in force now.

        What was read back last is trusted to be there still, which halves the time of a change;
        the read-back at its end finds out when that was wrong.
        """
        requests = self._difference(current, wanted)
        self._seen = None
        try:
            self._guard(lambda: self._requests.send(requests))
        except Refused:
            if self.read() == current:
                raise
        self._seen = self.read()
        return self._seen == wanted

    def close(self) -> None:
        """Release the socket; the routes stay."""
        self._requests.close()

    def _dump(self) -> frozenset[Route]:
        bodies = self._requests.dump(_RTM_GETROUTE, dump_request())
        return frozenset(
            route for body in bodies if (route := parse_route(body, self._name_of)) is not None
        )

    def _difference(self, current: frozenset[Route], wanted: frozenset[Route]) -> list[Request]:
        held = {route.prefix for route in current}
        kept = {route.prefix for route in wanted}
        makes = [
            self._make(route, NLM_F_REPLACE if route.prefix in held else NLM_F_EXCL)
            for route in sorted(wanted - current)
        ]
        breaks = [
            Request(_RTM_DELROUTE, 0, pack_route(route, self._index(route.device)))
            for route in sorted(current)
            if route.prefix not in kept
        ]
        return makes + breaks

    def _make(self, route: Route, how: int) -> Request:
        body = pack_route(route, self._index(route.device))
        return Request(_RTM_NEWROUTE, NLM_F_CREATE | how, body)

    def _index(self, device: str) -> int:
        try:
            return self._index_of[device]
        except KeyError:
            known = ", ".join(sorted(self._index_of))
            raise Misuse(f"ToR {self.name} has no uplink {device!r}; it has {known}") from None

    def _guard(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except RequestFailed as error:
            code = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise Refused(code, f"ToR {self.name}: {error.strerror}") from error
        except OSError as error:
            raise Unreachable(f"ToR {self.name}: namespace {self._netns}: {error}") from error


def pack_route(route: Route, index: int) -> bytes:
    """Pack a steering route through interface `index`; raise `Misuse` on a bad address."""
    try:
        network = ipaddress.IPv4Network(route.prefix)
        via = ipaddress.IPv4Address(route.via)
    except ValueError as error:
        raise Misuse(f"{route}: {error}") from error
    header = _RTMSG.pack(
        socket.AF_INET, network.prefixlen, 0, 0,
        _RT_TABLE_MAIN, PROTOCOL, 0, _RTN_UNICAST, _RTNH_F_ONLINK,
    )  # fmt: skip
    return (
        header
        + attribute(_RTA_DST, network.network_address.packed)
        + attribute(_RTA_GATEWAY, via.packed)
        + attribute(_RTA_OIF, _U32.pack(index))
        + attribute(_RTA_PRIORITY, _U32.pack(METRIC))
    )


def dump_request() -> bytes:
    """Pack the request for all routes of the main table that carry our protocol number."""
    return _RTMSG.pack(socket.AF_INET, 0, 0, 0, _RT_TABLE_MAIN, PROTOCOL, 0, 0, 0)


def parse_route(body: bytes, name_of: Mapping[int, str]) -> Route | None:
    """Read one answer to the dump; None where it is not one of our steering routes.

    The protocol is looked at again here: kernels before 4.20 ignore the filter of a dump.
    """
    _, length, _, _, _, protocol, _, _, _ = _RTMSG.unpack_from(body)
    found = dict(attributes(body[_RTMSG.size :]))
    if protocol != PROTOCOL or _RTA_GATEWAY not in found:
        return None
    index = _U32.unpack(found[_RTA_OIF])[0]
    destination = socket.inet_ntoa(found.get(_RTA_DST, bytes(4)))
    return Route(
        prefix=f"{destination}/{length}",
        via=socket.inet_ntoa(found[_RTA_GATEWAY]),
        device=name_of.get(index, f"#{index}"),
    )


def _differences(found: frozenset[Route], wanted: frozenset[Route]) -> str:
    parts = [f"{route} missing" for route in sorted(wanted - found)]
    parts += [f"{route} unexpected" for route in sorted(found - wanted)]
    return "; ".join(parts)
