"""Execute a scenario on a running bench: custody, steps, and restoration on every way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from harness.bench.base import Bench
from harness.errors import InfrastructureError, NothingRan, RestoreFailed
from harness.fabric.links import Plan
from harness.model.scenario import Scenario
from harness.run import custody
from harness.run.generation.asked import GenerationAsked
from harness.run.pressure import Pressure, untold
from harness.run.rl.asked import TrainingAsked
from harness.run.session import Record, Session
from harness.run.steps import perform
from harness.tasks import beside, to_the_end

Work = Callable[[Session], Awaitable[None]]

CHECKPOINT = "checkpoint"
"""In a run's folder: what its loops leave, for another run to go on from."""
RESTORE_SLACK_S = 20.0
"""Beyond the devices' own limits: reading back, opening a lost line anew."""


async def perform_all(session: Session) -> None:
    """Perform the scenario's steps, as often as it says, each begin and end recorded."""
    if not session.scenario.steps:
        raise NothingRan("the scenario has no steps")
    number = 0
    for repeat in range(session.scenario.repeats):
        for step in session.scenario.steps:
            row = {"index": number, "repeat": repeat, "do": type(step).__struct_config__.tag}
            session.record.event("step", row | {"phase": "begin", "ok": None, "error": ""})
            error = "interrupted"
            try:
                await perform(session, step, number)
                error = ""
            except Exception as failure:
                error = str(failure) or type(failure).__name__
                raise
            finally:
                ended = {"phase": "end", "ok": not error, "error": error}
                session.record.event("step", row | ended)
            number += 1
    await session.stop_ranks()


async def execute(
    bench: Bench,
    scenario: Scenario,
    plans: Mapping[str, Plan],
    record: Record,
    snapshots: Path | None,
    *,
    generation: GenerationAsked | None = None,
    training: TrainingAsked | None = None,
    keep: Path = Path(CHECKPOINT),
    resume: Path | None = None,
    waited_us: Callable[[], int | None] = untold,
    work: Work = perform_all,
) -> None:
    """Do the work of a run; the switches are restored whatever happens.

    `snapshots` is where what undoes it is kept: None on a bench that ends with this process. Loops
    leave their checkpoints in `keep`. `waited_us` tells how long some task of the bench has waited
    for a CPU.

    Raises the first error, or `RestoreFailed`, which outranks it, when a switch could not be put
    back as it was found.
    """
    async with _listening(bench, record):
        await _introduce(bench, record)
        async with _custody(bench, record, snapshots):
            session = Session(
                bench=bench,
                scenario=scenario,
                record=record,
                plans=plans,
                generation_asked=generation,
                training_asked=training,
                keep=keep,
                resume=resume,
                pressure=Pressure(waited_us),
            )
            await bench.steer(bench.topology.routes(frozenset()))
            limit = asyncio.timeout(scenario.timeout_s)
            try:
                async with session.closing, limit:
                    await work(session)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise InfrastructureError(
                    f"the scenario did not end within its timeout_s of {scenario.timeout_s:g} s"
                ) from error


async def _introduce(bench: Bench, record: Record) -> None:
    """Record who takes part: agents, their clocks, ToRs, switches."""
    for name, hello in bench.hellos.items():
        facts = {"agent": name, "host": hello.host, "pid": hello.pid, "facts": hello.facts}
        record.event("agent", facts)
    for name, fit in bench.clocks.items():
        record.event(
            "clock",
            {
                "agent": name,
                "offset_ns": fit.offset_ns,
                "bound_ns": fit.bound_ns,
                "drift_ppb": fit.drift_ppb,
                "delay_ns": fit.delay_ns,
                "samples": fit.samples,
            },
        )
    for name, tor in bench.tors.items():
        record.event("tor", {"tor": name, "driver": tor.spec.driver, "url": tor.spec.url})
    for name, switch in bench.switches.items():
        identity = await switch.identify()
        record.event(
            "switch",
            {
                "switch": name,
                "vendor": identity.vendor,
                "model": identity.model,
                "serial": identity.serial,
                "firmware": identity.firmware,
                "url": switch.spec.url,
            },
        )


@asynccontextmanager
async def _listening(bench: Bench, record: Record) -> AsyncIterator[None]:
    """Record what agents tell unasked, as long as the body runs."""

    async def listen() -> None:
        while True:
            agent, note = await bench.news()
            record.event("note", {"level": note.level, "who": agent, "text": note.text})

    async with beside(listen()) as listener:
        yield
        if listener.done():  # it only ends because a note could not be recorded
            await listener


@asynccontextmanager
async def _custody(bench: Bench, record: Record, folder: Path | None) -> AsyncIterator[None]:
    """Snapshot every switch and ToR; give all of them back on every way out.

    A first Ctrl-C that comes while they are given back waits until they are.
    """
    snapshots = await custody.take(bench, folder)
    try:
        yield
    finally:
        await to_the_end(_give_back(bench, record, folder, snapshots))


async def _give_back(
    bench: Bench, record: Record, folder: Path | None, snapshots: Mapping[str, custody.Snapshot]
) -> None:
    """Restore within a limit; raises `RestoreFailed` with all that is not as it was found."""
    steering_s = max((tor.limit_s for tor in bench.tors.values()), default=0)
    switching_s = max((unit.spec.apply_timeout_s for unit in bench.switches.values()), default=0)
    limit_s = steering_s + switching_s + RESTORE_SLACK_S
    try:
        async with asyncio.timeout(limit_s):
            failed = await _restore(bench, record, folder, snapshots)
    except TimeoutError:
        failed = [f"not restored within {limit_s:g} s"]
    if failed:
        raise RestoreFailed("not as they were found: " + "; ".join(failed))


async def _restore(
    bench: Bench, record: Record, folder: Path | None, snapshots: Mapping[str, custody.Snapshot]
) -> list[str]:
    """Steer everything to the electrical path, then put the switches back; return what failed."""
    failed = await custody.unsteer(bench, folder)
    outcomes = await custody.give_back(bench.switches, folder, snapshots)
    failed += [
        f"{name}: {text}" for name, (outcome, text) in outcomes.items() if outcome == "failed"
    ]
    try:
        for name, (outcome, difference) in outcomes.items():
            record.event("restore", {"switch": name, "outcome": outcome, "difference": difference})
    except InfrastructureError as unwritable:
        if not failed:
            raise
        failed.append(str(unwritable))  # a switch that needs a person outranks a full disk
    return failed
