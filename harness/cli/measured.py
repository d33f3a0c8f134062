"""Runs as `harness.rlsim.fitting` takes them: their journals and files, read from their folders."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.errors import BadFile, UsageError
from harness.fabric.topology import topology_of
from harness.model.bench import Bench
from harness.model.degrees import parse_degrees
from harness.model.documents import Event, Start, Stop
from harness.model.filling import filled
from harness.model.generation_rules import GENERATION_PATHS
from harness.model.load import load_bench, load_profile, load_scenario
from harness.model.profile import Profile
from harness.model.rl_rules import TRAINING_PATHS
from harness.model.scenario import Scenario
from harness.record.journal import read_journal
from harness.record.store import RunFolder
from harness.rlsim.fits.measured import Measured
from harness.run.rl.asked import ranks_of
from harness.run.rl.edges import Path as Kind
from harness.run.rl.edges import edges_of, sources_of


class Reading(msgspec.Struct, frozen=True):
    """A run, and what its reader must know of it."""

    run: Measured
    doubts: tuple[str, ...]


def read_measured(folder: RunFolder) -> Reading:
    """Read a run; raises `BadFile` for one of another schema, `UsageError` for a simulated one."""
    start, events, stopped = _documents(folder)
    if start.world == "simulated":
        raise UsageError(
            f"{folder.id} is a simulated run: figures are fitted to what was measured, on an "
            "emulated or a live bench"
        )
    doubts = [] if stopped else [f"{folder.id}: was not closed; what it has counts"]
    scenario = _scenario(folder, Path(start.scenario))
    bench = load_bench(folder.bench)
    scenario = filled(scenario, bench)
    profile = trained = None
    if scenario.generation is not None:
        profile = _profile(scenario.generation.profile, folder.id, doubts)
        trained = profile
    if scenario.training is not None and scenario.training.profile:
        trained = _profile(scenario.training.profile, folder.id, doubts)
    training = scenario.training
    run = Measured(
        name=folder.id,
        bench=bench,
        topology=topology_of(bench),
        scenario=scenario,
        events=events,
        ranks_of=ranks_of(training, bench) if training else {},
        degrees=parse_degrees(training.layout) if training else None,
        hops=_hops(scenario, bench),
        profile=profile,
        layers=trained.shape.layers if trained else None,
        one_machine=start.world == "emulated",
    )
    return Reading(run, tuple(doubts))


def _documents(folder: RunFolder) -> tuple[Start, tuple[Event, ...], bool]:
    documents = list(read_journal(folder.journal))
    start = next((one for one in documents if isinstance(one, Start)), None)
    if start is None:
        raise BadFile(str(folder.journal), ["the journal has no start: it was cut off before it"])
    events = tuple(one for one in documents if isinstance(one, Event))
    return start, events, any(isinstance(one, Stop) for one in documents)


def _scenario(folder: RunFolder, asked: Path) -> Scenario:
    """Read a run's copy of its scenario; what that names lies where the original was."""
    if not folder.scenario.exists():
        raise UsageError(f"{folder.id}: no scenario was kept, so nobody knows what was measured")
    scenario = load_scenario(folder.scenario)
    here, there = folder.scenario.resolve().parent, asked.resolve().parent
    for name, keys in (("generation", GENERATION_PATHS), ("training", TRAINING_PATHS)):
        table = getattr(scenario, name)
        if table is not None:
            moved = {key: _moved(getattr(table, key), here, there) for key in keys}
            table = msgspec.structs.replace(table, **moved)
            scenario = msgspec.structs.replace(scenario, **{name: table})
    return scenario


def _moved(path: str, here: Path, there: Path) -> str:
    if not path or not Path(path).is_relative_to(here):
        return path
    return str(there / Path(path).relative_to(here))


def _profile(path: str, run: str, doubts: list[str]) -> Profile | None:
    """Read a profile; where it is gone, what needs it is not fitted, and that is told."""
    if not path:
        return None
    try:
        return load_profile(path)
    except BadFile as problem:
        doubts.append(f"{run}: steps and layers are left out: {problem}")
        return None


def _hops(scenario: Scenario, bench: Bench) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return by kind of sync how weights get around where all nodes take part."""
    if scenario.training is None:
        return {}
    trainers = list(ranks_of(scenario.training, bench))
    receivers = [name for name, node in bench.nodes.items() if node.pod == "generate"]
    kinds: tuple[Kind, ...] = ("chain", "tree", "pairs")
    return {
        kind: edges_of(sources_of(trainers, receivers, kind), receivers, kind) for kind in kinds
    }
