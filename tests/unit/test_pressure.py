"""An emulated run says how far its times are the machine's own: read, counted, and told."""

from __future__ import annotations

import errno
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from generation_bench import Events
from rl_bench import RlBench, replay, rl_session

from harness.bench.pressure import some_us, waited_us
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import StepFailed
from harness.model.documents import Event, Metric
from harness.model.metrics import metric_problem
from harness.model.scenario import Collectives, Rl, Scenario
from harness.model.streams import STREAMS
from harness.record.pressure import SHORT_PCT, cpu_waited, short_of_cpu
from harness.record.samples import metrics_of
from harness.run import steps
from harness.run.pressure import Pressure
from harness.run.session import Session
from harness.virtual import VirtualClock, run_virtually

KERNEL = """\
some avg10=0.81 avg60=0.58 avg300=11.76 total=217930332
full avg10=0.00 avg60=0.00 avg300=0.00 total=7
"""
STEP = Collectives()


# -- what the kernel tells -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "total_us"),
    [
        (KERNEL, 217_930_332),
        (KERNEL.splitlines()[0] + "\n", 217_930_332),  # older kernels tell no `full` of CPUs
        (KERNEL.splitlines()[1], None),
        ("some avg10=0.81", None),
        ("", None),
    ],
)
def test_the_total_is_that_of_tasks_of_which_some_waited(text: str, total_us: int | None) -> None:
    assert some_us(text) == total_us


def test_a_kernel_that_does_not_tell_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waited_us(tmp_path / "cpu") is None
    (tmp_path / "cpu").write_text(KERNEL)
    assert waited_us(tmp_path / "cpu") == 217_930_332

    def switched_off(_: Path) -> str:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "read_text", switched_off)
    assert waited_us(tmp_path / "cpu") is None


# -- what a run tells ----------------------------------------------------------------------------


class Machine:
    """A bench and its kernel: of the time that goes by, a share in which some task waits."""

    clock = VirtualClock()

    def __init__(self) -> None:
        self.share, self._since_ns, self._us = 0.0, 0, 0.0

    def waits(self, share: float) -> None:
        """From now on."""
        self._us, self._since_ns, self.share = self.waited_us(), self.clock.now_ns(), share

    def waited_us(self) -> int:
        return round(self._us + self.share * (self.clock.now_ns() - self._since_ns) / 1e3)


def session_on(machine: Machine, pressure: Pressure | None = None) -> Session:
    bench: Any = machine
    return Session(
        bench=bench,
        scenario=Scenario(question="?", steps=(STEP,)),
        record=Events(),
        plans={},
        pressure=pressure or Pressure(machine.waited_us),
    )


def told(session: Session, body: Coroutine[Any, Any, None]) -> list[dict[str, Any]]:
    """Run `body` as a step of a session, in virtual time; return what was told of pressure."""
    record: Any = session.record
    run_virtually(body)
    return [dict(row) for row in record.of("pressure")]


def test_the_share_is_of_the_time_since_what_a_step_starts_was_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    session = session_on(machine)

    async def starts_ranks_then_measures(*_: object) -> None:
        machine.waits(1.0)
        await machine.clock.sleep_ns(5 * NS_PER_S)
        session.all_up()
        machine.waits(0.5)
        await machine.clock.sleep_ns(NS_PER_S)
        machine.waits(0.1)
        await machine.clock.sleep_ns(3 * NS_PER_S)

    monkeypatch.setitem(steps.PERFORM, Collectives, starts_ranks_then_measures)
    (row,) = told(session, steps.perform(session, STEP, 3))
    assert row.keys() == STREAMS["pressure"].keys()
    assert row["cpu_waited_pct"] == pytest.approx(20.0)
    assert (row["step"], row["policy"], row["duration_s"]) == (3, "", 4.0)


