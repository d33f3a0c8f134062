"""Benches, scenarios, workloads, maps and profiles from TOML, or a `BadFile` with all problems.

Three passes, each of which may add problems: TOML itself, the schema (`harness.model.schema`), and
the rules that tie values together (`harness.model.bench_rules`, `scenario_rules`,
`workload_rules`, `profile_rules`). This is the one module of the model that touches the disk, and
so it also opens the traces that a workload names, and a model's ``config.json``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from drivers.base import Matching
from harness.errors import BadFile, UsageError
from harness.model.access_rules import PATH_KEYS
from harness.model.bench import Bench
from harness.model.bench_rules import bench_problems
from harness.model.filling import filled, filling
from harness.model.generated_rules import expanded, generated_problems
from harness.model.generation_rules import (
    GENERATION_PATHS,
    GenerationFiles,
    generation_problems,
)
from harness.model.mapfile import MapFile, map_problems, matching_of
from harness.model.profile import Profile
from harness.model.profile_rules import profile_problems
from harness.model.replay import Replay
from harness.model.rl_rules import TRAINING_PATHS, training_problems
from harness.model.scenario import Engine, Generation, Scenario, Training
from harness.model.scenario_rules import scenario_problems, together_problems
from harness.model.schema import examine
from harness.model.shape import ModelShape, shape_of_config
from harness.model.simulation import Calibration, calibration_problems
from harness.model.traces import read_trace
from harness.model.workload import GeneratedWorkload, TraceWorkload, Workload
from harness.model.workload_rules import workload_problems

T = TypeVar("T")

FILE_BYTES_MAX = 4 * 2**20
LINE_BYTES_MAX = 4 * 2**20
"""Of a trace: a line of ids of all blocks of the longest prompts is far shorter."""
WORKLOAD: Any = Workload  # a union, for which mypy has no `type[T]`


@dataclass(frozen=True)
class _Kind:
    """A kind of file: what a reader calls it, and keys that only it has."""

    name: str
    signs: frozenset[str]


KINDS: Mapping[Any, _Kind] = {
    Scenario: _Kind("a scenario", frozenset({"question", "steps", "shapes", "checks"})),
    WORKLOAD: _Kind("a workload", frozenset({"question", "kind", "prompts", "format", "path"})),
    Bench: _Kind("a bench file", frozenset({"world", "nodes", "generated"})),
    MapFile: _Kind("a map", frozenset({"circuits"})),
    Profile: _Kind("a latency profile", frozenset({"model", "shape"})),
    Calibration: _Kind("a calibration", frozenset({"control", "collectives", "sync"})),
}

_POSITION = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


def load_bench(path: str | Path) -> Bench:
    """Read a bench file; paths in it are resolved against its own folder.

    What it generates is there as if it had been written. Raises `BadFile` with every problem found.
    """
    bench = expanded(_load(Path(path), Bench, _bench_problems))
    folder = Path(path).resolve().parent
    tors, switches = (
        {
            name: msgspec.structs.replace(device, **_resolved(device, PATH_KEYS, folder))
            for name, device in devices.items()
        }
        for devices in (bench.tors, bench.switches)
    )
    keys = str(folder / Path(bench.keys).expanduser()) if bench.keys else ""
    simulation = msgspec.structs.replace(
        bench.simulation, **_resolved(bench.simulation, ("calibration",), folder)
    )
    return msgspec.structs.replace(
        bench, tors=tors, switches=switches, keys=keys, simulation=simulation
    )


def _bench_problems(bench: Bench) -> Iterator[str]:
    yield from bench_problems(bench)
    yield from generated_problems(bench)


def load_scenario(path: str | Path) -> Scenario:
    """Read a scenario file; paths that its tables name are resolved against its own folder.

    Raises `BadFile` with every problem found.
    """
    scenario = _load(Path(path), Scenario, lambda found: scenario_problems(filled(found)))
    folder = Path(path).resolve().parent
    tables: dict[str, Generation | Training] = {}
    for name, table, keys in (
        ("generation", scenario.generation, GENERATION_PATHS),
        ("training", scenario.training, TRAINING_PATHS),
    ):
        if table is not None:
            tables[name] = msgspec.structs.replace(table, **_resolved(table, keys, folder))
    return msgspec.structs.replace(scenario, **tables)


def with_engine(scenario: Scenario, engine: Engine, path: str | Path) -> Scenario:
    """Return the scenario with another engine than its file names, checked as if it named it.

    Raises `BadFile`, naming `path`, the scenario's file; `UsageError` where nothing generates.
    """
    if scenario.generation is None:
        raise UsageError(f"--engine {engine}: {path} has no table [generation]")
    generation = msgspec.structs.replace(scenario.generation, engine=engine)
    asked = msgspec.structs.replace(scenario, generation=generation)
    stars = filled(asked)
    assert stars.generation is not None
    problems = list(generation_problems(stars.generation))
    if stars.training is not None:
        problems += training_problems(stars.training, stars.generation)
    if problems:
        raise BadFile(str(path), [f"{problem} (--engine {engine})" for problem in problems])
    return asked


def load_generation(
    generation: Generation, *, nodes_are_here: bool, bench: Bench | None = None, draw: int = 0
) -> GenerationFiles:
    """Read the files that a scenario generates with; raises `BadFile`, naming the one at fault.

    A model folder is for the nodes: it must be here only where they are. Prompts may be by GPU of
    the bench. A generated workload is drawn with its own seed plus `draw`.
    """
    profile = load_profile(generation.profile) if generation.profile else None
    shape = profile.shape if profile else None
    if generation.engine == "vllm":
        there = generation.model and (nodes_are_here or Path(generation.model).exists())
        shape = load_shape(generation.model) if there else None
    workload = load_workload(generation.workload)
    if isinstance(workload, GeneratedWorkload):
        workload = msgspec.structs.replace(workload, seed=workload.seed + draw)
    if bench is not None:
        workload = filling(workload, generation, bench)
        if problems := [*workload_problems(workload)]:
            asked = f"with generation.prompts_per_gpu = {generation.prompts_per_gpu:g}: "
            raise BadFile(generation.workload, [asked + problem for problem in problems])
    replay = requests_of(workload)
    return GenerationFiles(replay=replay, profile=profile, shape=shape, workload=workload)


def load_workload(path: str | Path) -> Workload:
    """Read a workload file; a trace's path is resolved against its folder.

    Raises `BadFile` with every problem found. The trace itself is read by `requests_of`.
    """
    workload: Workload = _load(Path(path), WORKLOAD, workload_problems)
    if isinstance(workload, TraceWorkload):
        trace = Path(path).resolve().parent / Path(workload.path).expanduser()
        return msgspec.structs.replace(workload, path=str(trace))
    return workload


def requests_of(workload: Workload) -> Replay:
    """Return the requests of a workload: the same ones, with the same digest, at every call.

    Raises `BadFile`, naming the trace, where it cannot be read or has rows that are refused.
    """
    if not isinstance(workload, TraceWorkload):
        from harness.model.lengths import generate  # noqa: PLC0415

        return generate(workload)
    path = Path(workload.path)
    try:
        if path.exists() and not path.is_file():
            raise BadFile(workload.path, ["not a file of rows"])
        with path.open("rb") as file:
            return read_trace(_lines(file, workload.path), workload)
    except FileNotFoundError as error:
        raise BadFile(workload.path, ["no such file"]) from error
    except OSError as error:
        raise BadFile(workload.path, [f"cannot be read: {error.strerror}"]) from error


def load_map(path: str | Path) -> Matching:
    """Read the circuits of one switch from a map file. Raises `BadFile` with every problem."""
    return matching_of(_load(Path(path), MapFile, map_problems))


def load_profile(path: str | Path) -> Profile:
    """Read a latency profile. Raises `BadFile` with every problem found."""
    return _load(Path(path), Profile, profile_problems)


def load_calibration(path: str | Path) -> Calibration:
    """Read what a simulated bench takes its times from. Raises `BadFile` with every problem."""
    return _load(Path(path), Calibration, calibration_problems)


def load_shape(path: str | Path) -> ModelShape:
    """Read a model's shape from its folder, or from its ``config.json`` itself.

    Raises `BadFile` with every problem found.
    """
    path = Path(path)
    if not path.exists():
        raise BadFile(str(path), ["no such model folder"])
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(_bytes(file))
    except (ValueError, RecursionError) as error:
        raise BadFile(str(file), ["not JSON"]) from error
    if not isinstance(config, dict):
        raise BadFile(str(file), ["expected a JSON object"])
    shape, problems = shape_of_config(config)
    if problems:
        raise BadFile(str(file), problems)
    return shape


def bench_path(scenario: Scenario, path: str | Path) -> Path:
    """Return the scenario's default bench file, which it names relative to its own `path`.

    Raises `BadFile` where it names none.
    """
    if not scenario.bench:
        raise BadFile(
            str(path), ['bench: missing; name a bench file here, or give one with "--bench FILE"']
        )
    return Path(path).parent / Path(scenario.bench).expanduser()


def check_together(
    scenario: Scenario,
    bench: Bench,
    path: str | Path = "scenario",
    files: GenerationFiles | None = None,
) -> None:
    """Check that the scenario, with what it generates with, can be asked of this bench.

    Raises `BadFile`, naming `path`, the scenario's file.
    """
    if problems := list(together_problems(scenario, bench, files)):
        raise BadFile(str(path), problems)


def _load(path: Path, struct: type[T], rules: Callable[[T], Iterable[str]]) -> T:
    table = _read(path)
    _refuse_another_kind(path, table, struct)
    value, problems = examine(table, struct)
    if value is not None:
        problems += rules(value)
    if problems or value is None:
        raise BadFile(str(path), list(dict.fromkeys(problems)))
    return value


def _refuse_another_kind(path: Path, table: dict[str, Any], struct: type[Any]) -> None:
    """Refuse a file that is of another kind in one line, not in one for each of its keys."""
    wanted = KINDS[struct]
    other = max(KINDS.values(), key=lambda kind: len(table.keys() & kind.signs))
    if len(table.keys() & other.signs) > len(table.keys() & wanted.signs):
        raise BadFile(str(path), [f"this is {other.name}; {wanted.name} is expected here"])


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise BadFile(str(path), ["no such file"]) from error
    except OSError as error:
        raise BadFile(str(path), [f"cannot be read: {error.strerror}"]) from error
    if len(data) > FILE_BYTES_MAX:
        raise BadFile(str(path), [f"larger than {FILE_BYTES_MAX} bytes: is this the right file?"])
    return data


def _read(path: Path) -> dict[str, Any]:
    data = _bytes(path)
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadFile(str(path), [f"line {line}: not UTF-8 text"]) from error
    except RecursionError as error:
        raise BadFile(str(path), ["not TOML: nested too deeply"]) from error
    except ValueError as error:  # TOMLDecodeError, and int() on numbers of thousands of digits
        raise BadFile(str(path), [_syntax(str(error))]) from error


def _lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise BadFile(
                path,
                [f"line {number}: longer than {LINE_BYTES_MAX} bytes: is this the right file?"],
            )
        yield line


def _syntax(text: str) -> str:
    if found := _POSITION.fullmatch(text):
        return f"line {found[2]}, column {found[3]}: not TOML: {found[1]}"
    return f"not TOML: {text}"


def _resolved(table: object, keys: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the paths that these keys of a table name, seen from the file's folder."""
    return {
        key: str(folder / Path(value).expanduser())
        for key in keys
        if (value := getattr(table, key))
    }
