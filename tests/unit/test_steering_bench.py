"""ToRs of a bench: remote ones at once, each failure with its ToR's name, none for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

import pytest

from drivers.errors import DriverError, Indeterminate, Refused, Unreachable
from drivers.tor.base import Route
from harness.bench import tors
from harness.bench.running import close_all, open_all
from harness.bench.tors import SteerableTor, steer
from harness.errors import InfrastructureError, SteeringFailed
from harness.model.bench import Tor

LIMIT_S = 10.0
NOTHING: frozenset[Route] = frozenset()
WANTED = frozenset({Route.one("10.1.0.0/24", "10.9.0.1", "swp1")})


class Driver:
    """A ToR that does `act` at every change; `thread` is where the last one was done."""

    def __init__(self, name: str, act: Callable[[], object] = lambda: None) -> None:
        self.name, self.act = name, act
        self.routes = NOTHING
        self.thread = ""
        self.closed = threading.Event()

    def read(self) -> frozenset[Route]:
        return self.routes

    def apply(self, wanted: frozenset[Route]) -> None:
        self.thread = threading.current_thread().name
        self.act()
        self.routes = wanted

    def close(self) -> None:
        self.closed.set()


def fails(error: Exception) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def spec(driver: str = "linux-ssh", exchange_timeout_s: float = LIMIT_S) -> Tor:
    return Tor(driver=driver, url="ssh://a@b", exchange_timeout_s=exchange_timeout_s)  # type: ignore[arg-type]


@pytest.fixture
def racks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, SteerableTor]]:
    """Make ToRs of drivers and of errors of opening."""
    found: dict[str, Driver | DriverError] = {}

    def open_tor(_driver: str, _url: str, *, name: str, **_: object) -> Driver:
        made = found[name]
        if isinstance(made, DriverError):
            raise made
        return made

    monkeypatch.setattr(tors, "open_tor", open_tor)

    def make(
        made: Mapping[str, Driver | DriverError], specs: Mapping[str, Tor] | None = None
    ) -> dict[str, SteerableTor]:
        found.update(made)
        return {name: SteerableTor(name, (specs or {}).get(name, spec())) for name in made}

    return make


def test_remote_tors_are_steered_at_once_and_local_ones_in_the_loops_thread(racks) -> None:
    both = threading.Barrier(2, timeout=LIMIT_S)  # broken unless both are in their change
    a, b, c = Driver("a", both.wait), Driver("b", both.wait), Driver("c")

    async def main() -> None:
        made = racks({"a": a, "b": b, "c": c}, {"c": spec("netlink")})
        await open_all(made.values())
        await steer(made, dict.fromkeys("abc", WANTED))
        await close_all(made.values())

    asyncio.run(main())
    assert [driver.routes for driver in (a, b, c)] == [WANTED] * 3
    assert (a.thread, b.thread, c.thread) == ("tor-a", "tor-b", threading.current_thread().name)
    assert all(driver.closed.is_set() for driver in (a, b, c))


def test_all_are_asked_and_each_failure_names_its_tor_and_what_is_unknown(racks) -> None:
    drivers = {
        "a": Driver("a", fails(Refused("5", "ToR a: no such device"))),
        "b": Driver("b", fails(Indeterminate("no answer"))),
        "c": Driver("c"),
        "d": Driver("d", fails(Unreachable("no route to host"))),
    }

    async def main() -> dict[str, str]:
        made = racks(drivers, {"d": spec("netlink")})
        await open_all(made.values())
        with pytest.raises(SteeringFailed) as caught:
            await steer(made, dict.fromkeys("abcd", WANTED))
        await close_all(made.values())
        return caught.value.failures

    failures = asyncio.run(main())
    assert failures == {
        "a": "device refused: 5 ToR a: no such device",
        "b": "b: no answer (its routes are not known)",
        "d": "d: no route to host",
    }
    assert drivers["c"].routes == WANTED


def test_a_hung_tor_is_given_up_and_told_at_once_until_it_has_ended(racks) -> None:
    gate = threading.Event()
    hung, well = Driver("hung", gate.wait), Driver("well")

    async def main() -> None:
        made = racks({"hung": hung, "well": well}, {"hung": spec(exchange_timeout_s=0.005)})
        await open_all(made.values())
        with pytest.raises(SteeringFailed, match=r"hung: no answer within 0\.02 s \(its routes"):
            await steer(made, dict.fromkeys(made, WANTED))
        assert well.routes == WANTED
        with pytest.raises(SteeringFailed, match="hung: still no answer to an earlier change"):
            await steer(made, dict.fromkeys(made, NOTHING))
        assert well.routes == NOTHING
        gate.set()
        assert await made["hung"].read() == WANTED  # in turn, after what it hung in
        await steer(made, dict.fromkeys(made, NOTHING))
        assert hung.routes == NOTHING
        await close_all(made.values())

    asyncio.run(main())


def test_every_tor_that_does_not_open_is_told(racks) -> None:
    async def main() -> None:
        made = racks({"a": Unreachable("no route"), "b": Driver("b"), "c": Unreachable("refused")})
        with pytest.raises(InfrastructureError, match=r"a \(ssh://a@b\): no route; c \(ssh.*refus"):
            await open_all(made.values())
        await close_all(made.values())

    asyncio.run(main())


def test_a_change_after_a_cancelled_one_has_its_whole_time(racks) -> None:
    entered, gates = threading.Semaphore(0), [threading.Event(), threading.Event()]
    left = iter(gates)

    def act() -> None:
        gate = next(left)
        entered.release()
        gate.wait(LIMIT_S)

    slow = Driver("slow", act)

    async def main() -> None:
        made = racks({"slow": slow}, {"slow": spec(exchange_timeout_s=0.25)})
        await open_all(made.values())
        later = asyncio.get_running_loop().call_later
        first = asyncio.create_task(steer(made, {"slow": NOTHING}))
        await asyncio.to_thread(entered.acquire, timeout=LIMIT_S)
        first.cancel()
        second = asyncio.create_task(steer(made, {"slow": WANTED}))
        later(0.7, gates[0].set)  # together they take longer than the 1 s that one may
        await asyncio.to_thread(entered.acquire, timeout=LIMIT_S)
        later(0.7, gates[1].set)
        await second
        assert slow.routes == WANTED
        await close_all(made.values())

    asyncio.run(main())
