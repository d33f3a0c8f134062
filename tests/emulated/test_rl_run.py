"""The RL loop as a user runs it: trained, synced, resumed, and with ranks and porters killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import stat
from tests.emulated.lab import Lab, lab

pytestmark = [pytest.mark.emulated, pytest.mark.root, pytest.mark.timeout(300)]

SCENARIOS = Path(__file__).parents[2] / "scenarios"
BENCH = """
name = "loop"
world = "emulated"
launcher = "namespaces"
[nodes.g0]
tor = "tor0"
pod = "generate"
emulated_gpus = 2
[nodes.g1]
tor = "tor1"
pod = "generate"
emulated_gpus = 1
[nodes.t0]
tor = "tor2"
pod = "train"
[nodes.t1]
tor = "tor3"
pod = "train"
[tors.tor0]
uplinks = 0
[tors.tor1]
uplinks = 0
[tors.tor2]
uplinks = 0
[tors.tor3]
uplinks = 0
"""
SCENARIO = f"""
question = "Does the loop end well?"
bench = "bench.toml"
timeout_s = 200.0
[generation]
layout = "3xTP1"
workload = "{SCENARIOS / "workloads/short.toml"}"
profile = "{SCENARIOS / "profiles/qwen2.5-14b-h800.toml"}"
speed = 5.0
[training]
layout = "DP2"
bytes_scale = 0.00002
[[steps]]
do = "rl"
bucket = "64KiB"
replan_s = 0.5
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def asked(bench: Lab, step: str) -> None:
    (bench.folder / "bench.toml").write_text(BENCH)
    (bench.folder / "scenario.toml").write_text(SCENARIO + step)


def pids(bench: Lab, module: str) -> list[int]:
    """Return the processes of the run that run a module."""
    logs = str(bench.run_folder.resolve() / "logs").encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if module.encode() in words and logs in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has just ended
            continue
    return sorted(found)


def nothing_is_left(bench: Lab) -> None:
    for module in ("agents.generation.rank", "agents.training.rank", "agents.porter"):
        assert pids(bench, module) == [], module


def test_every_sample_trains_once_and_every_version_gets_everywhere(bench: Lab) -> None:
    asked(bench, 'steps = 3\npolicies = ["static:3xTP1", "orchestrl"]\n')
    code, out = bench.run()
    assert code == 0, out
    for policy in ("static:3xTP1", "orchestrl"):
        rows = [row for row in bench.events("rl_step") if row["policy"] == policy]
        assert [row["samples"] for row in rows] == [64, 64, 64]
        assert all(len(row["staleness"]) <= 2 for row in rows)
        syncs = [row for row in bench.events("sync") if row["policy"] == policy]
        assert [(row["outcome"], row["receivers"]) for row in syncs] == [("synced", 2)] * 3
    digests = {row["digest"] for row in bench.events("rl")}
    assert len(digests) == 1  # the same requests under both
    phases = bench.events("phase")
    assert {row["op"] for row in phases} >= {"all_gather", "reduce_scatter"}
    assert "static:3xTP1" in out
    nothing_is_left(bench)


def test_weights_go_in_pairs_and_a_source_that_dies_is_replaced(bench: Lab) -> None:
    asked(bench, 'steps = 4\npolicies = ["static:3xTP1"]\nsync = "pairs"\n')
    process = bench.start()
    bench.await_event(process, "sync")
    agent = bench.pid_of_agent(process, "t1")
    (porter,) = (p for p in pids(bench, "agents.porter") if parent_of(p) == agent)
    os.kill(porter, signal.SIGKILL)
    code, out = bench.finish(process)
    assert code == 0, out
    rows = bench.events("sync")
    assert {(row["path"], row["receivers"]) for row in rows} == {("pairs", 2)}
    synced = [row for row in rows if row["outcome"] == "synced"]
    assert [row["version"] for row in synced] == [1, 2, 3, 4]
    (failed,) = (row for row in rows if row["outcome"] == "failed")
    assert "t1: send_weights failed: PorterDied" in failed["error"]
    again = next(row for row in synced if row["version"] == failed["version"])
    assert (failed["sources"], again["sources"], again["attempt"]) == (2, 1, 1)
    assert [row["sources"] for row in synced if row is not again] == [2, 2, 2]
    assert all(0 < row["wire_s"] < row["total_s"] for row in synced)
    nothing_is_left(bench)


def parent_of(pid: int) -> int:
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def test_a_training_rank_killed_in_a_step_costs_that_step_only(bench: Lab) -> None:
    asked(bench, 'steps = 3\npolicies = ["static:3xTP1"]\n')
    process = bench.start()
    bench.await_event(process, "rl_step")
    bench.await_event(process, "phase", lambda row: row["version"] == 1)
    os.kill(pids(bench, "agents.training.rank")[0], signal.SIGKILL)
    code, out = bench.finish(process)
    assert code == 0, out
    assert [row["index"] for row in bench.events("rl_step")] == [0, 1, 2]
    assert any("opened anew" in row["text"] for row in bench.events("note"))
    nothing_is_left(bench)


def test_a_porter_killed_between_syncs_is_started_again(bench: Lab) -> None:
    asked(bench, 'steps = 3\npolicies = ["static:3xTP1"]\n')
    process = bench.start()
    bench.await_event(process, "sync")
    for pid in pids(bench, "agents.porter"):
        os.kill(pid, signal.SIGKILL)
    code, out = bench.finish(process)
    assert code == 0, out
    outcomes = [row["outcome"] for row in bench.events("sync")]
    assert outcomes.count("synced") == 3
    assert "failed" in outcomes
    nothing_is_left(bench)


def test_a_killed_coordinator_is_followed_by_a_run_that_goes_on(bench: Lab) -> None:
    asked(bench, 'steps = 4\npolicies = ["static:3xTP1"]\n')
    process = bench.start()
    bench.await_event(process, "rl_step", lambda row: row["index"] == 1)
    first = bench.run_folder.resolve()
    process.kill()
    bench.finish(process)
    code, out = bench.run("--resume", str(first))
    assert code == 0, out
    done = [row["index"] for row in bench.events("rl_step")]
    assert done in ([1, 2, 3], [2, 3])  # the last step may have been made and not kept
    assert bench.events("rl")[0]["staleness_max"] <= 1
    nothing_is_left(bench)


def test_an_interrupted_loop_leaves_nothing_behind(bench: Lab) -> None:
    asked(bench, 'steps = 50\npolicies = ["orchestrl"]\n')
    process = bench.start()
    bench.await_event(process, "rl_step")
    process.send_signal(signal.SIGINT)
    code, out = bench.finish(process)
    assert code == 4, out
    nothing_is_left(bench)
