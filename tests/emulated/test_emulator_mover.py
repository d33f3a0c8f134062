"""Light moves when it must: dark at once, lit after the drawn time, never by a plan overtaken."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from random import Random

import pytest

from drivers.emulators.config import EmulatedSwitch, Faults
from drivers.emulators.faces.tl1 import Tl1Session
from drivers.emulators.faults import Fates
from drivers.emulators.model import Change, Lighting, SwitchModel
from drivers.emulators.mover import Mover
from drivers.emulators.unit import Unit

MS = 1_000_000
LIMIT_S = 5.0


class Lamp:
    """Writes down what it is told and when."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[int, int | None]]] = []
        self.lit = threading.Event()
        self.broken = False

    def set(self, changes: Mapping[int, int | None]) -> None:
        if self.broken:
            raise OSError("no such interface")
        self.told.append((time.monotonic_ns(), dict(changes)))
        if any(egress is not None for egress in changes.values()):
            self.lit.set()


@pytest.fixture
def lamp() -> Lamp:
    return Lamp()


@pytest.fixture
def mover(lamp: Lamp) -> Iterator[Mover]:
    mover = Mover(lamp)
    yield mover
    mover.close()


def move(mover: Mover, ingress: int, egress: int, after_ms: float) -> None:
    now_ns = time.monotonic_ns()
    lighting = Lighting(now_ns + round(after_ms * MS), ingress, egress)
    mover.carry_out(Change(dark=(ingress,), light=(lighting,)), now_ns)


def test_dark_times_are_as_drawn(lamp: Lamp, mover: Mover):
    for _ in range(100):
        lamp.lit.clear()
        move(mover, 1, 17, 5)
        assert lamp.lit.wait(LIMIT_S)
    mover.close()  # the last record is written after the light is there
    late_ns = sorted(taken.actual_ns - taken.asked_ns for taken in mover.dark_times)
    assert len(late_ns) == 100
    assert late_ns[0] > -1 * MS
    assert late_ns[50] < 1 * MS
    assert late_ns[98] < 5 * MS


def test_light_is_gone_before_the_call_returns(lamp: Lamp, mover: Mover):
    move(mover, 1, 17, 10_000)
    assert [changes for _, changes in lamp.told] == [{1: None}]


def test_a_plan_that_was_overtaken_is_not_carried_out(lamp: Lamp, mover: Mover):
    move(mover, 1, 17, 20)
    move(mover, 1, 18, 40)
    assert lamp.lit.wait(LIMIT_S)
    mover.close()
    assert [changes for _, changes in lamp.told] == [{1: None}, {1: None}, {1: 18}]


def test_an_earlier_lighting_overtakes_a_later_one(lamp: Lamp, mover: Mover):
    move(mover, 1, 17, 10_000)
    move(mover, 2, 18, 10)
    assert lamp.lit.wait(LIMIT_S)
    assert lamp.told[-1][1] == {2: 18}


def test_what_is_due_together_moves_together(lamp: Lamp, mover: Mover):
    now_ns = time.monotonic_ns()
    at_ns = now_ns + 10 * MS
    light = tuple(Lighting(at_ns, i, 16 + i) for i in range(1, 17))
    mover.carry_out(Change(dark=tuple(range(1, 17)), light=light), now_ns)
    assert lamp.lit.wait(LIMIT_S)
    mover.close()
    assert len(lamp.told) == 2


def test_light_that_cannot_be_moved_is_told_and_the_next_one_moves(
    lamp: Lamp, mover: Mover, caplog: pytest.LogCaptureFixture
):
    lamp.broken = True
    with caplog.at_level(logging.ERROR):
        move(mover, 1, 17, 10_000)
    assert "light did not move: {1: None}" in caplog.text
    lamp.broken = False
    move(mover, 2, 18, 1)
    assert lamp.lit.wait(LIMIT_S)


def test_a_held_port_is_dark_for_packets_until_its_hold_is_over(lamp: Lamp):
    mover = Mover(lamp, hold_ns=30 * MS)
    try:
        begun_ns = time.monotonic_ns()
        move(mover, 1, 17, 5)
        assert lamp.lit.wait(LIMIT_S)
        assert lamp.told[-1][0] - begun_ns >= 35 * MS
        move(mover, 2, 18, 0)  # its light is there at once, its port is not
        assert [changes for _, changes in lamp.told] == [{1: None}, {1: 17}, {2: None}]
    finally:
        mover.close()


def test_light_that_goes_during_the_hold_starts_it_again(lamp: Lamp):
    mover = Mover(lamp, hold_ns=40 * MS)
    try:
        move(mover, 1, 17, 1)
        time.sleep(0.02)  # half of the hold
        again_ns = time.monotonic_ns()
        move(mover, 1, 17, 1)
        assert lamp.lit.wait(LIMIT_S)
        assert lamp.told[-1][0] - again_ns >= 41 * MS
        assert [changes for _, changes in lamp.told] == [{1: None}, {1: None}, {1: 17}]
    finally:
        mover.close()


class Ear:
    """A line on which nobody listens."""

    byte_ns = 0

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_pulsed_shutter_flaps_the_light(lamp: Lamp, mover: Mover):
    model = SwitchModel(EmulatedSwitch(name="agg0", ports=4, faces=()), Random(0))
    model.boot(0, {1: 5, 2: 6})

    async def pulse() -> None:
        unit = Unit(model, mover, Fates(Faults()), die=lambda: None)
        unit.connect(Tl1Session(model), Ear()).feed(
            b"ENT-PORT-FLAP::1:1::30,20,3;OPR-PORT-FLAP::1:2:;"
        )
        for _ in range(3):
            assert await asyncio.to_thread(lamp.lit.wait, LIMIT_S)
            lamp.lit.clear()

    asyncio.run(pulse())
    assert [changes for _, changes in lamp.told] == [{1: None}, {1: 5}] * 3
    at_ms = [(at_ns - lamp.told[0][0]) / MS for at_ns, _ in lamp.told]
    assert at_ms == pytest.approx([0, 30, 50, 80, 100, 130], abs=10)
