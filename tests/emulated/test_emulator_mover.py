"""Light moves when it must: dark at once, lit after the drawn time, never by a plan overtaken."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping

import pytest

from drivers.emulators.model import Change, Lighting
from drivers.emulators.mover import Mover

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
