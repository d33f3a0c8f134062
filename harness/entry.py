"""What the command line calls: one function a use. Here deciding and remembering meet.

`harness.run` acts and writes documents; `harness.record` keeps and judges them; neither imports
the other. This module joins them for one run and owns what surrounds it: the run folder, signals,
and the rule that whatever happened is told in the journal before it is told on the terminal.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from drivers.errors import DeviceFault, Misuse
from harness import memory
from harness.bench.credentials import passwords
from harness.bench.emulated import join_killed, release
from harness.bench.running import Places
from harness.clock import Clock, RealClock
from harness.errors import (
    MACHINE,
    BadFile,
    ExitCode,
    HarnessError,
    InfrastructureError,
    Interrupted,
    RestoreFailed,
    StepFailed,
    UsageError,
)
from harness.fabric.topology import topology_of
from harness.interrupts import Interrupts
from harness.model.bench import Bench
from harness.model.documents import SCHEMA, Document, RunSummary, Start
from harness.model.load import load_scenario
from harness.model.scenario import Engine, Scenario
from harness.model.streams import STREAMS
from harness.processes import ask_for_real_time, awake
from harness.record import store
from harness.record.journal import Journal, is_closed
from harness.record.summary import conclude, read_run, refresh
from harness.run import custody, recovery
from harness.run.asked import Asked, Simulation, lay_out, load
from harness.run.generation.asked import notes as generation_notes
from harness.run.generation.calibrate import Calibrated, calibrate
from harness.run.generation.calibration_asked import Wanted, load_calibration
from harness.run.orchestrator import CHECKPOINT, Work, execute, perform_all
from harness.run.plan import tell_plan
from harness.run.rl.checkpoint import read_checkpoint
from harness.run.rl.plan import training_notes
from harness.run.rl.terms import against
from harness.run.session import Session
from harness.seeds import unpredictable
from harness.worlds import World, world_of

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
DAY_S = 86_400.0
CALIBRATION = "How long does a step of generation take?"
PACKAGES = ("orchestrl-harness", "torch", "pyzmq", "paramiko", "pyserial", "pyroute2", "asyncssh")


def plan_text(scenario_path: Path, bench_path: Path | None, engine: Engine | None = None) -> str:
    """Return what a run would do, every device command included; nothing is opened or sent."""
    asked = load(scenario_path, bench_path, engine)
    lines = tell_plan(
        asked.bench,
        asked.topology,
        asked.scenario,
        asked.plans,
        generation=asked.generation,
        training=asked.training,
    )
    return "\n".join(lines)


def run_scenario(
    scenario_path: Path,
    bench_path: Path | None,
    runs_dir: Path,
    *,
    engine: Engine | None = None,
    max_wait_s: float | None = None,
    resume: str | None = None,
    simulation: Simulation | None = None,
    progress: Callable[[Document], None] | None = None,
) -> RunSummary:
    """Run a scenario and return its judged summary; with `simulation`, in the simulated world.

    With `resume`, a run, its RL loop goes on from where that one was left. Raises `UsageError`
    before a run folder exists; after that every outcome is in the summary, except a bug of ours,
    which is recorded and then raised.
    """
    asked = load(scenario_path, bench_path, engine, simulation)
    if max_wait_s is not None:
        asked = _waiting(asked, max_wait_s)
    if resume is not None:
        asked = replace(asked, resume=_left_by(resume, runs_dir, asked.scenario))
    return _recorded(asked, runs_dir, progress)


def simulate(
    scenario_path: Path,
    bench: Bench,
    *,
    seed: int = 0,
    overrides: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> RunSummary:
    """Simulate a scenario, changed by `overrides`, on a bench of no file; nothing of it is kept.

    Each `seed` draws requests of its own.

    Raises as `run_scenario` does.
    """
    scenario = overrides(load_scenario(scenario_path))
    scenario = msgspec.structs.replace(scenario, seed=seed)
    asked = lay_out(scenario, bench, scenario_path, draw=seed)
    with TemporaryDirectory(prefix="harness-sim-") as runs:
        return _recorded(asked, Path(runs), None)


def _left_by(run: str, runs_dir: Path, scenario: Scenario) -> Path:
    """Return the checkpoint folder of a run; raises `UsageError` where it is of no use here."""
    folder = store.find(runs_dir, run)
    if not is_closed(folder.journal) and store.is_held(folder):
        raise UsageError(f"run {folder.id} is still going: stop its process first (Ctrl-C)")
    checkpoint = folder.path.resolve() / CHECKPOINT
    saved = read_checkpoint(checkpoint).checkpoint
    if reason := against(saved.terms, scenario, saved.step, saved.policy, saved.version):
        raise UsageError(f"cannot go on from run {folder.id}: {reason}")
    return checkpoint


def calibrate_generation(
    wanted: Wanted, runs_dir: Path, progress: Callable[[Document], None] | None = None
) -> tuple[RunSummary, Calibrated | None]:
    """Measure a bench's step times in a run of its own; None where it did not come to its end.

    Raises as `run_scenario` does.
    """
    bench, calibration = load_calibration(wanted)
    scenario = Scenario(question=CALIBRATION, timeout_s=DAY_S, steps=())
    asked = Asked(None, wanted.bench_path, scenario, bench, topology_of(bench), {})
    found: list[Calibrated] = []

    async def work(session: Session) -> None:
        found.append(await calibrate(session, calibration))

    summary = _recorded(asked, runs_dir, progress, work)
    return summary, found[0] if summary.exit_code == ExitCode.PASSED else None


def _recorded(
    asked: Asked,
    runs_dir: Path,
    progress: Callable[[Document], None] | None,
    work: Work = perform_all,
) -> RunSummary:
    """Open the bench, do the work and close everything, all of it told in a run folder."""
    world = world_of(asked)
    _refuse_unrestored(runs_dir, asked.bench)
    secrets = passwords(asked.bench) if asked.bench.world == "live" else []
    folder = store.create(
        runs_dir, RealClock(), unpredictable(), scenario=asked.scenario_path, bench=asked.bench_path
    )
    with Journal.create(folder.journal, world.clock, secrets=secrets, watch=progress) as journal:
        trains = training_notes(asked.training, asked.bench.world)
        labour = (*generation_notes(asked.generation), *trains)
        run = folder.id if world.is_real else ""
        journal.start(_start(asked, run, (*world.notes, *labour), world.clock))
        for stream, fields in STREAMS.items():
            journal.describe(stream, fields)
        journal.sync()  # what `recover` asks of it is on the disk before anything is changed
        refresh(folder, store.coordinator_now())
        ended: Exception | None = None
        try:
            _conduct(asked, world, folder, journal, work)
        except KeyboardInterrupt:  # before our own signal rules, or after them
            ended = Interrupted("interrupted; the switches are as they were found")
        except Exception as error:
            ended = error
        if isinstance(ended, RestoreFailed) and asked.bench.world == "live":
            ended = RestoreFailed(f"{ended}. Put this right with: {folder.recovery}")
        return close_run(journal, folder, ended, judged=asked.scenario_path is not None)


def close_run(
    journal: Journal, folder: store.RunFolder, ended: Exception | None, *, judged: bool = True
) -> RunSummary:
    """Judge a run by what ended it; a bug of ours is raised again, once it is recorded.

    Where the run cannot be recorded to its end, that is raised together with what ended it.
    """
    code, reason = _outcome(ended)
    try:
        summary = conclude(journal, folder, code, reason, judged=judged)
    except InfrastructureError as unwritable:
        if ended is None or str(ended) == str(unwritable):
            raise
        raise ExceptionGroup(f"run {folder.id}", [ended, unwritable]) from None
    if ended is not None and code is ExitCode.BUG and not isinstance(ended, HarnessError):
        raise ended
    return summary


def _outcome(ended: Exception | None) -> tuple[ExitCode, str]:
    """Return the exit code that what ended a run stands for, and why."""
    match ended:
        case None:
            return ExitCode.PASSED, ""
        case HarnessError():
            return ended.exit_code, str(ended)
        case DeviceFault() | Misuse():
            return ExitCode.INFRASTRUCTURE, str(ended)
        case OSError(errno=number) if number in MACHINE:
            return ExitCode.INFRASTRUCTURE, str(ended)
        case _:
            return ExitCode.BUG, f"{type(ended).__name__}: {ended}"


def _conduct(
    asked: Asked, world: World, folder: store.RunFolder, journal: Journal, work: Work
) -> None:
    """Run the orchestrator under our own signal rules; raises what it raises."""

    class Told:
        """The orchestrator's record: events go to the journal, ends of steps to run.json too."""

        def event(self, stream: str, data: Mapping[str, object]) -> None:
            journal.event(stream, data)
            if stream == "step" and data.get("phase") == "end" and world.is_real:
                refresh(folder, coordinator)

    coordinator = store.coordinator_now()
    if world.is_real:
        # Switches and heartbeats have threads of their own; at 5 ms, the default, each could hold
        # the event loop up for longer than all our overhead.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        ask_for_real_time()
    told = Told()
    places = Places(folder.path.resolve(), folder.logs.resolve(), folder.transcripts.resolve())

    def tell(text: str, level: str = "info") -> None:
        told.event("note", {"level": level, "who": "coordinator", "text": text})

    async def main() -> None:
        with (
            awake() if world.is_real else nullcontext(),
            Interrupts(folder.recovery, folder.snapshots),
        ):
            async with outcome_first(world.open(places, tell), tell) as bench:
                await execute(
                    bench,
                    asked.scenario,
                    asked.plans,
                    told,
                    folder.snapshots if world.is_real else None,
                    generation=asked.generation,
                    training=asked.training,
                    keep=folder.path.resolve() / CHECKPOINT,
                    resume=asked.resume,
                    waited_us=world.waited_us,
                    work=work,
                )

    world.run(main())


