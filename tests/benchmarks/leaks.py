"""Layouts switched there and back, again and again: does anything grow?

`harness run` as a user makes it, under load. After the first cycles and after the last one, the
processes of the run are looked at from outside, role by role: how many there are, in how many
process groups, their open files, threads and resident memory. Mark: what is counted is the same
then, memory within 10 %, and when the run is over none of its processes is left.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.processes import Process, stat
from tests.emulated.lab import lab

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LIMIT_S = 3600.0
EARLY = 5
"""After so many cycles all that is done once has been done; at the end it must be as then."""
GROWTH_MAX = 1.1
LOOKS, LOOK_S = 3, 0.1
"""The least of some looks is told: a transfer under way has a thread and a socket."""
KEYS = ("processes", "groups", "files", "threads", "rss_mb")
ROLES = ("harness", "agents", "agents.store", "agents.generation.rank")
"""Modules that the processes run."""
PARENT, GROUP, THREADS, RSS_PAGES = 1, 2, 17, 21
"""Places in ``/proc/PID/stat``, counted from the state."""

PACED = f"""
layout = "4xTP1"
workload = "{SCENARIOS}/workloads/short.toml"
profile = "{SCENARIOS}/profiles/qwen2.5-14b-h800.toml"
kv_max_tokens = 32768
"""
POOL = 'pool = ["4xTP1", "2xTP2"]\n'
VLLM = f"""
engine = "vllm"
layout = "2xTP1"
nodes = ["g0"]
workload = "{SCENARIOS}/workloads/short.toml"
kv_max_tokens = 32768
"""


@dataclass(frozen=True)
class Arm:
    """What generates, and how it is switched."""

    name: str
    table: str
    strategy: str
    layouts: str
    """There, and back to what is up first."""
    cycles: int


ARMS = (
    Arm("paced, rebuild", PACED, "rebuild", '["2xTP2", "4xTP1"]', 50),
    Arm("paced, pool", PACED + POOL, "pool", '["2xTP2", "4xTP1"]', 50),
    Arm("paced, restart", PACED, "restart", '["2xTP2", "4xTP1"]', 50),
    Arm("vLLM, rebuild", VLLM, "rebuild", '["1xTP2", "2xTP1"]', 50),
)
SCENARIO = f"""
question = "Does anything grow?"
bench = "{SCENARIOS}/benches/generation-2.toml"
timeout_s = {LIMIT_S}
[generation]
"""
STEP = f"""
[[steps]]
do = "generate"
timeout_s = {LIMIT_S}
rest_s = 0.1
"""
CYCLING = """
layouts = {layouts}
count = {switches}
strategy = "{strategy}"
migrations = {switches}
"""


@dataclass
class Counts:
    """Of all processes of one role."""

    processes: int = 0
    files: int = 0
    threads: int = 0
    rss_mb: float = 0.0
    groups: set[str] = field(default_factory=set)

    def add(self, pid: int) -> None:
        """Count one process, if it is still there."""
        try:
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            return
        if fields := stat(pid):
            self.processes += 1
            self.files += files
            self.threads += int(fields[THREADS])
            self.rss_mb += int(fields[RSS_PAGES]) * os.sysconf("SC_PAGE_SIZE") / 1e6
            self.groups.add(fields[GROUP])

    def row(self) -> dict[str, float]:
        return vars(self) | {"groups": len(self.groups)}


Looked = dict[str, dict[str, float]]
"""Role -> key -> count."""


def run() -> dict[str, Any]:
    """Return, for each arm, every role's counts early and late, and whether they are flat."""
    rows = [_row(arm) for arm in ARMS]
    return {
        "rows": rows,
        "mark": "counts as early on, memory within 10 %, no process left behind",
        "held": all(not row["grown"] and not row["left"] for row in rows),
        "load": os.getloadavg()[0],
    }


def _row(arm: Arm) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as made:
        steps = "".join(
            STEP
            + CYCLING.format(layouts=arm.layouts, strategy=arm.strategy, switches=2 * cycles)
            + STEP
            for cycles in (EARLY, arm.cycles - EARLY)
        )
        (made.folder / "scenario.toml").write_text(SCENARIO + arm.table + steps)
        process, seen = made.start(), set[Process]()
        early, late = (_during(step, made.run_folder, process, seen) for step in (1, 3))
        code, out = made.finish(process, LIMIT_S)
        if code:
            raise RuntimeError(out)
        requests = sum(row["requests"] for row in made.events("generated"))
    return {
        "name": arm.name,
        "cycles": arm.cycles,
        "requests": requests,
        "early": early,
        "late": late,
        "grown": list(_grown(early, late)),
        "left": [process.name for process in seen if process.is_alive()],
    }


def _during(
    step: int, run_folder: Path, process: subprocess.Popen[str], seen: set[Process]
) -> Looked:
    """Look at the run while it only generates, in a step without switches."""
    journal, deadline = run_folder / "journal.jsonl", time.monotonic() + LIMIT_S
    begun = b'"doc":"event","stream":"step"'
    while not journal.exists() or journal.read_bytes().count(begun) < 2 * step + 1:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(process.communicate()[0])
        time.sleep(LOOK_S)
    looks = []
    for _ in range(LOOKS):
        looks.append(_look(process.pid, seen))
        time.sleep(LOOK_S)
    return {
        role: {key: min(look[role][key] for look in looks) for key in KEYS}
        for role in looks[0]
        if all(role in look for look in looks)
    }


def _look(root: int, seen: set[Process]) -> Looked:
    counts: dict[str, Counts] = defaultdict(Counts)
    for pid in _family(root):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            role = next((word for word in words if word in ROLES), "other")
            seen.add(Process.of(pid, role))
        except (OSError, ProcessLookupError):
            continue
        counts[role].add(pid)
    return {role: found.row() for role, found in counts.items()}


def _family(root: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        if fields := stat(int(path.name)):
            children[int(fields[PARENT])].append(int(path.name))
    pids = [root]
    while pids:
        pid = pids.pop()
        pids += children[pid]
        yield pid


def _grown(early: Looked, late: Looked) -> Iterator[str]:
    """Yield what is not as it was."""
    for role in early.keys() | late.keys():
        for key in KEYS:
            before, after = (found.get(role, {}).get(key, 0) for found in (early, late))
            allowed = before * GROWTH_MAX if key == "rss_mb" else before
            if after > allowed:
                yield f"{key} of {role}: {before:.6g} > {after:.6g}"


def table(figures: dict[str, Any]) -> str:
    lines = []
    for row in figures["rows"]:
        lines.append(f"{row['name']}: {row['requests']} requests; cycle {EARLY} > {row['cycles']}")
        for role, early in row["early"].items():
            late = row["late"].get(role, dict.fromkeys(KEYS, 0))
            cells = (f"{key} {early[key]:.4g} > {late[key]:.4g}" for key in KEYS)
            lines.append(f"  {role:24}" + "".join(f"{cell:26}" for cell in cells))
        lines.append(f"  grown: {row['grown'] or 'nothing'}; left behind: {row['left'] or 'none'}")
    held = "held" if figures["held"] else "MISSED"
    lines.append(f"mark: {figures['mark']}: {held} (load {figures['load']:.1f})")
    return "\n".join(lines)
