"""The paced engine against its profile: real time to ideal time, and what pacing costs.

Two instances, a process each, run the same seeded requests: 64 at once, heavy-tailed, replaced
from a queue as they finish, with a command every 50 ms (one that changes nothing, so that the ideal
stays known; it interrupts the wait and replans). The ideal is the pure life cycle over the same
requests on a virtual clock. CPU is that of the whole process while it runs, outputs encoded.

Marks: within 2 % of the profile; under 20 % of a core for 64 running requests.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from agents.generation.base import Seat
from agents.generation.paced import limits_of, make
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.advance import advance_until
from harness.model.batching import Batching
from harness.model.intake import submit
from harness.model.load import load_profile
from harness.model.placement import Instance
from harness.model.profile import costs_of
from harness.model.requests import Carried
from harness.wire.generation import EngineSpec, Output, Work

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
INSTANCES, REQUESTS, RUNNING = 2, 120, 64
COMMAND_NS = 50 * NS_PER_MS
LIMIT_S = 300


def run() -> dict[str, object]:
    """Return, for each instance, ideal and real time, lateness and CPU time."""
    argv = [sys.executable, "-m", "tests.benchmarks.pacing"]
    children = [
        subprocess.Popen([*argv, str(number)], cwd=ROOT, stdout=subprocess.PIPE)
        for number in range(INSTANCES)
    ]
    try:
        rows = [json.loads(child.communicate(timeout=LIMIT_S)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return {
        "instances": rows,
        "mark": "real within 2 % of ideal; CPU < 20 % of a core for 64 running",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def table(figures: dict[str, object]) -> str:
    rows = figures["instances"]
    assert isinstance(rows, list)
    columns = (
        "ideal_s", "real_s", "off_pct", "steps", "late_step_ms", "running", "cpu_pct", "cpu_64_pct"
    )  # fmt: skip
    lines = ["".join(f"{column:>14}" for column in columns)]
    lines += ["".join(f"{row[column]:14.4g}" for column in columns) for row in rows]
    lines.append(f"mark: {figures['mark']} (load {figures['load']}, {figures['cores']} cores)")
    return "\n".join(lines)


def requests(seed: int) -> list[Carried]:
    """Prompts of 100 to 600 tokens, responses log-normal about 500."""
    rng = random.Random(seed)
    return [
        Carried(f"r{n}", rng.randint(100, 600), min(1500, round(rng.lognormvariate(6.0, 0.7))), 0)
        for n in range(REQUESTS)
    ]


def one(seed: int) -> dict[str, float]:
    """Run one instance in this process."""
    profile, instance = load_profile(PROFILE), Instance(name="i", gpus=(0,))
    spec = EngineSpec(engine="paced", profile=profile, bytes_scale=1e-4, sequences_max=RUNNING)
    waiting = requests(seed)
    twin = Batching(limits_of(spec, profile, instance.layout))
    for request in waiting:
        submit(twin, request)
    ideal = advance_until(twin, costs_of(profile, instance.layout), 0)

    ended, ended_ns, encoder = 0, 0, msgspec.msgpack.Encoder()

    def tell(output: Output) -> None:
        nonlocal ended, ended_ns
        encoder.encode(output)
        if output.ended:
            ended, ended_ns = ended + 1, time.monotonic_ns()

    engine = make(spec, tell)
    seat = Seat(instance, 0, 0, "127.0.0.1", "", range(0))
    engine.build(seat, 0, _unmarked)
    engine.submit([Work(carried=request) for request in waiting])
    cpu, began_ns = time.process_time(), time.monotonic_ns()
    command_ns = began_ns

    def wait(until_ns: int) -> bool:
        due_ns = min(until_ns, command_ns)
        time.sleep(max(0, due_ns - time.monotonic_ns()) / NS_PER_S)
        return command_ns <= until_ns

    while ended < REQUESTS:
        command_ns += COMMAND_NS
        engine.run(wait)
        engine.admit(allowed=True)
    cpu = time.process_time() - cpu
    stats = engine.stats()
    real_ns = ended_ns - began_ns
    engine.close()
    running = stats.generated_tokens / stats.steps
    return {
        "ideal_s": ideal.now_ns / NS_PER_S,
        "real_s": real_ns / NS_PER_S,
        "off_pct": 100 * (real_ns / ideal.now_ns - 1),
        "steps": stats.steps,
        "late_step_ms": stats.late_ns / stats.steps / NS_PER_MS,
        "running": running,
        "cpu_pct": 100 * cpu * NS_PER_S / real_ns,
        "cpu_64_pct": 100 * cpu * NS_PER_S / real_ns * 64 / running,
    }


def _unmarked(stage: str) -> AbstractContextManager[object]:
    return nullcontext(stage)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(one(int(sys.argv[1]))))
