"""A Linux ToR in a network namespace, steered by routes that carry our own protocol number.

Steering routes have metric 10 and protocol 202 (``ip route show proto 202``). The electrical routes
below them have metric 100 and another protocol number; they and all foreign routes are never
touched. A change is one datagram in which new routes replace old ones before dead ones go: at no
instant is a prefix without a route, so no packet is lost to steering.

The kernel spreads the flows of a route with several hops by a hash of the addresses, or of the
ports too where the namespace has the sysctl `FLOW_HASH`.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
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
from drivers.tor.base import Delta, Hop, Route
from drivers.tor.steering import Steering

T = TypeVar("T")

PROTOCOL = 202
"""Our number in ``/etc/iproute2/rt_protos``'s free range: marks a steering route as ours."""
METRIC = 10
ELECTRICAL_PROTOCOL = 203
ELECTRICAL_METRIC = 100
FLOW_HASH = ("net.ipv4.fib_multipath_hash_policy", "1")
"""Sysctl of a ToR: connections, and not only pairs of hosts, are spread over parallel hops."""

_RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE = 24, 25, 26
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_MULTIPATH = 1, 4, 5, 6, 9
_RT_TABLE_MAIN, _RTN_UNICAST, _RTNH_F_ONLINK = 254, 1, 4
_RTMSG = struct.Struct("=BBBBBBBBI")
_RTNEXTHOP = struct.Struct("=HBBi")
_U32 = struct.Struct("=I")


class NetlinkTor(Steering):
    """A ToR whose uplinks live in network namespace `netns` here; see `drivers.tor.base`.

    Raises `Unreachable` when the namespace is not there.
    """

    remote = False

    def __init__(self, name: str, netns: str) -> None:
        super().__init__(name)
        self._netns = netns
        try:
            self._requests = Requests(netns)
            self._index_of = interfaces_in(netns)
        except OSError as error:
            raise Unreachable(f"ToR {name}: namespace {netns}: {error.strerror}") from error
        self._name_of = {index: device for device, index in self._index_of.items()}

    def close(self) -> None:
        """Release the socket; the routes stay."""
        self._requests.close()

    def _read(self) -> frozenset[Route]:
        bodies = self._guard(lambda: self._requests.dump(_RTM_GETROUTE, dump_request()))
        return frozenset(
            route for body in bodies if (route := parse_route(body, self._name_of)) is not None
        )

    def _send(self, before: frozenset[Route], wanted: frozenset[Route]) -> None:
        delta = Delta.between(before, wanted)
        requests = [
            *(self._new(route, NLM_F_EXCL) for route in delta.make),
            *(self._new(route, NLM_F_REPLACE) for _, route in delta.move),
            *(Request(_RTM_DELROUTE, 0, pack_prefix(route.prefix)) for route in delta.drop),
        ]
        self._guard(lambda: self._requests.send(requests))

    def _new(self, route: Route, how: int) -> Request:
        return Request(_RTM_NEWROUTE, NLM_F_CREATE | how, pack_route(route, self._index))

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


def pack_prefix(prefix: str) -> bytes:
    """Pack what names a steering route: its prefix, our protocol number and our metric."""
    address, _, length = prefix.partition("/")
    header = _RTMSG.pack(
        socket.AF_INET, int(length), 0, 0,
        _RT_TABLE_MAIN, PROTOCOL, 0, _RTN_UNICAST, _RTNH_F_ONLINK,
    )  # fmt: skip
    return (
        header
        + attribute(_RTA_DST, socket.inet_aton(address))
        + attribute(_RTA_PRIORITY, _U32.pack(METRIC))
    )


def pack_route(route: Route, index_of: Callable[[str], int]) -> bytes:
    """Pack a steering route; `index_of` gives the index of an interface by its name."""
    if len(route.hops) > 1:
        hops = b"".join(_pack_hop(hop, index_of(hop.device)) for hop in route.hops)
        return pack_prefix(route.prefix) + attribute(_RTA_MULTIPATH, hops)
    (hop,) = route.hops
    return (
        pack_prefix(route.prefix)
        + attribute(_RTA_GATEWAY, socket.inet_aton(hop.via))
        + attribute(_RTA_OIF, _U32.pack(index_of(hop.device)))
    )


def _pack_hop(hop: Hop, index: int) -> bytes:
    gateway = attribute(_RTA_GATEWAY, socket.inet_aton(hop.via))
    return _RTNEXTHOP.pack(_RTNEXTHOP.size + len(gateway), _RTNH_F_ONLINK, 0, index) + gateway


def dump_request() -> bytes:
    """Pack the request for all routes of the main table that carry our protocol number."""
    return _RTMSG.pack(socket.AF_INET, 0, 0, 0, _RT_TABLE_MAIN, PROTOCOL, 0, 0, 0)


def parse_route(body: bytes, name_of: Mapping[int, str]) -> Route | None:
    """Read one answer to the dump; None where it is not one of our steering routes.

    The protocol is looked at again here: kernels before 4.20 ignore the filter of a dump.
    """
    _, length, _, _, _, protocol, _, _, _ = _RTMSG.unpack_from(body)
    found = dict(attributes(body[_RTMSG.size :]))
    if protocol != PROTOCOL or not {_RTA_GATEWAY, _RTA_MULTIPATH} & found.keys():
        return None
    destination = socket.inet_ntoa(found.get(_RTA_DST, bytes(4)))
    if _RTA_MULTIPATH in found:
        ways = list(_parse_hops(found[_RTA_MULTIPATH]))
    else:
        ways = [(found[_RTA_GATEWAY], _U32.unpack(found[_RTA_OIF])[0])]
    hops = (Hop(socket.inet_ntoa(via), name_of.get(index, f"#{index}")) for via, index in ways)
    return Route(f"{destination}/{length}", tuple(set(hops)))


def _parse_hops(packed: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield gateway and interface index of each ``struct rtnexthop``."""
    at = 0
    while at < len(packed):
        size, _, _, index = _RTNEXTHOP.unpack_from(packed, at)
        inner = dict(attributes(packed[at + _RTNEXTHOP.size : at + size]))
        yield inner.get(_RTA_GATEWAY, bytes(4)), index
        at += size + (-size % 4)