@asynccontextmanager
async def outcome_first(
    opening: AbstractAsyncContextManager[T], tell: Callable[[str, str], None]
) -> AsyncIterator[T]:
    """Enter `opening`; what ended the body is raised, and what the closing met later only told.

    A switch that is not restored must end the run with 5, even if an agent then fails to say
    goodbye. But a step that failed while an agent was gone did not fail on a sound bench: a dead
    agent is known by its silence, later than its ranks' peers notice.
    """
    first: BaseException | None = None
    try:
        async with opening as opened:
            try:
                yield opened
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        if first is None or error is first:
            raise
        if isinstance(first, StepFailed) and isinstance(error, InfrastructureError):
            raise InfrastructureError(f"{error}; {first}") from first
        with suppress(InfrastructureError):  # what cannot be recorded is told at the run's end
            tell(f"while the bench was closed: {str(error) or type(error).__name__}", "error")
        raise first from None


def _waiting(asked: Asked, max_wait_s: float) -> Asked:
    return replace(asked, bench=msgspec.structs.replace(asked.bench, max_wait_s=max_wait_s))


def _refuse_unrestored(runs_dir: Path, bench: Bench) -> None:
    """Refuse a switch or a ToR that a dead run has changed and nobody has put back."""
    if bench.world != "live":
        return
    urls = {tor.url: name for name, tor in bench.tors.items()}
    urls |= {switch.url: name for name, switch in bench.switches.items()}
    for folder in store.unfinished(runs_dir):
        if store.is_held(folder):
            continue
        for snapshot in custody.pending(folder.snapshots).values():
            if snapshot.spec.url in urls:
                raise InfrastructureError(
                    f"{urls[snapshot.spec.url]}: run {folder.id} was killed and left it changed;"
                    f" put it back first: {folder.recovery}"
                )


