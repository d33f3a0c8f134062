"""Beacons over a veth pair between two network namespaces."""

import asyncio
import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyroute2 import IPRoute

from agents.probe import Probe
from harness.clock import NS_PER_MS, NS_PER_S
from harness.wire.messages import (
    Beacons,
    Done,
    Failure,
    Heard,
    Message,
    Note,
    StartBeacons,
    StopBeacons,
)

pytestmark = [pytest.mark.emulated, pytest.mark.root]

CLONE_NEWNET = 0x40000000
INTERVAL_NS = NS_PER_MS
LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Put this thread, and what it starts, into a namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert LIBC.setns(namespace, CLONE_NEWNET) == 0
    try:
        yield
    finally:
        assert LIBC.setns(home, CLONE_NEWNET) == 0
        os.close(home)


def new_namespace() -> int:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert LIBC.unshare(CLONE_NEWNET) == 0
    made = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert LIBC.setns(home, CLONE_NEWNET) == 0
    os.close(home)
    return made


def set_link(namespace: int, name: str, state: str) -> None:
    with inside(namespace), IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=name)[0], state=state)


@pytest.fixture
def namespaces() -> Iterator[tuple[int, int]]:
    """Two namespaces, a and b; devices a0-b0 and a1-b1 are joined and up, without addresses."""
    left, right = new_namespace(), new_namespace()
    with inside(left), IPRoute() as route:
        for n in (0, 1):
            route.link("add", ifname=f"a{n}", kind="veth", peer={"ifname": f"b{n}"})
            route.link("set", index=route.link_lookup(ifname=f"b{n}")[0], net_ns_fd=right)
    for n in (0, 1):
        set_link(left, f"a{n}", "up")
        set_link(right, f"b{n}", "up")
    yield left, right
    os.close(left)
    os.close(right)


class Side:
    """One node's probe. Its sockets stay in the namespace in which they were opened."""

    def __init__(self, name: str, namespace: int) -> None:
        self.name, self.namespace = name, namespace
        self.notes: list[Note] = []
        self.probe = Probe(self.notes.append, node=name)

    async def say(self, message: Message, limit_ns: int = 5 * NS_PER_S) -> Message:
        handler = self.probe.commands()[type(message)]
        async with asyncio.timeout(limit_ns / NS_PER_S + 1):
            return await handler(message, time.monotonic_ns() + limit_ns)

    async def start(self) -> None:
        devices = (f"{self.name}0", f"{self.name}1")
        with inside(self.namespace):
            found = await self.say(StartBeacons(devices=devices, interval_ns=INTERVAL_NS))
        assert isinstance(found, Done), found

    async def beacons(self, since_ns: int = 0, expect: dict[str, str] | None = None) -> Beacons:
        found = await self.say(Heard(since_ns=since_ns, expect=expect or {}, wait_ns=5 * NS_PER_S))
        assert isinstance(found, Beacons), found
        return found


def test_each_end_hears_the_other_and_a_dark_time(namespaces: tuple[int, int]) -> None:
    async def test() -> None:
        a, b = Side("a", namespaces[0]), Side("b", namespaces[1])
        try:
            await a.start()
            since_ns = time.monotonic_ns()
            waiting = asyncio.create_task(a.beacons(since_ns, {"a0": "b:b0", "a1": "b:b1"}))
            await asyncio.sleep(0.05)
            assert not waiting.done(), "nobody is at the other end yet"
            began_ns = time.monotonic_ns()
            await b.start()
            first = await waiting
            assert first.last == {"a0": "b:b0", "a1": "b:b1"}
            assert all(began_ns < at_ns < time.monotonic_ns() for at_ns in first.first_ns.values())
            await b.beacons(0, {"b0": "a:a0", "b1": "a:a1"})

            dark_ns = time.monotonic_ns()
            await asyncio.to_thread(set_link, namespaces[1], "b0", "down")
            await asyncio.sleep(0.05)
            lit_ns = time.monotonic_ns()
            await asyncio.to_thread(set_link, namespaces[1], "b0", "up")
            again = await a.beacons(lit_ns, {"a0": "b:b0"})
            assert lit_ns < again.first_ns["a0"]
            gap = max(
                (g for g in (await a.beacons(dark_ns)).gaps if g.device == "a0"),
                key=lambda g: g.first_ns - g.last_ns,
            )
            assert gap.first_ns - gap.last_ns >= 50 * NS_PER_MS
            assert (gap.before, gap.after) == ("b:b0", "b:b0")

            total = await a.say(StopBeacons())
            assert isinstance(total, Beacons)
            assert total.received["a1"] > total.received["a0"] > 0
            assert total.lost["a1"] == 0
            assert a.notes == b.notes == []
        finally:
            await a.probe.close()
            await b.probe.close()

    asyncio.run(test())


def test_an_expected_far_end_that_is_not_there_is_told_at_the_deadline(
    namespaces: tuple[int, int],
) -> None:
    async def test() -> None:
        a = Side("a", namespaces[0])
        try:
            await a.start()
            found = await a.say(Heard(since_ns=0, expect={"a0": "c:c0"}, wait_ns=NS_PER_S // 10))
            assert isinstance(found, Beacons), found
            assert found.last == {}
        finally:
            await a.probe.close()

    asyncio.run(test())


def test_mistakes_are_refused_and_named(namespaces: tuple[int, int]) -> None:
    async def test() -> None:
        a = Side("a", namespaces[0])
        try:
            with inside(namespaces[0]):
                missing = await a.say(StartBeacons(devices=("a0", "zz9"), interval_ns=INTERVAL_NS))
                hasty = await a.say(StartBeacons(devices=("a0",), interval_ns=1))
            assert isinstance(missing, Failure)
            assert "no network device zz9 here" in missing.text
            assert isinstance(hasty, Failure)
            silent = await a.say(Heard(since_ns=0))
            assert isinstance(silent, Failure)
            assert silent.error == "NoBeacons"
            await a.start()
            elsewhere = await a.say(Heard(since_ns=0, expect={"zz9": "b:b0"}))
            assert isinstance(elsewhere, Failure)
        finally:
            await a.probe.close()

    asyncio.run(test())
