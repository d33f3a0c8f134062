"""The tests for real switches, run as their user would, on a unit that happens to be emulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from driver_bench import Unit, emulated

from drivers.base import Matching
from drivers.emulators.config import Faults

LIMIT_S = 100.0
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "tests/hardware")
ROOT = Path(__file__).parents[2]
AS_FOUND = ((1, 9), (2, 12), (8, 16), (7, 14))
"""Two circuits of ours, one of others, and one that holds a port of ours and is not all ours."""
BENCH = """
name = "rack"
world = "live"
launcher = "manual"
listen = "192.0.2.1:5555"
keys = "keys"

[nodes.a]
tor = "left"
host = "a"
interface = "eth0"
address = "192.0.2.2"
[tors.left]
uplinks = 1

[switches.ocs]
driver = "{driver}"
url = "{url}"
ports = "1-6,9-14"
exchange_timeout_s = 1.0
{secrets}
[cables]
"left:u1" = "ocs:1/9"
"""
SECRETS = """known_hosts = "known_hosts"
password_file = "password"
"""


def write_bench(unit: Unit, folder: Path) -> Path:
    secrets = SECRETS if unit.url.startswith("ssh://") else ""
    path = folder / "my-lab.toml"
    path.write_text(BENCH.format(driver=unit.driver, url=unit.url, secrets=secrets))
    return path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PYTEST, f"--basetemp={folder / 'temp'}", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "300"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, out


def map_of(unit: Unit) -> Matching:
    with closing(unit.open()) as ocs:
        return ocs.read()


@pytest.mark.parametrize(("protocol", "server"), [("tl1", "ssh"), ("scpi", "tcp")])
def test_a_good_switch_passes_and_keeps_its_map(tmp_path: Path, protocol: str, server: str) -> None:
    with emulated(tmp_path, protocol, server, circuits=AS_FOUND) as unit:
        bench = write_bench(unit, tmp_path)
        code, out = finish(start(tmp_path, "--bench", str(bench)))
        assert code == 0, out
        assert "4 passed" in out
        assert map_of(unit) == Matching.of(AS_FOUND)
    transcripts = sorted((tmp_path / "temp").rglob("transcript-*"))
    assert len(transcripts) == 4  # one for the count of ports, three for what the check asks for


def test_what_is_wrong_with_a_switch_is_named_and_its_map_kept(tmp_path: Path) -> None:
    faults = Faults(failed_ports=(3,), deny_ports=(4,))
    with emulated(tmp_path, "scpi", "tcp", circuits=AS_FOUND, faults=faults) as unit:
        bench = write_bench(unit, tmp_path)
        code, out = finish(start(tmp_path, "--bench", str(bench)))
        assert code == 1, out
        assert "these ports have failed: [3]" in out
        assert "cannot connect 4,12" in out
        assert map_of(unit) == Matching.of(AS_FOUND)


def test_an_interrupted_check_gives_the_map_back(tmp_path: Path) -> None:
    with emulated(tmp_path, "tl1", "ssh", circuits=AS_FOUND) as unit:
        bench = write_bench(unit, tmp_path)
        process = start(tmp_path, "--bench", str(bench), "-k", "contract")
        deadline = time.monotonic() + LIMIT_S
        while map_of(unit) == Matching.of(AS_FOUND):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        code, out = finish(process)
        assert code == pytest.ExitCode.INTERRUPTED, out
        assert map_of(unit) == Matching.of(AS_FOUND)


def test_a_switch_that_cannot_be_given_back_says_what_to_do(tmp_path: Path) -> None:
    faults = Faults(die_on_command=2)
    with emulated(tmp_path, "scpi", "tcp", circuits=AS_FOUND, faults=faults) as unit:
        bench = write_bench(unit, tmp_path)
        code, out = finish(start(tmp_path, "--bench", str(bench), "-k", "contract"))
    assert code == 1, out
    (kept,) = (tmp_path / "temp").rglob("ocs-as-found.toml")
    assert f"ocs is NOT as it was found; try: harness ocs apply ocs {kept} --bench {bench}" in out
    assert kept.read_text() == '[circuits]\n"1" = 9\n"2" = 12'


def test_without_a_bench_every_test_says_how_to_give_one(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path))
    assert code == 0, out
    assert "4 skipped" in out
    assert "pytest tests/hardware --bench my-lab.toml" in out


def test_a_bench_that_is_not_live_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = ROOT / "scenarios/benches/emulated-4.toml"
    code, out = finish(start(tmp_path, "--bench", str(path)))
    assert code == pytest.ExitCode.USAGE_ERROR, out
    assert len(out.strip().splitlines()) == 1
    assert "must be a live bench with switches; its world is 'emulated'" in out
