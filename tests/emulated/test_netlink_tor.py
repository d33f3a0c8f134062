"""Steering a ToR: only the difference is sent, it is read back, and no other route is touched."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from drivers import netlink
from drivers.errors import Misuse, Refused, Unreachable
from drivers.interfaces import End, Interfaces
from drivers.netlink import Request
from drivers.tor.base import Hop, Route
from drivers.tor.netlink import (
    ELECTRICAL_METRIC,
    ELECTRICAL_PROTOCOL,
    FLOW_HASH,
    NetlinkTor,
)

pytestmark = pytest.mark.root
LIMIT_S = 10.0
FAR = "198.18.128.9"
TO_1 = Route.one("198.19.1.0/24", FAR, "u1")
TO_2 = Route.one("198.19.2.0/24", FAR, "u1")
TO_3 = Route.one("198.19.3.0/24", FAR, "u2")
TO_1_BY_U2 = Route.one("198.19.1.0/24", FAR, "u2")


def routes(netns: str) -> set[str]:
    text = subprocess.run(
        ["ip", "-n", netns, "route", "show"], capture_output=True, text=True, check=True
    ).stdout
    return {" ".join(line.split()).removesuffix(" linkdown") for line in text.splitlines()}


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"tor{os.getpid()}"
    netlink.create_namespace(name)
    try:
        netlink.run_in(name, _furnish)
        yield name
    finally:
        netlink.delete_namespace(name)


def _furnish() -> None:
    with Interfaces() as interfaces:
        for i in (1, 2):
            interfaces.veth(End(f"u{i}", ""), End(f"far{i}", ""), mtu=1500)
            interfaces.up(f"u{i}")
            interfaces.up(f"far{i}")
            interfaces.address(f"u{i}", f"198.18.128.{i}", 32)
            for gateway in (FAR, "198.18.192.0"):
                interfaces.neighbour(f"u{i}", gateway, "02:00:00:00:00:09")
        for i in range(4):
            interfaces.route(
                f"198.19.{i}.0/24", via="198.18.192.0", name="u2",
                metric=ELECTRICAL_METRIC, protocol=ELECTRICAL_PROTOCOL,
            )  # fmt: skip


@pytest.fixture
def tor(netns: str) -> Iterator[NetlinkTor]:
    found = NetlinkTor("tor0", netns)
    yield found
    found.close()


def test_routes_are_made_moved_and_taken_away(tor: NetlinkTor, netns: str) -> None:
    before = routes(netns)
    for wanted in ({TO_1, TO_2}, {TO_1_BY_U2, TO_3}, set()):
        tor.apply(frozenset(wanted))
        assert tor.read() == wanted
        ours = {f"{r.prefix} {r.hops[0]} proto 202 metric 10 onlink" for r in wanted}
        assert routes(netns) == before | ours


def test_only_the_difference_is_sent(tor: NetlinkTor, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []
    send = tor._requests.send

    def watched(requests: list[Request]) -> None:
        batches.append([request.kind for request in requests])
        send(requests)

    monkeypatch.setattr(tor._requests, "send", watched)
    tor.apply(frozenset({TO_1, TO_2}))
    tor.apply(frozenset({TO_1, TO_2}))
    tor.apply(frozenset({TO_1, TO_3}))
    new, gone = 24, 25
    assert batches == [[new, new], [new, gone]]


def test_a_large_set_is_made_and_taken_away_whole(tor: NetlinkTor) -> None:
    wanted = frozenset(Route.one(f"198.19.{i}.0/24", FAR, "u1") for i in range(250))
    tor.apply(wanted)
    assert tor.read() == wanted
    tor.apply(frozenset())
    assert tor.read() == frozenset()


def test_a_foreign_route_in_our_place_is_refused_not_replaced(tor: NetlinkTor, netns: str) -> None:
    foreign = ["198.19.1.0/24", "dev", "u2", "metric", "10"]
    subprocess.run(["ip", "-n", netns, "route", "add", *foreign], check=True)
    before = routes(netns)
    with pytest.raises(Refused, match="EEXIST"):
        tor.apply(frozenset({TO_1}))
    assert routes(netns) == before
    tor.apply(frozenset())
    assert routes(netns) == before


def test_what_the_kernel_refuses_is_told_in_its_own_words(tor: NetlinkTor, netns: str) -> None:
    subprocess.run(["ip", "-n", netns, "link", "set", "u2", "down"], check=True)
    with pytest.raises(Refused, match="ToR tor0: Nexthop device is not up"):
        tor.apply(frozenset({TO_3}))


def test_what_is_lost_below_us_is_read_and_made_anew(tor: NetlinkTor, netns: str) -> None:
    tor.apply(frozenset({TO_1, TO_3}))
    subprocess.run(["ip", "-n", netns, "route", "del", TO_3.prefix, "proto", "202"], check=True)
    assert tor.read() == {TO_1}
    tor.apply(frozenset({TO_1, TO_3}))
    assert tor.read() == {TO_1, TO_3}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({TO_1, TO_1_BY_U2}, "two steering routes for one prefix"),
        ({Route.one("198.19.1.0/24", FAR, "u7")}, "no uplink 'u7'; it has far1, far2, lo, u1, u2"),
    ],
    ids=["one prefix twice", "no such uplink"],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    tor: NetlinkTor, netns: str, wanted: set[Route], words: str
) -> None:
    before = routes(netns)
    with pytest.raises(Misuse, match=words):
        tor.apply(frozenset(wanted))
    assert routes(netns) == before


def test_a_prefix_always_has_a_route_while_it_is_steered_to_and_fro(
    tor: NetlinkTor, netns: str
) -> None:
    sent, done = [], threading.Event()
    sender = netlink.socket_in(netns, socket.AF_INET, socket.SOCK_DGRAM)

    def send() -> None:
        while not done.is_set():  # without a route this raises ENETUNREACH at once
            sent.append(sender.sendto(b"?", ("198.19.1.7", 9)))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            turns, deadline = 0, time.monotonic() + LIMIT_S
            while (turns < 30 or len(sent) < 500) and time.monotonic() < deadline:
                turns += 1
                for wanted in ({TO_1}, {TO_1_BY_U2}, set()):
                    tor.apply(frozenset(wanted))
        finally:
            done.set()
        sending.result(LIMIT_S)
    sender.close()
    assert len(sent) >= 500


def test_a_namespace_that_is_not_there_is_named() -> None:
    with pytest.raises(Unreachable, match="ToR tor0: namespace nowhere"):
        NetlinkTor("tor0", "nowhere")


def test_opening_and_closing_leaks_no_descriptor(netns: str) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        tor = NetlinkTor("tor0", netns)
        tor.read()
        tor.close()
        tor.close()
    assert os.listdir("/proc/self/fd") == before


def test_flows_are_spread_over_parallel_hops_and_a_pinned_host_is_not(
    tor: NetlinkTor, netns: str
) -> None:
    netlink.run_in(netns, lambda: netlink.write_sysctl(*FLOW_HASH))
    both = Route("198.19.1.0/24", (Hop(FAR, "u1"), Hop(FAR, "u2")))
    tor.apply(frozenset({both, Route.one("198.19.1.7/32", FAR, "u2")}))
    ways = {
        (host, way_out(netns, f"198.19.1.{host}", port)) for host in (7, 8) for port in range(64)
    }
    assert ways == {(7, "u2"), (8, "u1"), (8, "u2")}


def way_out(netns: str, to: str, port: int) -> str:
    flow = ["ipproto", "udp", "sport", "5000", "dport", str(5000 + port)]
    argv = ["ip", "-n", netns, "-json", "route", "get", to, *flow]
    return str(json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)[0]["dev"])
