"""Switches in virtual time: they do what emulated ones do, in the time that their figures say."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
from msgspec import structs
from simulated_fabric import (
    CHANGE_MS,
    CONTROL,
    LIGHT_MS,
    READ_MS,
    SWITCH_MS,
    Small,
    bench,
    broken,
    play,
)

from drivers.base import EMPTY, Delta, Matching
from drivers.emulators.config import Faults
from drivers.errors import (
    BadMatching,
    DeadlineExpired,
    DriverError,
    Indeterminate,
    LinkLost,
    Refused,
    Unreachable,
)
from harness.bench.base import Switched
from harness.bench.behaviour import behaviour_of
from harness.bench.simulated.line import Line
from harness.bench.simulated.units import Unit
from harness.clock import NS_PER_MS
from harness.model.bench import Bench, Links, Switch
from harness.model.simulation import Figure

A = Matching.of([(1, 9), (2, 10)])
B = Matching.of([(1, 10), (2, 9)])
C = Matching.of([(1, 9), (2, 11)])
METER_MS = 0.1
"""Until a meter of the shortest window shows light."""


def alone(**faults: Any) -> Bench:
    """A bench with a unit of these faults."""
    return bench(emulate={"agg0": broken(**faults)})


def unit_of(small: Small) -> Unit:
    return small.units["agg0"]


async def fate(call: Coroutine[Any, Any, Any]) -> Any:
    """What a call comes to: its result, or its error."""
    try:
        return await call
    except DriverError as error:
        return error


def ms_of(stamp_ns: int | None) -> float:
    assert stamp_ns is not None
    return stamp_ns / NS_PER_MS


# -- what it takes ---------------------------------------------------------------------------------


def test_a_change_is_dark_at_once_and_lit_when_the_mirrors_have_moved() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        done = await unit.switch(A)
        sent_ms = READ_MS
        assert ms_of(done.applied.sent_ns) == sent_ms
        assert ms_of(done.applied.acknowledged_ns) == sent_ms + CHANGE_MS
        assert ms_of(done.applied.done_ns) == sent_ms + CHANGE_MS
        assert done.applied.delta == Delta.between(EMPTY, A)
        assert done.dark is None
        told_ms = sent_ms + CHANGE_MS / 2 + SWITCH_MS + METER_MS + LIGHT_MS
        assert ms_of(done.light_ns) == small.now_ms() == pytest.approx(told_ms)
        assert ms_of(done.device_ns) == pytest.approx(told_ms)
        assert await unit.read() == A
        assert unit.mirrors.lit == {1: 9, 2: 10}
        # what stays is never dark; what moves is, from when the command is obeyed
        async with asyncio.timeout(60):
            switching = asyncio.create_task(unit.switch(C))
            begun_ms = small.now_ms()
            await small.sleep_ms(READ_MS + CHANGE_MS / 2 + 0.01)
            assert unit.mirrors.lit == {1: 9}
            await small.sleep_ms(SWITCH_MS)
            assert unit.mirrors.lit == {1: 9, 2: 11}
            took_ms = READ_MS + CHANGE_MS / 2 + SWITCH_MS + 0.01
            assert small.now_ms() - begun_ms == pytest.approx(took_ms)
            assert (await switching).applied.delta.keep == ((1, 9),)

    play(body)


def test_units_of_one_machine_change_in_turn_and_only_those_that_do_count() -> None:
    async def body(small: Small) -> None:
        units = [*small.units.values()]
        await asyncio.gather(*(unit.prepare(A) for unit in units))
        assert small.now_ms() == pytest.approx(READ_MS)
        done = await asyncio.gather(*(unit.switch(A) for unit in units))
        for each in done:
            took_ns = each.applied.acknowledged_ns - each.applied.sent_ns
            assert ms_of(took_ns) == pytest.approx(len(units) * CHANGE_MS)
            others_ms = (len(units) - 1) * CHANGE_MS
            assert each.light_ns is not None
            whole_ns = each.light_ns - each.applied.sent_ns
            assert ms_of(whole_ns - each.device_ns) == pytest.approx(others_ms / 2)
        first, *others = units
        await first.prepare(B)
        await asyncio.gather(*(unit.prepare(A) for unit in others))
        alone, *_ = await asyncio.gather(first.switch(B), *(unit.switch(A) for unit in others))
        took_ns = alone.applied.acknowledged_ns - alone.applied.sent_ns
        assert ms_of(took_ns) == pytest.approx(CHANGE_MS)

    play(body, one_machine=True)


def test_a_change_is_handed_over_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    handing = structs.replace(CONTROL, hand_ms=Figure(value=0.3))
    monkeypatch.setattr("simulated_fabric.CONTROL", handing)

    async def body(small: Small) -> None:
        units = [*small.units.values()]
        await asyncio.gather(*(unit.prepare(A) for unit in units))
        begin_ms = small.now_ms()
        for each in await asyncio.gather(*(unit.switch(A) for unit in units)):
            handed_ms = ms_of(each.applied.sent_ns) - begin_ms
            assert handed_ms == pytest.approx(len(units) * 0.3)

    play(body, one_machine=True)


def line_of(url: str, driver: str = "polatis-scpi", **figures: float) -> Line:
    """A line to a unit that moves its mirrors within 25 ms."""
    spec = Switch(driver=driver, url=url, ports="1-8,17-24", power_averaging=1)
    control = structs.replace(CONTROL, **{name: Figure(value=ms) for name, ms in figures.items()})
    return Line(spec, behaviour_of("agg0", spec, Links()), control, Random(1))


def test_a_change_and_a_read_take_longer_behind_ssh() -> None:
    line = line_of("ssh://admin@", ssh_ms=4.0)
    line.read()
    assert ms_of(line.now_ns) == READ_MS + 4
    receipt = line.rewire((), [(1, 17)])
    assert ms_of(receipt.acknowledged_ns - receipt.sent_ns) == CHANGE_MS + 4


def shows_light(line: Line, port: int, at_ms: float) -> bool:
    return line.model.power_dbm(port, round(at_ms * NS_PER_MS)) > -25


BYTE_MS = 10 / 38.4
"""At 38400 baud."""


def bytes_ms(*said: str) -> float:
    return sum(map(len, said)) * BYTE_MS


def test_bytes_take_a_serial_line_time_and_a_unit_obeys_before_it_answers() -> None:
    line = line_of("serial://?baud=38400", serial_ms=0.5)
    read, empty, lit = ":OXC:SWIT:CONN:STAT?\r\n", "(@),(@)\r\n", "(@1),(@17)\r\n"
    line.read()
    assert ms_of(line.now_ns) == pytest.approx(READ_MS + 0.5 + bytes_ms(read, empty), abs=1e-3)
    command = ":OXC:SWIT:CONN:ADD (@1),(@17);STAT?\r\n"
    receipt = line.rewire((), [(1, 17)])
    lit_ms = ms_of(receipt.sent_ns) + bytes_ms(command) + SWITCH_MS  # before it has answered all
    assert not shows_light(line, 17, lit_ms - METER_MS)
    assert shows_light(line, 17, lit_ms + METER_MS)
    took_ms = CHANGE_MS + 0.5 + bytes_ms(command, lit)
    assert ms_of(receipt.acknowledged_ns - receipt.sent_ns) == pytest.approx(took_ms, abs=1e-3)
    begun_ms = ms_of(line.now_ns)
    line.read()
    assert ms_of(line.now_ns) - begun_ms == pytest.approx(
        READ_MS + 0.5 + bytes_ms(read, lit), abs=1e-3
    )


def test_a_serial_line_of_half_the_speed_takes_twice_as_long_for_its_bytes() -> None:
    slow, fast = line_of("serial://?baud=19200"), line_of("serial://")
    for line in (slow, fast):
        line.rewire((), [(1, 17), (2, 18)])
    fast_ms, slow_ms = (ms_of(line.now_ns) - CHANGE_MS for line in (fast, slow))
    assert slow_ms == pytest.approx(2 * fast_ms, abs=1e-3)


def test_each_command_of_tl1_is_obeyed_when_it_has_come_and_the_map_follows() -> None:
    line = line_of("serial://", "polatis-tl1")
    receipt = line.rewire((), [(1, 17)])
    assert receipt.acknowledged_ns < line.now_ns
    receipt = line.rewire([(1, 17)], [(1, 18)])
    commands = "DLT-PATCH::1:100:;\n", "ENT-PATCH::1,18:101:;\n"
    lit_ms = ms_of(receipt.sent_ns) + bytes_ms(*commands) + SWITCH_MS
    assert not shows_light(line, 18, lit_ms - METER_MS)
    assert shows_light(line, 18, lit_ms + METER_MS)
    assert line.model.circuits() == [(1, 18)]


def test_a_look_at_meters_takes_a_serial_line_its_bytes_too() -> None:
    line = line_of("serial://")
    line.rewire((), [(1, 17)])
    begun_ms = ms_of(line.now_ns)
    assert line.power_dbm([17])[17] == -60.0
    took_ms = LIGHT_MS + bytes_ms(":PMON:POW? (@17)\r\n", "(-60.00)\r\n")
    assert ms_of(line.now_ns) - begun_ms == pytest.approx(took_ms, abs=1e-3)
    assert line.told_ns == 0


def test_nothing_to_change_takes_a_look_at_the_map() -> None:
    async def body(small: Small) -> None:
        await unit_of(small).switch(A)
        begun_ms = small.now_ms()
        done = await unit_of(small).switch(A)
        assert not done.applied.delta
        assert done.light_ns is None
        assert small.now_ms() - begun_ms == pytest.approx(READ_MS)

    play(body)


def test_a_prepared_change_saves_reading_the_map() -> None:
    async def body(small: Small) -> None:
        await unit_of(small).prepare(A)
        assert small.now_ms() == READ_MS
        done = await unit_of(small).switch(A)
        assert ms_of(done.applied.sent_ns) == READ_MS
        done = await unit_of(small).switch(B)  # that was not prepared
        assert done.applied.before == A

    play(body)


def test_a_meter_that_averages_is_believed_one_window_after_the_light_that_was() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        first = await unit.switch(A)
        assert ms_of(first.light_ns) - READ_MS - SWITCH_MS - LIGHT_MS < 1  # it climbs at once
        second = await unit.switch(B)
        since_ms = ms_of(second.light_ns) - ms_of(second.applied.acknowledged_ns)
        assert since_ms == pytest.approx(80 + LIGHT_MS)

    play(body, bench(power_averaging=4))


def test_two_calls_to_one_unit_never_overlap_and_two_units_switch_at_once() -> None:
    async def body(small: Small) -> None:
        await asyncio.gather(*(unit.read() for unit in small.units.values()))
        assert small.now_ms() == READ_MS
        await asyncio.gather(*(unit_of(small).read() for _ in range(3)))
        assert small.now_ms() == pytest.approx(4 * READ_MS)

    play(body)


def test_a_port_is_held_down_after_its_light_though_the_unit_sees_it() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        done = await unit.switch(A)
        assert ms_of(done.light_ns) < 30
        assert not unit.mirrors.lit
        await small.sleep_ms(100)
        assert unit.mirrors.lit == {1: 9, 2: 10}

    play(body, bench(links=Links(nic_hold_ms=100.0)))


def test_times_are_drawn_by_the_seed_and_the_name() -> None:
    async def body(small: Small) -> tuple[int | None, ...]:
        done = await asyncio.gather(*(unit.switch(A) for unit in small.units.values()))
        return tuple(each.light_ns for each in done)

    drawn = broken(switch_sd_ms=3.0)
    made = bench(emulate={"agg0": drawn, "agg1": drawn})
    first = play(body, made, seed=1)
    assert first == play(body, made, seed=1) != play(body, made, seed=2)
    assert first[0] != first[1]


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_map_that_cannot_be_is_refused_before_anything_is_sent() -> None:
    async def body(small: Small) -> None:
        with pytest.raises(BadMatching, match="99 is no egress port"):
            await unit_of(small).apply(Matching.of([(1, 99)]))
        assert unit_of(small).map == EMPTY

    play(body)


def test_what_the_unit_refuses_leaves_the_map_as_it_was() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        await unit.switch(A)
        with pytest.raises(Refused, match=r"cannot connect 2,11 .*the previous map is restored"):
            await unit.switch(C)
        assert unit.map == await unit.read() == A

    play(body, alone(deny_ports=(11,)))


@pytest.mark.parametrize("fault", ["failed_ports", "stuck_ports"])
def test_a_port_that_passes_no_light_is_told_when_the_wait_is_over(fault: str) -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        done: Switched = await unit.switch(A)
        assert done.dark is not None
        assert done.dark.ports.keys() == {10}
        assert done.light_ns is None
        assert small.now_ms() == pytest.approx(READ_MS + CHANGE_MS + 2000 + LIGHT_MS)
        assert await unit.read() == A
        assert unit.mirrors.lit == {1: 9}

    play(body, alone(**{fault: (2,)}))


def test_cables_that_are_swapped_show_in_light_only() -> None:
    async def body(small: Small) -> None:
        done = await unit_of(small).switch(A)
        assert done.dark is None
        assert unit_of(small).mirrors.lit == {1: 10, 2: 9}

    play(body, alone(swapped_ports=((9, 10),)))


def test_a_unit_that_dies_leaves_its_light_as_it_is() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        await unit.switch(A)
        lost = await fate(unit.switch(C))
        assert isinstance(lost, Indeterminate)
        assert "nobody answers" in str(lost)
        assert isinstance(await fate(unit.read()), Unreachable)
        begun_ms = small.now_ms()
        assert isinstance(await fate(unit.apply(A)), Unreachable)
        assert small.now_ms() - begun_ms == pytest.approx(30_000)  # it might have been starting
        assert unit.mirrors.lit == {1: 9}  # what was to be lit never is

    play(body, alone(die_on_command=2))


def test_a_unit_that_loses_power_is_dark_and_gone_and_comes_back_empty() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        await unit.switch(A)
        assert isinstance(await fate(unit.switch(C)), Indeterminate)
        assert not unit.mirrors.lit
        assert isinstance(await fate(unit.read()), LinkLost)
        begun_ms = small.now_ms()
        await unit.apply(C)  # whoever puts it back waits for it
        assert 500 < small.now_ms() - begun_ms < 500 + 300
        assert await unit.read() == C

    play(body, alone(reboot_on_command=2, reboot_ms=500.0))


def test_a_change_whose_answer_is_lost_is_found_out_by_reading() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        done = await unit.switch(A)
        assert done.applied.after == A
        assert small.now_ms() > 5000  # the limit of an exchange
        assert unit.mirrors.lit == {1: 9, 2: 10}

    play(body, alone(lose_reply=1))


def test_a_line_that_is_cut_is_opened_again() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        done = await unit.switch(A)
        assert done.applied.after == A
        assert small.now_ms() < 100

    for nth in range(1, 6):
        play(body, alone(cut_reply=nth))


def test_a_unit_that_answers_too_late_is_given_up() -> None:
    async def body(small: Small) -> None:
        assert isinstance(await fate(unit_of(small).read()), DeadlineExpired)
        assert small.now_ms() == 5000  # the limit of an exchange

    play(body, alone(answer_ms=6000.0))


def test_what_was_begun_is_done_though_nobody_waits_for_it() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await unit.switch(A)
        assert await unit.read() == A  # after what goes on
        assert small.now_ms() > SWITCH_MS
        assert unit.mirrors.lit == {1: 9, 2: 10}

    play(body)


def test_what_breaks_while_it_works_is_dark_from_then_on() -> None:
    async def body(small: Small) -> None:
        unit = unit_of(small)
        await unit.switch(A)
        unit.break_down(Faults(failed_ports=(1,)))
        assert unit.mirrors.lit == {2: 10}
        unit.break_down(Faults())
        assert unit.mirrors.lit == {1: 9, 2: 10}

    play(body)
