"""One thread a switch: prepared once, patient only where it is put back, closed without a hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from drivers.base import EMPTY, Capabilities, Circuit, Delta, Identity, Matching
from drivers.errors import DeadlineExpired, DeviceFault, Indeterminate, Refused, Unreachable
from harness.bench import switches
from harness.bench.switches import ThreadedSwitch
from harness.model.bench import Switch

OURS = frozenset({1, 2, 9, 10})
SPEC = Switch(driver="polatis-scpi", url="tcp://10.0.0.5:5025", ports="1-2,9-10")
BRIEF = Switch(driver=SPEC.driver, url=SPEC.url, ports=SPEC.ports, apply_timeout_s=0.1)
PAIR = Matching.of([(1, 9)])


class Unit:
    """A driver with a map; `gate` is waited for where it is shut, `faults` come before it reads."""

    name = "agg0"
    waited_ns = 0
    capabilities = Capabilities(
        has_power=False, has_shutters=False, hitless_add=True, steals_busy_ports=False,
        batch_max=8, typical_switch_ns=1,
    )  # fmt: skip

    def __init__(self) -> None:
        self.map, self.reads, self.closed = EMPTY, 0, threading.Event()
        self.faults: list[DeviceFault] = []
        self.refuses = False
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()

    def identify(self) -> Identity:
        return Identity("v", "m", "s", "f", range(1, 9), range(9, 17))

    def read(self) -> Matching:
        self.reading.set()
        self.gate.wait()
        self.reads += 1
        if self.faults:
            raise self.faults.pop()
        return self.map

    def connect(self, circuits: Sequence[Circuit]) -> None:
        if self.refuses:
            raise Refused("IIAC", "port in use")
        self.map = Matching(self.map.circuits | set(circuits))

    def disconnect(self, circuits: Sequence[Circuit]) -> None:
        self.map = Matching(self.map.circuits - set(circuits))

    @staticmethod
    def preview(delta: Delta) -> list[str]:
        return [str(delta)]

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> Unit:
    made = Unit()
    monkeypatch.setattr(switches, "open_ocs", lambda *_, **__: made)
    return made


def handle(spec: Switch = SPEC) -> ThreadedSwitch:
    return ThreadedSwitch("agg0", spec, OURS, None)


def test_a_prepared_change_saves_reading_the_map_once(unit: Unit) -> None:
    async def main() -> None:
        switch = handle()
        await switch.open()
        await switch.prepare(PAIR)
        before = unit.reads
        await switch.switch(PAIR)
        assert unit.reads == before + 1  # the read-back
        await switch.switch(EMPTY)
        assert unit.reads == before + 3
        assert unit.map == EMPTY
        await switch.close()

    asyncio.run(main())


def test_what_was_prepared_for_another_map_is_not_used(unit: Unit) -> None:
    async def main() -> None:
        switch = handle()
        await switch.open()
        await switch.prepare(PAIR)
        await switch.switch(Matching.of([(2, 10)]))
        await switch.switch(PAIR)
        assert unit.map == PAIR
        await switch.close()

    asyncio.run(main())


def test_apply_reads_the_map_even_when_a_change_to_it_was_prepared(unit: Unit) -> None:
    """A run that is cut off after preparing must not call a switch restored that it never read."""

    async def main() -> None:
        switch = handle()
        await switch.open()
        await switch.prepare(EMPTY)
        unit.map = PAIR  # somebody else, since
        await switch.apply(EMPTY)
        assert unit.map == EMPTY
        await switch.close()

    asyncio.run(main())


def test_a_line_that_opens_after_its_run_was_cancelled_is_closed(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, may_open = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> Unit:
        opening.set()
        may_open.wait()
        return unit

    monkeypatch.setattr(switches, "open_ocs", slow)

    async def main() -> None:
        switch = handle()
        task = asyncio.create_task(switch.open())
        await asyncio.to_thread(opening.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        asyncio.get_running_loop().call_soon(may_open.set)
        await switch.close()
        assert unit.closed.is_set()

    asyncio.run(main())


def test_closing_does_not_wait_for_ever_for_a_call_that_hangs(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "CLOSE_S", 0.0)

    async def main() -> None:
        switch = handle(BRIEF)
        await switch.open()
        unit.gate.clear()
        with pytest.raises(DeadlineExpired, match=r"agg0: not read within 0\.1 s"):
            await switch.read()
        with pytest.raises(TimeoutError):
            await switch.close()

    asyncio.run(main())
    assert all(thread.daemon for thread in threading.enumerate() if "switch-" in thread.name)
    unit.gate.set()


# -- a unit that loses power ---------------------------------------------------------------------


def test_what_puts_a_unit_back_asks_again_until_it_is_there(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "AGAIN_S", 0.0)

    async def main() -> None:
        switch = handle()
        await switch.open()
        unit.faults = [Unreachable("refused")] * 5
        applied = await switch.apply(PAIR)
        assert unit.map == applied.after == PAIR
        assert unit.reads == 7  # five in vain, before the change, and after it
        await switch.close()

    asyncio.run(main())


def test_a_unit_that_stays_away_is_given_up_with_its_last_fault(unit: Unit) -> None:
    async def main() -> None:
        switch = handle(BRIEF)
        await switch.open()
        unit.faults = [Unreachable("connection refused")] * 1000
        with pytest.raises(Unreachable, match="connection refused"):
            await switch.apply(PAIR)
        await switch.close()

    asyncio.run(main())


def test_what_a_unit_refuses_is_not_asked_of_it_again(unit: Unit) -> None:
    async def main() -> None:
        switch = handle()
        await switch.open()
        unit.refuses = True
        with pytest.raises(Refused, match="port in use"):
            await switch.apply(PAIR)
        assert unit.reads == 3  # before the change, and around the attempt to undo it
        await switch.close()

    asyncio.run(main())


def test_a_change_does_not_wait_for_a_unit_that_answers_nobody(unit: Unit) -> None:
    async def main() -> None:
        switch = handle(BRIEF)
        await switch.open()
        unit.faults = [Unreachable("refused")]
        with pytest.raises(Unreachable):
            await switch.switch(PAIR)
        assert unit.reads == 1
        unit.gate.clear()
        with pytest.raises(Indeterminate, match=r"agg0: not changed within 0\.1 s"):
            await switch.switch(PAIR)
        unit.gate.set()
        await switch.close()
        assert unit.map == EMPTY, "it came to itself too late to begin"

    asyncio.run(main())


def test_a_change_that_waits_behind_another_is_not_made_once_it_was_given_up(unit: Unit) -> None:
    async def main() -> None:
        switch = handle(BRIEF)
        await switch.open()
        unit.gate.clear()
        for fault, call in ((DeadlineExpired, switch.read()), (Indeterminate, switch.switch(PAIR))):
            with pytest.raises(fault):
                await call
        unit.gate.set()
        await switch.close()
        assert unit.map == EMPTY

    asyncio.run(main())
