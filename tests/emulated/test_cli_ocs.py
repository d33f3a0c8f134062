"""`harness emulate` in one terminal, `harness ocs` in another, as a newcomer would try them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import ExitCode

START_S = 20


@dataclass
class Emulated:
    """A unit started by `harness emulate`, with what it said of itself."""

    process: subprocess.Popen[str]
    bench: Path
    folder: Path

    def ocs(self, *words: str) -> int:
        return main(["ocs", *words, "--bench", str(self.bench)])


def start(*options: str) -> Emulated:
    process = subprocess.Popen(
        [Path(sys.executable).with_name("harness"), "emulate", "polatis", "--json", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        process.wait(5)
        process.stdout.close()
        pytest.fail(f"harness emulate said nothing within {START_S} s")
    said = json.loads(line)
    return Emulated(process, Path(said["bench"]), Path(said["folder"]))


def stop(unit: Emulated, number: int = signal.SIGINT) -> int:
    assert unit.process.stdout is not None
    unit.process.send_signal(number)
    try:
        return unit.process.wait(10)
    finally:
        unit.process.kill()
        unit.process.stdout.close()


@pytest.fixture
def unit() -> Iterator[Emulated]:
    started = start("--switch-ms", "5", "--face", "scpi-serial", "--face", "tl1-ssh")
    yield started
    stop(started)


def test_a_circuit_made_on_one_line_is_seen_on_the_other(
    unit: Emulated, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unit.ocs("connect", "tl1-ssh", "1:17", "2:18") == 0
    assert "make 1:17 2:18" in capsys.readouterr().out
    assert unit.ocs("show", "scpi-serial", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(row["ingress"], row["egress"]) for row in shown["circuits"]] == [(1, 17), (2, 18)]
    assert unit.ocs("disconnect", "scpi-serial", "1:17") == 0
    assert "1 circuits stay" in capsys.readouterr().out


def test_a_saved_map_is_brought_back_and_verified_with_its_light(
    unit: Emulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "map.toml"
    assert unit.ocs("connect", "scpi-serial", "1:17", "3:20") == 0
    capsys.readouterr()
    assert unit.ocs("show", "scpi-serial", "--map") == 0
    saved.write_text(capsys.readouterr().out)
    assert unit.ocs("verify", "tl1-ssh", str(saved)) == 0
    assert "all lit" in capsys.readouterr().out

    assert unit.ocs("disconnect", "scpi-serial", "3:20") == 0
    assert unit.ocs("verify", "tl1-ssh", str(saved)) == ExitCode.FAILED
    assert "missing: 3:20" in capsys.readouterr().out

    assert unit.ocs("apply", "tl1-ssh", str(saved)) == 0
    assert "make 3:20; 1 circuits stay" in capsys.readouterr().out
    assert unit.ocs("apply", "tl1-ssh", str(saved)) == 0
    assert "nothing to change" in capsys.readouterr().out


def test_a_dry_run_shows_the_command_and_sends_nothing(
    unit: Emulated, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unit.ocs("connect", "tl1-ssh", "1:17", "--dry-run") == 0
    assert "ENT-PATCH::1,17:" in capsys.readouterr().out
    assert unit.ocs("show", "tl1-ssh") == 0
    assert "no circuit" in capsys.readouterr().out


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_ports_that_are_not_ours_are_refused_before_anything_is_sent(
    dry: list[str], unit: Emulated, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = unit.bench.read_text().replace('ports = "1-32"', 'ports = "1-4,17-20"')
    unit.bench.write_text(bench)
    assert unit.ocs("connect", "tl1-ssh", "5:21", *dry) == ExitCode.USAGE
    assert "5->21: port 5 is not ours" in capsys.readouterr().err
    assert unit.ocs("show", "tl1-ssh") == 0
    assert "no circuit" in capsys.readouterr().out


def test_a_circuit_of_somebody_else_is_shown_and_left_alone(
    unit: Emulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unit.ocs("connect", "tl1-ssh", "8:24") == 0
    unit.bench.write_text(unit.bench.read_text().replace('"1-32"', '"1-4,17-20"'))
    empty = tmp_path / "map.toml"
    empty.write_text('[circuits]\n"1" = 17\n')
    assert unit.ocs("apply", "scpi-serial", str(empty)) == 0
    capsys.readouterr()
    assert unit.ocs("show", "scpi-serial") == 0
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  8:24") and line.endswith("not ours") for line in said)


def test_a_busy_port_is_refused_with_the_circuit_that_holds_it(
    unit: Emulated, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unit.ocs("connect", "tl1-ssh", "1:17") == 0
    assert unit.ocs("connect", "tl1-ssh", "1:18") == ExitCode.USAGE
    assert "needs ports of 1:17" in capsys.readouterr().err


def test_a_changed_host_key_is_refused(
    unit: Emulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = start("--face", "tl1-ssh", "--dir", str(tmp_path / "other"))
    try:
        theirs = (other.folder / "known_hosts").read_text().split(" ", 1)[1]
    finally:
        stop(other)
    known = unit.folder / "known_hosts"
    known.write_text(known.read_text().split(" ", 1)[0] + " " + theirs)
    assert unit.ocs("show", "tl1-ssh") == ExitCode.INFRASTRUCTURE
    said = capsys.readouterr().err
    assert "host key" in said
    assert "Traceback" not in said


def test_a_wrong_password_is_told_without_showing_it(
    unit: Emulated, capsys: pytest.CaptureFixture[str]
) -> None:
    (unit.folder / "password").write_text("not-the-password\n")
    assert unit.ocs("show", "tl1-ssh") == ExitCode.INFRASTRUCTURE
    said = capsys.readouterr()
    assert "not-the-password" not in said.out + said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_an_emulated_switch_and_leaves_nothing(number: int) -> None:
    unit = start("--face", "tl1-ssh", "--face", "scpi-tcp")
    assert stop(unit, number) == 0
    assert not unit.folder.exists()


def test_a_kept_folder_keeps_the_host_key_and_the_password(tmp_path: Path) -> None:
    folder = tmp_path / "unit"
    kept = []
    for _ in range(2):
        unit = start("--face", "tl1-ssh", "--dir", str(folder))
        stop(unit)
        key = (folder / "known_hosts").read_text().split(" ", 1)[1]
        kept.append((key, (folder / "password").read_text()))
    assert kept[0] == kept[1]
    assert os.stat(folder / "password").st_mode & 0o777 == 0o600
