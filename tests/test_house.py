"""The rules of the house, as far as a machine can check them: ast and text, stdlib only.

Each rule collects every place that breaks it and says what to do. The literal tables below are the
architecture: whoever adds a module, a library or an edge places it here, in sight of the reviewer.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PACKAGES = ("drivers", "harness", "agents")

MAY_IMPORT = {"drivers": {"drivers"}, "harness": {"harness", "drivers"}, "agents": {"agents"}}
"""Whole packages; what agents may take from harness is listed next."""
AGENTS_MAY_IMPORT = ("errors", "clock", "seeds", "memory", "processes", "model", "wire")

HARNESS_ROWS = (
    ("errors", "clock", "seeds", "tasks"),
    ("processes", "interrupts", "memory", "virtual"),
    ("model",),
    ("wire",),
    ("scheduling", "fabric"),
    ("rlsim",),
    ("bench",),
    ("run",),
    ("record",),
    ("worlds",),
    ("entry",),
    ("sweeps",),
    ("cli",),
    ("__main__",),
)
"""A module of harness imports its own entry and the rows above it, nothing else."""
RECORD_NEVER_IMPORTS = ("rlsim", "bench", "run")

DRIVERS_ROWS = (
    ("errors",),
    ("base",),
    ("address", "netlink"),
    ("interfaces", "userns"),
    ("dialects", "transports"),
    ("ocs", "tor"),
    ("apply", "catalog"),
    ("emulators", "conformance"),
)
"""The same for drivers: an emulator may know a driver's family, a driver never its emulator."""

LIBRARY_DOORS = {
    "asyncssh": ("drivers/emulators/",),
    "click": ("harness/cli/",),
    "distributed": ("harness/sweeps/",),
    "matplotlib": ("harness/sweeps/",),
    "numba": ("harness/rlsim/",),
    "numpy": ("harness/", "agents/"),
    "paramiko": ("drivers/transports/",),
    "prometheus_client": ("harness/record/",),
    "pyroute2": ("drivers/interfaces.py", "drivers/tor/", "drivers/emulators/light/"),
    "rich": ("harness/cli/", "harness/record/"),
    "serial": ("drivers/transports/",),
    "torch": ("agents/",),
    "vllm": ("agents/generation/",),
    "zmq": ("harness/wire/",),
}
"""Third-party library -> where it may be imported. Behind one door it can be replaced."""
LATE = ("torch", "vllm")
"""Imported inside functions only: whoever imports our module does not pay for them."""
TORCH_THROUGHOUT = (
    "agents/training/decoder.py",
    "agents/training/first_weights.py",
    "agents/training/grpo.py",
    "agents/training/parallel.py",
    "agents/training/phase_watch.py",
    "agents/training/torch_trainer.py",
)
"""What is torch throughout imports it at its top, and is imported late itself."""

PURE = (
    "drivers/base.py",
    "drivers/errors.py",
    "drivers/dialects/",
    "harness/errors.py",
    "harness/model/",
    "harness/scheduling/",
    "harness/fabric/",
    "harness/run/pressure.py",
    "harness/run/stages.py",
    "harness/run/fabric/faults.py",
    "harness/run/fabric/history.py",
    "harness/run/fabric/plan.py",
    "harness/run/fabric/work.py",
    "harness/run/rl/edges.py",
    "harness/wire/messages.py",
    "harness/wire/generation.py",
    "harness/wire/timesync.py",
    "harness/run/generation/stages.py",
    "harness/run/generation/ledger.py",
)
IMPURE_LIBRARIES = words(
    "asyncio multiprocessing os random secrets select selectors shutil signal socket subprocess"
    " tempfile threading time paramiko serial zmq pyroute2 asyncssh click rich"
)