def test_a_step_that_fails_is_told_too_for_this_may_be_why(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    session = session_on(machine)

    async def fails(*_: object) -> None:
        machine.waits(1.2)  # two clocks, read one after the other
        await machine.clock.sleep_ns(NS_PER_MS)
        raise StepFailed("a rank timed out")

    async def main() -> None:
        with pytest.raises(StepFailed, match="a rank timed out"):
            await steps.perform(session, STEP, 0)

    monkeypatch.setitem(steps.PERFORM, Collectives, fails)
    (row,) = told(session, main())
    assert row["cpu_waited_pct"] == 100.0


def test_nothing_is_told_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    async def waits(*_: object) -> None:
        await machine.clock.sleep_ns(NS_PER_S)

    async def at_once(*_: object) -> None:
        pass

    monkeypatch.setitem(steps.PERFORM, Collectives, waits)
    simulated = session_on(machine, Pressure())
    assert told(simulated, steps.perform(simulated, STEP, 0)) == []
    monkeypatch.setitem(steps.PERFORM, Collectives, at_once)
    instant = session_on(machine)
    assert told(instant, steps.perform(instant, STEP, 0)) == []


def test_a_loop_tells_it_of_each_arm_and_from_where_its_own_times_begin(tmp_path: Path) -> None:
    machine = Machine()
    machine.waits(0.4)
    step = Rl(steps=2, policies=("static:4xTP1", "reactive"))

    async def main() -> Events:
        session = rl_session(RlBench(), tmp_path, step, replay())
        session.pressure = Pressure(machine.waited_us)
        async with session.closing:
            await steps.perform(session, step, 0)
        record: Any = session.record
        return record  # type: ignore[no-any-return]

    events = run_virtually(main())
    rows = events.of("pressure")
    assert [row["policy"] for row in rows] == ["static:4xTP1", "reactive"]
    for row, loop in zip(rows, events.of("rl"), strict=True):
        assert row["cpu_waited_pct"] == pytest.approx(40.0, abs=0.01)
        assert loop["took_s"] <= row["duration_s"] < loop["took_s"] + 1


# -- what a reader sees --------------------------------------------------------------------------


def metrics(*rows: tuple[int, str, float], steps_of_a_repeat: int = 20) -> dict[str, Metric]:
    """Return the metrics of a journal with these (step's number, policy, share in %)."""
    numbers = sorted({number for number, _, _ in rows} | {0, steps_of_a_repeat})
    streams: list[tuple[str, dict[str, Any]]] = [
        ("step", {"index": number, "repeat": number // steps_of_a_repeat}) for number in numbers
    ]
    streams += [
        ("pressure", {"step": step, "policy": policy, "duration_s": 1.0, "cpu_waited_pct": share})
        for step, policy, share in rows
    ]
    return metrics_of(
        Event(stream=stream, seq=i, t_ns=i, data=data)
        for i, (stream, data) in enumerate(streams, 1)
    )


def test_repeats_of_a_step_are_pooled_and_arms_are_not() -> None:
    found = metrics((0, "", 10), (1, "reactive", 30), (2, "", 20), (3, "a@ideal", 5),
                    steps_of_a_repeat=2)  # fmt: skip
    assert {name: metric.value for name, metric in found.items()} == {
        "bench.cpu_waited_pct[step=0]": 15,
        "bench.cpu_waited_pct[step=1,policy=reactive]": 30,
        "bench.cpu_waited_pct[step=1,policy=a@ideal]": 5,
    }
    assert all(metric_problem(name) is None for name in found)


def test_one_warning_names_the_steps_whose_times_may_be_the_machines_the_worst_first() -> None:
    found = metrics((2, "", 61.4), (10, "", SHORT_PCT), (4, "reactive", 99.6))
    (warning,) = short_of_cpu(found)
    assert warning.startswith("a task waited for a CPU in 100 % of step 4 (reactive), 61 % of step")
    assert "[links] link_mbit_per_s" in warning
    assert "step 10" not in warning
    (line,) = cpu_waited(found)
    assert line.endswith("CPU: step 2 61 %, step 4 (reactive) 100 %, step 10 25 %")


def test_where_cores_were_not_short_nothing_is_warned_of() -> None:
    assert short_of_cpu(metrics((0, "", SHORT_PCT))) == []
    assert short_of_cpu({}) == cpu_waited({}) == []


def test_of_many_arms_some_are_named() -> None:
    many = metrics(*((0, f"arm{i}", 30.0 + i) for i in range(30)))
    (warning,) = short_of_cpu(many)
    assert "(arm29)" in warning
    assert "and 26 more: times there" in warning
