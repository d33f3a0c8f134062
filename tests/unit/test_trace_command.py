"""`harness trace` at the prompt: what is told, what is written, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_bench import SCENARIOS, compute, recv, reduce, send

from harness.cli import main

OVERLAP = str(SCENARIOS / "traces" / "overlap.json")
SIM = str(SCENARIOS / "benches" / "sim-64.toml")
H800 = str(SCENARIOS / "calibrations" / "h800.toml")


def a_file(folder: Path, *programs: list[dict[str, object]], **head: object) -> str:
    ranks = [{"ranks": str(rank), "nodes": nodes} for rank, nodes in enumerate(programs)]
    path = folder / "t.json"
    path.write_text(json.dumps({"schema": "rlsim-trace/1", "programs": ranks, **head}))
    return str(path)


def test_a_sound_trace_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "check", OVERLAP]) == 0
    told = capsys.readouterr().out
    assert "is sound: 288 nodes of 16 ranks, 1 program; GPU: h800" in told
    assert main(["trace", "check", OVERLAP, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kinds"] == {"compute on gpu": 160, "all_reduce": 128}
    assert (found["communications"], found["bytes"]) == (8, 8 * 2**27)


def test_every_problem_is_told_and_ends_with_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_file(tmp_path, [compute(1, deps=(1,)), send(2, 1)], [compute(1)])
    assert main(["trace", "check", path]) == 2
    told = capsys.readouterr().err
    assert "a cycle of dependencies: node 1 -> node 1" in told
    assert "nobody receives what is in rank 0 node 2" in told


def test_a_replay_says_what_it_rests_on_before_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = tmp_path / "timeline.json"
    args = ["trace", "run", OVERLAP, "--bench", SIM, "--timeline", str(timeline)]
    assert main(args) == 0
    told = capsys.readouterr().out
    assert told.index("Simulated:") < told.index("nccl on h800") < told.index("finished: 288 nodes")
    assert "exposed communication [ms]" in told
    assert "busbw [GB/s]" in told
    assert json.loads(timeline.read_text())["traceEvents"]
    assert main(args) == 2, "a file that is there is not written over"


def test_json_has_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "run", OVERLAP, "--bench", SIM, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["end"] == "finished"
    assert len(found["ranks"]) == 16
    assert found["communications"][0]["basis"] == "model"


def test_a_measured_table_goes_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = SCENARIOS.parent / "tests" / "data" / "nccl-tests" / "nccl_allreduce.log"
    path = a_file(tmp_path, *[[reduce(1, 2**30)]] * 8, gpu="a100")
    args = ["trace", "run", path, "--bench", SIM, "--json"]
    rows = []
    for more in ([], ["--nccl-tests", f"all_reduce={log}"]):
        assert main([*args, *more]) == 0
        rows.append(json.loads(capsys.readouterr().out)["communications"][0])
    assert [row["basis"] for row in rows] == ["model", "table"]
    (line,) = (line for line in log.read_text().splitlines() if line.split()[:1] == [str(2**30)])
    assert rows[1]["mean_us"] == pytest.approx(float(line.split()[4]), rel=1e-3)


def test_the_end_of_what_is_blocked_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tmp_path / "bench.toml"
    text = (SCENARIOS / "benches" / "emulated-4.toml").read_text().partition("[simulation]")[0]
    for word, other in (
        ('world = "emulated"', 'world = "simulated"'),
        ('launcher = "namespaces"', 'launcher = "manual"'),
        ("[links]", f'[simulation]\ncalibration = "{H800}"\n[links]\nelectrical = "none"'),
    ):
        assert word in text
        text = text.replace(word, other, 1)
    bench.write_text(text)
    path = a_file(tmp_path, [send(1, 1)], [recv(1, 0)], gpu="h800")
    args = ["trace", "run", path, "--bench", str(bench)]
    assert main(args) == 1
    assert "no way leads from rank 0" in capsys.readouterr().out
    assert main([*args, "--circuits", "ring"]) == 0, "a circuit leads there"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--bench", str(SCENARIOS / "benches" / "lab.toml")], 'world = "live"'),
        (["--bench", str(SCENARIOS / "benches" / "learns.toml")], "names no calibration"),
        (
            ["--bench", str(SCENARIOS / "benches" / "rl-8.toml"), "--calibration", H800],
            "16 ranks, but the bench has 12 GPUs on its 4 nodes",
        ),
        (["--bench", SIM, "--speed", "n99=0.5"], "node 'n99' is not of this bench"),
        (["--bench", SIM, "--speed", "n1"], "expected NODE=SHARE"),
        (["--bench", SIM, "--speed", "n1=fast"], "expected a number"),
        (["--bench", SIM, "--speed", "n1=0"], "expected more than 0"),
        (["--bench", SIM, "--nccl-tests", "sum=x"], "expected one of all_reduce"),
        (["--bench", SIM, "--gpu", "t4"], "nobody measured collectives on 't4'"),
    ],
)
def test_what_cannot_be_replayed_is_one_message(
    args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "run", OVERLAP, *args]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