EDGES: dict[str, str] = {
    "harness/clock.py": "the one place where time is read",
    "harness/virtual.py": "its time is made here, and waited for",
    "harness/seeds.py": "the one place where chance is drawn",
    "drivers/transports/": "deadlines of a line are real",
    "drivers/emulators/": "a running emulator is a device: it lives in real time",
    "drivers/conformance.py": "deadlines of the check",
    "harness/processes.py": "ending processes waits for them",
    "harness/wire/": "heartbeats and clock probes stamp real time",
    "harness/bench/": "launchers and worker threads wait for real processes",
    "harness/cli/": "what a person sees is told in real time",
    "agents/": "labour on a node happens in real time",
    "tests/emulated/": "real sockets and processes",
    "tests/hardware/": "real devices",
    "tests/benchmarks/": "they measure",
}
"""Where the clock may be read, waited for, or chance drawn. Elsewhere both are arguments."""
AMBIENT = re.compile(
    r"^(time\.(time|time_ns|monotonic|monotonic_ns|perf_counter|perf_counter_ns|sleep)"
    r"|asyncio\.sleep|(datetime\.)?(datetime|date)\.(now|utcnow|today)"
    r"|random\.(?!Random$)\w+|(np|numpy)\.random\.(?!(default_rng|PCG64|SeedSequence)$)\w+"
    r"|secrets\.\w+|uuid\.uuid[14]|os\.urandom)$"
)
SEEDED = re.compile(r"^(random\.Random|((np|numpy)\.random\.)?(default_rng|PCG64|SeedSequence))$")
"""Chance that is ambient only where no seed is given."""
WALL = re.compile(r"^(time\.time|time\.time_ns|(datetime\.)?(datetime|date)\.(now|utcnow|today))$")
WALL_EDGES = ("harness/clock.py", "drivers/emulators/", "tests/benchmarks/")

NO_NAMES = words("util utils manager managers helper helpers common handler handlers misc")
FUNCTION_LINES, MODULE_LINES, TEST_MODULE_LINES, LINE_COLUMNS, FOLDERS_DEEP = 50, 400, 600, 100, 2

PRAGMA = re.compile(r"\s*#\s*(noqa|type:\s*ignore).*$")
"""Said to a tool, so not counted in the width of a line."""

UNITS = words(
    "ns us ms s db dbm nm bytes bytes_per_s mbit_per_s gbit_per_s gb_per_s pct ppb hz tokens"
)
UNIT_OF = {
    "GB/s": "gb_per_s",
    "Mbit/s": "mbit_per_s",
    "tokens/s": "tokens_per_s",
    "%": "pct",
    "dB": "db",
    "dBm": "dbm",
    "1/s": "per_s",
}
"""How a unit of a document is spelt at the end of its field's name, where not as it is."""
BARE_NUMBERS = words(
    "after aggregation_planes at_least at_most averaging batch batch_max baud blocks bytes_scale"
    " cached clip core_planes count cut_apply cut_reply die_on_apply die_on_command dp"
    " emulated_gpus ep epoch exit_code expert_intermediate experts experts_per_token flops_share"
    " found generation gpu gpus gpus_per_server growth_per_step head_dim heads hidden"
    " in_flight_max index instances intermediate iteration iterations joined_beat kv_blocks"
    " kv_blocks_used kv_heads last layers learning_rate lose_reply max migrations min"
    " moves_per_s_max n nics_per_server oversubscription p50 p95 p99 pid place plus_minus port"
    " ports power_averaging pp preemptions prefilling prompt prompts prompts_per_gpu"
    " prompts_per_step rails rank re reboot_on_command repeat repeats requests_max reward rotate"
    " running sample samples seed seq sequences_max servers_per_pod servers_per_tor"
    " sibling_correlation skipped speed staleness_max start stayed step steps sync_retries t1 t2"
    " t3 t4 temperature tp trunks_per_pod turn_correlation uplinks uplinks_per_tor upto v value"
    " version version_first version_last vocab waiting warmup workload_step world_size wrong"
)
"""Counts, ids and settings that have no unit. A quantity does not belong here: name its unit."""
SCHEMAS = (
    "harness/model/bench.py",
    "harness/model/scenario.py",
    "harness/model/documents.py",
    "harness/model/workload.py",
    "harness/model/replay.py",
    "harness/model/layout.py",
    "harness/model/shape.py",
    "harness/model/profile.py",
    "harness/model/requests.py",
    "harness/model/placement.py",
    "harness/wire/messages.py",
    "harness/wire/generation.py",
    "harness/wire/timesync.py",
    "drivers/emulators/config.py",
)


# -- reading the tree ----------------------------------------------------------------------------