def _start(asked: Asked, run: str, notes: tuple[str, ...], clock: Clock) -> Start:
    return Start(
        schema=SCHEMA,
        run=run,
        t_ns=clock.now_ns(),
        wall=clock.wall().isoformat(timespec="seconds"),
        world=asked.bench.world,
        scenario=str(asked.scenario_path or "none, a calibration"),
        bench=asked.bench.name,
        seed=asked.scenario.seed,
        versions=versions(),
        question=asked.scenario.question,
        checks=asked.scenario.checks,
        notes=notes,
    )


def versions() -> dict[str, str]:
    """Return what a result may depend on: our version, the packages', Python's and the kernel's."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def recover(run: str, runs_dir: Path) -> dict[str, str]:
    """Put the switches and ToRs of a killed run back; return how each was left, by name.

    An emulated bench that the run left standing is taken down afterwards; where it is gone (the
    next emulated run cleans it away), so are its units, and nothing is left to restore. Raises
    `UsageError` for a run that is still held, and `RestoreFailed` when a person is needed.
    """
    folder = store.find(runs_dir, run)
    if not is_closed(folder.journal) and store.is_held(folder):
        raise UsageError(f"run {folder.id} is still going: stop its process first (Ctrl-C)")
    memory.sweep()
    if _was_emulated(folder) and not join_killed(folder.path):
        return recovery.abandon(folder.snapshots)
    outcomes = recovery.recover(folder.snapshots)
    release(folder.path)
    return outcomes


def _was_emulated(folder: store.RunFolder) -> bool:
    try:
        return read_run(folder).world == "emulated"
    except BadFile:  # a journal that lost its start: the snapshots alone say what to put back
        return False
