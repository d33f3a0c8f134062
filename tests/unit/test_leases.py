"""Leases on switches: who is refused, by whom it is told, and that a dead holder holds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bench.leases import held
from harness.errors import InfrastructureError
from harness.model.bench import Switch, Tor


def switch(ports: str, url: str = "tcp://10.0.0.5:5025") -> dict[str, Switch]:
    return {"agg0": Switch(driver="polatis-scpi", url=url, ports=ports)}


OTHER = """
import sys, time
from pathlib import Path
from harness.bench.leases import held
from harness.model.bench import Switch
spec = Switch(driver="polatis-scpi", url=sys.argv[1], ports=sys.argv[2])
with held({"x": spec}, "run 7", Path(sys.argv[3])):
    print("held", flush=True)
    sys.stdin.read()
"""

OTHER_TOR = (
    OTHER.replace("Switch", "Tor")
    .replace('"polatis-scpi"', '"linux-ssh"')
    .replace(", ports=sys.argv[2]", "")
    .replace("argv[3]", "argv[2]")
)


@pytest.fixture
def other(tmp_path: Path):
    """Another process that holds ports 1-4 and 17-20."""
    argv = [sys.executable, "-c", OTHER, "tcp://10.0.0.5:5025", "1-4,17-20", str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_port_that_another_process_holds_is_refused_and_the_holder_named(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    with (
        pytest.raises(InfrastructureError, match=r"agg0: ports 4,17 are held by run 7 \(pid \d+\)"),
        held(switch("4-8,17"), "run 8", tmp_path),
    ):
        pass
    assert len(list(tmp_path.glob("*.lease"))) == 1


def test_other_ports_of_the_same_unit_and_the_same_ports_of_another_are_free(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    with held(switch("5-8,21-24"), "run 8", tmp_path):
        pass
    with held(switch("1-4,17-20", "tcp://10.0.0.6:5025"), "run 8", tmp_path):
        pass


def test_a_process_that_was_killed_holds_nothing(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    other.kill()
    other.wait()
    with held(switch("1-4"), "run 8", tmp_path):
        pass
    assert not list(tmp_path.glob("*.lease"))


def test_the_same_process_may_hold_what_it_holds(tmp_path: Path) -> None:
    with held(switch("1-4"), "run 8", tmp_path), held(switch("5-8"), "run 8, again", tmp_path):
        pass


def test_a_tor_is_held_whole(tmp_path: Path) -> None:
    spec = Tor(driver="linux-ssh", url="ssh://admin@10.0.0.21")
    argv = [sys.executable, "-c", OTHER_TOR, spec.url, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(InfrastructureError, match=r"leaf: it is held by run 7 \(pid \d+\)"),
            held({"leaf": spec}, "run 8", tmp_path),
        ):
            pass
        process.kill()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ssh://admin@10.0.0.5", "ssh://root@10.0.0.5:22"),
        ("tcp://a@10.0.0.5:3082", "tcp://10.0.0.5:3082"),
        ("serial://{}/tty?baud=9600", "serial://{}/by-id"),
    ],
)
def test_a_device_is_the_same_however_its_url_is_written(
    tmp_path: Path, theirs: str, ours: str
) -> None:
    (tmp_path / "by-id").symlink_to("tty")
    argv = [sys.executable, "-c", OTHER, theirs.format(tmp_path), "1-4", str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(InfrastructureError, match="ports 1-4 are held by run 7"),
            held(switch("1-4", ours.format(tmp_path)), "run 8", tmp_path),
        ):
            pass
        process.kill()


def test_every_user_may_look_who_holds_what_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with held(switch("1-4"), "run 8", tmp_path):
            modes = {path.suffix: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {".lock": 0o644, ".lease": 0o644}