def modules(*roots: str) -> Iterator[str]:
    """Paths, relative to the repository, of the Python files under these folders."""
    for root in roots:
        yield from sorted(
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / root).rglob("*.py")
            if "__pycache__" not in path.parts
        )


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path), path)


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every imported module (``from a import b`` gives ``a.b``), with its statement."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = dotted(path).split(".")
                keep = len(parts) - node.level + path.endswith("__init__.py")
                base = ".".join([*parts[:keep], *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def late_statements(path: str) -> set[ast.stmt]:
    """Statements inside functions, or under ``if TYPE_CHECKING``: not run at import."""
    late: set[ast.stmt] = set()
    for node in ast.walk(tree(path)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if is_function or is_typing:
            late.update(inner for inner in ast.walk(node) if isinstance(inner, ast.stmt))
    return late


def calls(path: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a dotted name, spelt in full even when it was imported by its last part."""
    full = {}
    for name, node in imports(path):
        alias = name.rpartition(".")[2]
        if isinstance(node, ast.ImportFrom):
            for item in node.names:
                if item.name == alias:
                    full[item.asname or alias] = name
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            head, _, rest = ast.unparse(node.func).partition(".")
            head = full.get(head, head)
            yield (f"{head}.{rest}" if rest else head), node


def within(path: str, places: object) -> bool:
    assert isinstance(places, tuple | dict)
    return any(path == place or (place[-1] == "/" and path.startswith(place)) for place in places)


def row_of(entry: str, rows: tuple[tuple[str, ...], ...]) -> int | None:
    return next((number for number, row in enumerate(rows) if entry in row), None)


def hold(rule: str, offenders: list[str]) -> None:
    """Fail with the rule and each place that breaks it."""
    if offenders:
        pytest.fail(rule + "\n  " + "\n  ".join(offenders), pytrace=False)


# -- who may import whom --------------------------------------------------------------------------


def test_imports_between_packages_go_one_way() -> None:
    wrong = []
    for path in modules(*PACKAGES):
        package = path.partition("/")[0]
        for name, node in imports(path):
            target, _, rest = name.partition(".")
            if target not in (*PACKAGES, "tests") or target in MAY_IMPORT[package]:
                continue
            allowed = package == "agents" and target == "harness"
            if not (allowed and rest.partition(".")[0] in AGENTS_MAY_IMPORT):
                wrong.append(f"{path}:{node.lineno} imports {name}")
    hold(
        "agents -> harness -> drivers, never back; agents take only"
        f" harness.{{{','.join(AGENTS_MAY_IMPORT)}}}. Move what is shared down, or pass it in.",
        wrong,
    )


@pytest.mark.parametrize(
    ("package", "rows"), [("harness", HARNESS_ROWS), ("drivers", DRIVERS_ROWS)]
)
def test_every_module_has_its_row_and_imports_only_from_rows_above(
    package: str, rows: tuple[tuple[str, ...], ...]
) -> None:
    wrong = []
    for path in modules(package):
        entry = path.split("/")[1].removesuffix(".py")
        if entry == "__init__":
            continue
        row = row_of(entry, rows)
        if row is None:
            wrong.append(f"{path}: {entry!r} is in no row: place it in the table of this test")
            continue
        for name, node in imports(path):
            parts = name.split(".")
            if parts[0] != package or len(parts) < 2 or parts[1] == entry:
                continue
            other = row_of(parts[1], rows)
            if other is None or other >= row:
                wrong.append(f"{path}:{node.lineno} (row {row + 1}) imports {name}")
    hold(f"{package}: a module imports only from rows above its own. Move the cut.", wrong)


def test_the_record_consumes_documents_only() -> None:
    wrong = [
        f"{path}:{node.lineno} imports {name}"
        for path in modules("harness/record")
        for name, node in imports(path)
        if name.split(".")[:1] == ["harness"] and name.split(".")[1] in RECORD_NEVER_IMPORTS
    ]
    hold("harness/record reads documents and nothing that acts. Put the fact in a document.", wrong)


def test_libraries_are_imported_behind_their_doors() -> None:
    wrong = []
    for path in modules(*PACKAGES):
        for name, node in imports(path):
            doors = LIBRARY_DOORS.get(name.partition(".")[0])
            if doors is not None and not within(path, doors):
                wrong.append(f"{path}:{node.lineno} imports {name}; its door: {', '.join(doors)}")
    hold("Call what is behind the door instead of the library.", wrong)


def test_heavy_libraries_are_imported_late() -> None:
    wrong = []
    heavy = tuple(map(dotted, TORCH_THROUGHOUT))
    for path in modules(*PACKAGES):
        if path in TORCH_THROUGHOUT:
            continue
        late = late_statements(path)
        for name, node in imports(path):
            is_heavy = name.partition(".")[0] in LATE or name.startswith(heavy)
            if is_heavy and node not in late:
                wrong.append(f"{path}:{node.lineno} imports {name} at import time")
    hold("Import torch and vLLM inside the functions that use them.", wrong)


def test_pure_modules_import_nothing_that_acts() -> None:
    wrong = [
        f"{path}:{node.lineno} imports {name}"
        for path in modules(*PACKAGES)
        if within(path, PURE)
        for name, node in imports(path)
        if name.partition(".")[0] in IMPURE_LIBRARIES
    ]
    hold("Codecs, models and planners decide; I/O, time and chance are handed to them.", wrong)


def test_each_package_name_means_this_repository() -> None:
    wrong = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT):
            wrong.append(f"{package} is {spec.origin if spec else 'not installed'}, not {ROOT}")
    hold("Use an environment of its own for the harness: bash .ci/setup", wrong)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from harness.cli import main; main(['--help']);"
        "print(*{'torch', 'paramiko', 'zmq', 'numpy', 'rich', 'asyncssh'} & set(sys.modules),"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert "Commands:" in done.stdout
    assert not done.stderr.strip(), (
        f"harness --help imports {done.stderr}: import it in the command"
    )


# -- time, chance, processes ----------------------------------------------------------------------


def test_time_and_chance_are_arguments() -> None:
    wrong = []
    for path in modules(*PACKAGES, "tests/unit", "tests/emulated"):
        for name, node in calls(path):
            unseeded = SEEDED.match(name) and not node.args
            ambient = AMBIENT.match(name) and not within(path, EDGES)
            wall = WALL.match(name) and not within(path, WALL_EDGES)
            if unseeded or ambient or wall:
                wrong.append(f"{path}:{node.lineno} calls {name}()")
    hold("Take a Clock or a seeded random.Random as an argument; edges are listed here.", wrong)


def test_unit_tests_do_not_sleep() -> None:
    wrong = [
        f"{path}:{node.lineno} calls {name}"
        for path in modules("tests/unit")
        for name, node in calls(path)
        if name in ("time.sleep", "asyncio.sleep") and ast.unparse(node.args[0]) != "0"
    ]
    hold("Wait for the thing itself, or hand in a virtual clock.", wrong)


def test_nothing_is_killed_by_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in house_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(pkill|killall)\b", line)
    ]
    hold("Stop only what you started, by its recorded pid and start time.", wrong)


def catalog() -> list[str]:
    """Names of all drivers: the keys of the literal table in drivers/catalog.py."""
    for node in tree("drivers/catalog.py").body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "DRIVERS":
            assert node.value is not None
            tables = [inner for inner in ast.walk(node.value) if isinstance(inner, ast.Dict)]
            return [str(ast.literal_eval(key)) for key in tables[0].keys if key is not None]
    return []


def test_no_driver_without_its_dialogue_and_its_emulator() -> None:
    wrong = []
    families = text("drivers/emulators/config.py")
    assert catalog(), "drivers/catalog.py has no literal table DRIVERS"
    for driver in catalog():
        family, _, protocol = driver.rpartition("-")
        if not list((ROOT / "tests/dialogues").glob(f"{driver.replace('-', '_')}*")):
            wrong.append(f"{driver}: no tests/dialogues/{driver.replace('-', '_')}*")
        if not (ROOT / f"drivers/emulators/faces/{protocol}.py").exists():
            wrong.append(f"{driver}: no drivers/emulators/faces/{protocol}.py")
        if not re.search(rf'family: Literal\[[^\]]*"{family}"', families):
            wrong.append(f"{driver}: {family!r} is no family of EmulatedSwitch")
    hold("A driver comes with a vendor's transcript and an emulator that it is tested on.", wrong)


# -- size, names, words ---------------------------------------------------------------------------


def test_functions_modules_and_lines_are_small_enough_to_see() -> None:
    wrong = []
    for path in modules(*PACKAGES, "tests"):
        lines = text(path).splitlines()
        limit = TEST_MODULE_LINES if path.startswith("tests/") else MODULE_LINES
        if len(lines) > limit:
            wrong.append(f"{path} has {len(lines)} lines; {limit} are allowed")
        wrong += [
            f"{path}:{number} has {len(line)} columns; {LINE_COLUMNS} are allowed"
            for number, line in enumerate(lines, 1)
            if len(PRAGMA.sub("", line)) > LINE_COLUMNS
        ]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES:
                    wrong.append(f"{path}:{node.lineno} {node.name} has {size} lines")
    hold(f"Functions to {FUNCTION_LINES} lines, modules to {MODULE_LINES}. Find the cut.", wrong)


def test_names_say_what_is_inside() -> None:
    wrong = []
    for path in modules(*PACKAGES, "tests"):
        *folders, name = path.removesuffix(".py").split("/")
        wrong += [f"{path}: {part!r}" for part in (*folders, name) if part in NO_NAMES]
        if len(folders) - 1 > FOLDERS_DEEP:
            wrong.append(f"{path} lies more than {FOLDERS_DEEP} folders deep")
    hold("Name a module after the one thing it holds, at most two folders deep.", wrong)


def test_no_metaclasses_and_no_global_state() -> None:
    wrong = []
    for path in modules(*PACKAGES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and any(k.arg == "metaclass" for k in node.keywords):
                wrong.append(f"{path}:{node.lineno} {node.name} has a metaclass")
            elif isinstance(node, ast.Global):
                wrong.append(f"{path}:{node.lineno} writes global {', '.join(node.names)}")
    hold("Pass it in, or hold it in an object that somebody owns.", wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [path for path in modules(*PACKAGES) if not ast.get_docstring(tree(path))]
    hold("Open the module with what it is, why it exists, its units and errors.", wrong)


def test_exceptions_to_the_linters_give_their_reason() -> None:
    bare = re.compile(r"#\s*(noqa|type:\s*ignore)(:\s*[A-Z0-9, ]+|\[[\w, -]*\])?\s*$")
    wrong = []
    for path in modules(*PACKAGES):
        lines = ["", *text(path).splitlines()]
        for number, line in enumerate(lines):
            above = lines[number - 1].strip()
            explained = above.startswith("#") or ("# type: ignore" in above and "noqa" not in line)
            late_import = (
                "noqa: PLC0415" in line
            )  # says why by itself: heavy, and not always needed
            if bare.search(line) and not explained and not late_import:
                wrong.append(f"{path}:{number} {line.strip()}")
    hold("Say why, after the code of the rule or in a comment on the line above.", wrong)


def house_files() -> Iterator[Path]:
    """Every text file of the repository that people write."""
    for pattern in ("*.md", "*.toml", ".ci/*", ".github/**/*.yml", "scenarios/**/*.toml"):
        yield from (path for path in ROOT.glob(pattern) if path.is_file())
    yield from (ROOT / path for path in modules(*PACKAGES, "tests"))


def test_nothing_in_the_tree_belongs_to_one_machine() -> None:
    hosts = [".".join(p) for p in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]
    hosts += [".".join(p) for p in (("debian", "org"), ("pytorch", "org"), ("anaconda", "org"))]
    foreign = re.compile(
        "|".join(map(re.escape, hosts)) + r"|(?<![\w.$}])/(work|home|Users)/\w|--(extra-)?index-url"
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {found.group()}"
        for path in house_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := foreign.search(line))
    ]
    hold("Name no package registry and no folder of one machine.", wrong)


# -- numbers wear units ---------------------------------------------------------------------------


def has_unit(name: str) -> bool:
    return any(name == unit or name.endswith(f"_{unit}") for unit in (*UNITS, "port", "count"))


def test_numeric_fields_of_schemas_name_their_unit() -> None:
    wrong = []
    for path in SCHEMAS:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            for field in node.body:
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                name = field.target.id
                plain = ast.unparse(field.annotation).replace(" | None", "")
                if plain in ("int", "float") and not has_unit(name) and name not in BARE_NUMBERS:
                    wrong.append(f"{path}:{field.lineno} {node.name}.{name}")
    hold("End a quantity's name with its unit; counts and ids are listed in BARE_NUMBERS.", wrong)


def test_fields_of_documents_end_in_the_unit_they_declare() -> None:
    wrong = []
    for path in modules("harness"):
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                unit = declared_unit(value)
                if not unit or not isinstance(key, ast.Constant):
                    continue
                ending = UNIT_OF.get(unit, unit)
                if not (key.value == ending or str(key.value).endswith(f"_{ending}")):
                    wrong.append(f"{path}:{key.lineno} {key.value!r} is declared in {unit!r}")
    hold("A field of a document ends in its unit: dark_ms, busbw_gb_per_s.", wrong)


def declared_unit(value: ast.expr) -> str:
    """The `unit` given to a ``Field(...)`` literal, or nothing."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Field")):
        return ""
    for keyword in value.keywords:
        if keyword.arg == "unit" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ""
