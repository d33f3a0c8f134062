"""Switches are given back on every way out, and the exit code tells the worst that happened."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drivers.base import EMPTY, Applied, Delta, Identity, Matching
from drivers.errors import LinkLost
from harness.cli import failures
from harness.clock import RealClock
from harness.entry import close_run, outcome_first
from harness.errors import (
    AgentLost,
    ExitCode,
    HarnessError,
    InfrastructureError,
    RestoreFailed,
    StepFailed,
)
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Node, Switch, Tor
from harness.model.scenario import Collectives, Scenario
from harness.record.journal import Journal
from harness.record.store import RunFolder
from harness.record.summary import read_run
from harness.run import custody, orchestrator
from harness.run.session import Session

SMALL = Path(__file__).parents[1] / "data/small-run"
SPEC = Switch(driver="polatis-scpi", url="tcp://10.0.0.5:5025", ports="1-8,9-16")
BENCH = Bench(
    name="rack", world="live", nodes={"n0": Node(tor="t0")}, tors={"t0": Tor()},
    switches={"agg0": SPEC},
)  # fmt: skip
SCENARIO = Scenario(question="?", steps=(Collectives(),))


@dataclass
class Unit:
    """A switch whose `apply` waits until `may_apply`."""

    name: str = "agg0"
    spec: Switch = SPEC
    typical_switch_ns: int = 0
    map: Matching = EMPTY
    may_apply: asyncio.Event = field(default_factory=asyncio.Event)
    applying: asyncio.Event = field(default_factory=asyncio.Event)

    async def identify(self) -> Identity:
        return Identity("v", "m", "s", "f", range(1, 9), range(9, 17))

    async def read(self) -> Matching:
        return self.map

    async def apply(self, wanted: Matching) -> Applied:
        self.applying.set()
        await self.may_apply.wait()
        before, self.map = self.map, wanted
        return Applied(before, wanted, Delta.between(before, wanted), 0, 0, 0)


class Rack:
    """A bench of one switch, no agents."""

    topology = topology_of(BENCH)
    clock = RealClock()
    hellos: Mapping[str, Any] = {}
    clocks: Mapping[str, Any] = {}

    def __init__(self, unit: Unit) -> None:
        self.switches = {unit.name: unit}
        self.tors: Mapping[str, Any] = {}

    async def steer(self, wanted: object) -> None:
        pass

    async def news(self) -> tuple[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError


class Events(list[tuple[str, Mapping[str, object]]]):
    """A record in a list."""

    def event(self, stream: str, data: Mapping[str, object]) -> None:
        self.append((stream, data))


def steps(monkeypatch: pytest.MonkeyPatch, perform: Any) -> None:
    monkeypatch.setattr(orchestrator, "perform", perform)


async def execute(unit: Unit, folder: Path, events: Events) -> None:
    await orchestrator.execute(Rack(unit), SCENARIO, {}, events, folder)  # type: ignore[arg-type]


async def changes_the_map(session: Session, _step: object, _number: int) -> None:
    session.bench.switches["agg0"].map = Matching.of([(1, 9)])  # type: ignore[attr-defined]


def test_an_interrupt_while_switches_are_given_back_waits_until_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, changes_the_map)

    async def main() -> None:
        unit, events = Unit(), Events()
        run = asyncio.create_task(execute(unit, tmp_path, events))
        await unit.applying.wait()
        run.cancel()
        asyncio.get_running_loop().call_soon(unit.may_apply.set)  # after the cancellation
        with pytest.raises(asyncio.CancelledError):
            await run
        assert unit.map == EMPTY
        assert custody.read_all(tmp_path)["agg0"].restored
        assert [data["outcome"] for stream, data in events if stream == "restore"] == ["restored"]

    asyncio.run(main())


def test_a_timeout_of_something_else_is_not_told_as_the_scenarios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def perform(*_: object) -> None:
        raise TimeoutError("the other thing")

    async def main() -> None:
        steps(monkeypatch, perform)
        unit = Unit()
        unit.may_apply.set()
        with pytest.raises(TimeoutError, match="the other thing"):
            await execute(unit, tmp_path, Events())

    asyncio.run(main())


def test_a_bug_in_one_driver_leaves_no_switch_untried_and_needs_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Unit):
        async def apply(self, wanted: Matching) -> Applied:
            raise KeyError("a bug")

    steps(monkeypatch, changes_the_map)
    with pytest.raises(RestoreFailed, match=r"agg0: KeyError: 'a bug'"):
        asyncio.run(execute(Broken(), tmp_path, Events()))


def test_a_note_that_cannot_be_recorded_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talking(Rack):
        async def news(self) -> tuple[str, Any]:
            raise InfrastructureError("journal: cannot be written")

    steps(monkeypatch, changes_the_map)

    async def main() -> None:
        unit = Unit()
        unit.may_apply.set()
        bench: Any = Talking(unit)
        with pytest.raises(InfrastructureError, match="cannot be written"):
            await orchestrator.execute(bench, SCENARIO, {}, Events(), tmp_path)
        assert unit.map == EMPTY

    asyncio.run(main())


def test_a_switch_that_needs_a_person_outranks_a_journal_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Events):
        def event(self, stream: str, data: Mapping[str, object]) -> None:
            if stream == "restore":
                raise InfrastructureError("journal: cannot be written")

    class Broken(Unit):
        async def apply(self, wanted: Matching) -> Applied:
            raise LinkLost("the device closed the line")

    steps(monkeypatch, changes_the_map)
    with pytest.raises(RestoreFailed, match=r"agg0: the device closed.*cannot be written"):
        asyncio.run(execute(Broken(), tmp_path, Full()))
    unit = Unit()
    unit.may_apply.set()
    with pytest.raises(InfrastructureError, match="cannot be written"):
        asyncio.run(execute(unit, tmp_path, Full()))
    assert unit.map == EMPTY


# -- what the run ends with ------------------------------------------------------------------


@asynccontextmanager
async def closing_badly() -> AsyncIterator[None]:
    try:
        yield
    finally:
        raise AgentLost("n0 did not answer shutdown")


async def leave(error: BaseException | None, told: list[str]) -> None:
    async with outcome_first(closing_badly(), lambda text, _level: told.append(text)):
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [RestoreFailed("agg0"), asyncio.CancelledError()])
def test_what_ended_the_run_is_its_outcome_and_a_bad_closing_is_told(
    error: BaseException,
) -> None:
    told: list[str] = []
    with pytest.raises(type(error)):
        asyncio.run(leave(error, told))
    assert told == ["while the bench was closed: n0 did not answer shutdown"]


def test_a_step_that_failed_because_an_agent_was_gone_is_the_benchs_fault() -> None:
    told: list[str] = []
    with pytest.raises(InfrastructureError, match=r"n0 did not answer shutdown; n1: broken pipe"):
        asyncio.run(leave(StepFailed("n1: broken pipe"), told))


def test_a_bad_closing_alone_is_the_outcome() -> None:
    told: list[str] = []
    with pytest.raises(HarnessError, match="did not answer shutdown"):
        asyncio.run(leave(None, told))
    assert told == []


@pytest.mark.parametrize(
    ("ended", "code"),
    [(None, 3), (RestoreFailed("agg0: 1->9"), 5), (InfrastructureError("n0"), 3)],
)
def test_a_run_that_cannot_be_recorded_to_its_end_says_so_and_what_ended_it(
    ended: HarnessError | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(SMALL / "journal.jsonl", tmp_path)
    with Path("/dev/full").open("wb") as full:
        journal = Journal(full, RealClock())
        with pytest.raises((HarnessError, ExceptionGroup)) as caught:
            close_run(journal, RunFolder(tmp_path), ended)
        journal.close()
    assert failures.tell(caught.value) == code
    said = capsys.readouterr().err
    assert "cannot be written: No space" in said
    assert str(ended or "") in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "logs/n0.log"), 3),
        (OSError(errno.EBADF, "Bad file descriptor"), 70),
    ],
)
def test_what_the_machine_lacks_ends_a_run_with_3_and_a_bug_is_raised(
    ended: OSError, code: int, tmp_path: Path
) -> None:
    lines = (SMALL / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines[:-1]))
    folder = RunFolder(tmp_path)
    with Journal.reopen(folder.journal, RealClock()) as journal:
        if code == ExitCode.BUG:
            with pytest.raises(OSError, match="Bad file"):
                close_run(journal, folder, ended)
        else:
            close_run(journal, folder, ended)
    assert read_run(folder).exit_code == code
    assert str(ended) in read_run(folder).reason
