"""Netlink attributes and steering routes, packed and read."""

import socket
import struct

from hypothesis import given
from hypothesis import strategies as st

from drivers.netlink import attribute, attributes
from drivers.tor.base import Hop, Route
from drivers.tor.netlink import METRIC, PROTOCOL, pack_route, parse_route

ROUTE = Route.one("198.19.3.0/24", "198.18.128.7", "u2")
INDEX_OF = {f"u{i}": i for i in range(10)}
octets = st.integers(0, 255)
addresses = st.tuples(octets, octets, octets, octets).map(lambda parts: ".".join(map(str, parts)))


@given(st.lists(st.tuples(st.integers(1, 0x3FFF), st.binary(max_size=40)), max_size=6))
def test_attributes_come_back_as_they_were_packed(items: list[tuple[int, bytes]]) -> None:
    packed = b"".join(attribute(kind, payload) for kind, payload in items)
    assert len(packed) % 4 == 0
    assert list(attributes(packed)) == items


hops = st.builds(Hop, addresses, st.sampled_from(sorted(INDEX_OF)))


@given(addresses, st.lists(hops, min_size=1, max_size=9, unique=True), st.integers(8, 32))
def test_a_route_comes_back_as_it_was_packed(network: str, ways: list[Hop], length: int) -> None:
    bits = struct.unpack("!I", socket.inet_aton(network))[0] >> (32 - length) << (32 - length)
    prefix = f"{socket.inet_ntoa(struct.pack('!I', bits))}/{length}"
    route = Route(prefix, tuple(ways))
    name_of = {index: name for name, index in INDEX_OF.items()}
    assert parse_route(pack_route(route, INDEX_OF.__getitem__), name_of) == route


def test_a_steering_route_says_whose_it_is_and_that_it_is_preferred() -> None:
    body = pack_route(ROUTE, {"u2": 5}.__getitem__)
    family, length, _, _, table, protocol, _, kind, flags = struct.unpack_from("=BBBBBBBBI", body)
    assert (family, length, table, kind) == (socket.AF_INET, 24, 254, 1)
    assert (protocol, flags) == (PROTOCOL, 4)
    assert dict(attributes(body[12:])) == {
        1: bytes([198, 19, 3, 0]),
        5: bytes([198, 18, 128, 7]),
        4: struct.pack("=I", 5),
        6: struct.pack("=I", METRIC),
    }


def test_a_foreign_route_is_not_taken_for_ours() -> None:
    body = bytearray(pack_route(ROUTE, {"u2": 5}.__getitem__))
    body[5] = 4
    assert parse_route(bytes(body), {5: "u2"}) is None
