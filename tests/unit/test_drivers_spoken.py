"""How many bytes pass a line, by what really passes between a driver and an emulated unit."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.address import parse
from drivers.base import Circuit, Delta, Matching
from drivers.emulators.config import EmulatedSwitch
from drivers.emulators.faces import Session
from drivers.emulators.faces.scpi import ScpiSession
from drivers.emulators.faces.tl1 import Tl1Session
from drivers.emulators.model import SwitchModel
from drivers.ocs.line import Access
from drivers.ocs.polatis import BATCH_MAX, PolatisScpi, PolatisTl1
from drivers.ocs.spoken import Driver, Exchange, Turn, byte_ns, changing, looking, reading

WALL = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PORTS = 200
DRIVERS = pytest.mark.parametrize("driver", [PolatisScpi, PolatisTl1])


class Wire:
    """A transport to an emulated unit in memory. `sent`: (out, back) of each sending, bytes."""

    name = "wire"

    def __init__(self, session: Session) -> None:
        self.sent: list[tuple[int, int]] = []
        self.commands = self.reports = 0
        self._session, self._heard = session, b""

    def send(self, data: bytes, deadline_ns: int) -> None:
        answers = b"".join(self._answer(line) for line in self._session.lines(data))
        self._heard += answers
        self.sent.append((len(data), len(answers)))

    def _answer(self, line: bytes) -> bytes:
        if not line.strip():
            return b""
        self.commands += 1
        answer = self._session.answer(line, 0, WALL)
        told = [self._session.report(change, WALL) for change in answer.changes]
        self.reports += sum(map(bool, told))
        return b"".join(told) + answer.reply

    def receive(self, deadline_ns: int) -> bytes:
        heard, self._heard = self._heard, b""
        assert heard
        return heard

    def close(self) -> None:
        """Nothing is held."""


def opened(driver: Driver, circuits: list[Circuit]) -> tuple[PolatisScpi | PolatisTl1, Wire]:
    """A driver over a serial line to a unit with these circuits."""
    config = EmulatedSwitch(name="agg0", ports=PORTS, faces=(), circuits=tuple(circuits))
    model = SwitchModel(config, Random(0))
    model.boot(0)
    wire = Wire(ScpiSession(model) if driver is PolatisScpi else Tl1Session(model))
    access = Access("agg0", parse("serial:///dev/x"), lambda _: wire, 10**9, 10**9)
    ocs = driver(access)
    wire.sent.clear()
    return ocs, wire


def passed(exchanges: list[Exchange]) -> list[tuple[int, int]]:
    return [
        (sum(turn.out for turn in one.turns), sum(turn.back for turn in one.turns))
        for one in exchanges
    ]


@st.composite
def matchings(draw: st.DrawFn) -> Matching:
    """Maps of which many are longer than one command takes, their egress shifted or shuffled."""
    ingress = sorted(draw(st.sets(st.integers(1, PORTS), max_size=PORTS)))
    if draw(st.booleans()):
        ingress = list(range(1, draw(st.integers(0, PORTS)) + 1))
    egress = [PORTS + a for a in ingress]
    Random(draw(st.integers(0, 99))).shuffle(egress)
    return Matching.of(zip(ingress, egress, strict=True))


@DRIVERS
@settings(max_examples=60, deadline=None)
@given(before=matchings(), after=matchings())
def test_as_many_bytes_pass_as_a_driver_and_a_unit_say(
    driver: Driver, before: Matching, after: Matching
) -> None:
    ocs, wire = opened(driver, list(before))
    tag = wire.commands + 1
    assert ocs.read() == before
    assert wire.sent == passed([reading(driver, "agg0", [*before], tag=tag)])
    if not (delta := Delta.between(before, after)):
        return
    wire.sent.clear()
    numbers = {"tag": wire.commands + 1, "reports": wire.reports + 1}
    assert ocs.rewire(delta.drop, delta.make).after == after
    exchanges = changing(driver, "agg0", delta.drop, delta.make, [*after], **numbers)
    assert wire.sent == passed(exchanges)
    turns = [turn for one in exchanges for turn in one.turns]
    assert tuple(circuit for turn in turns for circuit in turn.drop) == delta.drop
    assert tuple(circuit for turn in turns for circuit in turn.make) == delta.make


@DRIVERS
def test_as_many_bytes_pass_for_a_look_at_meters(driver: Driver) -> None:
    ocs, wire = opened(driver, [(1, PORTS + 1), (2, PORTS + 2)])
    ports = [PORTS + 1, PORTS + 3, 1, 2]
    tag = wire.commands + 1
    seen = ocs.power_dbm(ports)
    told: list[int] = []

    def shown_dbm(port: int, said: int) -> float:
        told.append(said)
        return seen[port]

    look = looking(driver, "agg0", ports, shown_dbm, tag=tag)
    assert wire.sent == passed([look])
    assert {*told} == {look.obeyed[-1]}


@pytest.mark.parametrize(
    ("url", "takes_ns"),
    [
        ("serial:///dev/ttyUSB0?baud=9600", 1_041_666),
        ("serial://?baud=115200", 86_805),
        ("serial://", 260_416),
        ("tcp://10.0.0.5:5025", 0),
        ("ssh://admin@", 0),
    ],
)
def test_a_byte_takes_ten_bits_where_a_line_has_a_speed(url: str, takes_ns: int) -> None:
    assert byte_ns(url) == takes_ns


def test_a_change_too_long_for_one_command_is_several_exchanges_of_scpi_and_one_of_tl1() -> None:
    many = [(a, PORTS + a) for a in range(1, BATCH_MAX + 2)]
    assert len(changing(PolatisScpi, "agg0", (), many, many)) == 2
    (together,) = changing(PolatisTl1, "agg0", (), many, many)
    assert len(together.turns) == 3
    assert len(changing(PolatisScpi, "agg0", many[:64], many[:64], many)) == 1


def test_a_command_is_obeyed_when_it_has_come_and_answers_wait_for_those_before() -> None:
    circuit = ((1, 2),)
    one = Exchange((Turn(10, 100, drop=circuit), Turn(30, 5, make=circuit), Turn(20, 50)))
    assert one.obeyed == (10, 40, 60)
    assert one.answered == (110, 115, 165)
    assert (one.commanded, one.acknowledged) == (40, 115)
    slow = Exchange((Turn(10, 1), Turn(30, 5)))  # the line is still busy the other way
    assert slow.answered == (11, 45)
