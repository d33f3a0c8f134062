"""The live world, with a unit that happens to be emulated: nothing in the harness knows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from drivers.emulators.config import EmulatedSwitch, Face, Ready, Timing
from tests.emulated.lab import Lab, lab

pytestmark = pytest.mark.timeout(180)

BENCH = """
name = "rack"
world = "live"
launcher = "local"
listen = "127.0.0.1:{port}"
keys = "keys"

[nodes.a]
tor = "left"
host = "localhost"
interface = "lo"
address = "127.0.0.2"
[nodes.b]
tor = "right"
host = "localhost"
interface = "lo"
address = "127.0.0.3"
[tors.left]
uplinks = 1
[tors.right]
uplinks = 1

[switches.ocs]
driver = "polatis-tl1"
url = "{url}"
ports = "1-4,9-12"
known_hosts = "{known_hosts}"
password_file = "password"

[cables]
"left:u1" = "ocs:1/9"
"right:u1" = "ocs:2/10"
"""

SCENARIO = """
question = "Does the same scenario run where the switch is a real one?"
bench = "bench.toml"

[shapes.pair]
template = "pairs"
[shapes.dark]
template = "dark"

[[steps]]
do = "shape"
shape = "pair"
[[steps]]
do = "collectives"
sizes = ["64KiB"]
[[steps]]
do = "reconfigure"
shapes = ["dark", "pair"]
count = 2
size = "64KiB"
rest_ms = 50.0
"""


@contextmanager
def unit(folder: Path) -> Iterator[Ready]:
    """An emulated unit in a process of its own, as another team would run it."""
    (folder / "password").touch(mode=0o600)
    (folder / "password").write_text("a secret of the lab")
    config = EmulatedSwitch(
        name="ocs",
        ports=8,
        timing=Timing(switch_ms=10.0),
        circuits=((3, 11),),
        faces=(
            Face(
                protocol="tl1",
                server="ssh",
                user="admin",
                password_file=str(folder / "password"),
                host_key_file=str(folder / "hostkey"),
            ),
        ),
    )
    (folder / "unit.json").write_bytes(msgspec.json.encode(config))
    argv = [sys.executable, "-m", "drivers.emulators", str(folder / "unit.json")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield msgspec.json.decode(process.stdout.readline(), type=Ready)
        finally:
            process.terminate()


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def bench_file(rack: Lab, url: str, known_hosts: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = BENCH.format(port=port, url=url, known_hosts=known_hosts)
    (rack.folder / "bench.toml").write_text(text)
    (rack.folder / "scenario.toml").write_text(SCENARIO)
    code, out = rack.harness("keys", "make", "keys", "--agents", "a,b")
    assert code == 0, out


def test_a_live_bench_runs_is_restored_and_keeps_its_secrets(rack: Lab) -> None:
    with unit(rack.folder) as ready:
        (rack.folder / "known").write_text(ready.host_keys[0] + "\n")
        bench_file(rack, ready.urls[0], "known")
        code, out = rack.run()
    assert code == 0, out
    rows = rack.events("reconfigure")
    assert len(rows) == 2
    assert all(row["overhead_ms"] is not None and row["dark_ms"] is None for row in rows)
    assert rack.snapshots() == {"ocs": True}
    snapshot = json.loads((rack.run_folder / "snapshots" / "ocs.snapshot.json").read_text())
    assert snapshot["circuits"] == [[3, 11]]
    written = b"".join(path.read_bytes() for path in rack.runs.rglob("*") if path.is_file())
    assert b"a secret of the lab" not in written


def test_agents_started_here_need_neither_keys_nor_a_port(rack: Lab) -> None:
    bench = BENCH[: BENCH.index("[switches.ocs]")].replace('keys = "keys"\n', "")
    (rack.folder / "bench.toml").write_text(bench.replace('listen = "127.0.0.1:{port}"\n', ""))
    (rack.folder / "scenario.toml").write_text(
        'question = "Do they meet?"\nbench = "bench.toml"\n[[steps]]\ndo = "collectives"\n'
    )
    code, out = rack.run()
    assert code == 0, out
    assert not list(rack.runs.rglob("*.key")), "secrets are no results"


def test_a_live_tor_is_not_steered_over_netlink_from_afar(rack: Lab) -> None:
    bench_file(rack, "tcp://127.0.0.1:9", "known")
    path = rack.folder / "bench.toml"
    text = path.read_text().replace("ssh://", "tcp://")
    path.write_text(text.replace("[tors.left]\n", '[tors.left]\ndriver = "netlink"\n'))
    code, out = rack.run()
    assert code == 2, out
    assert "tors.left.url: expected netns://" in out
    assert not rack.runs.exists()


def test_a_changed_host_key_is_refused_before_anything_is_sent(rack: Lab) -> None:
    with unit(rack.folder) as ready:
        host, kind, _ = ready.host_keys[0].split()[:3]
        other = "AAAAC3NzaC1lZDI1NTE5AAAAIJ8vRz4sXb0m3Jp3q0Xr3b2m5Kz8q3Y5b8m0m1c2d3e4"
        (rack.folder / "known").write_text(f"{host} ssh-ed25519 {other}\n")
        bench_file(rack, ready.urls[0], "known")
        code, out = rack.run()
    assert kind, ready
    assert code == 3, out
    assert "known" in out
    assert "host key" in out
    assert "Traceback" not in out


def test_a_wrong_password_is_refused(rack: Lab) -> None:
    with unit(rack.folder) as ready:
        (rack.folder / "known").write_text(ready.host_keys[0] + "\n")
        bench_file(rack, ready.urls[0], "known")
        (rack.folder / "password").write_text("another")
        code, out = rack.run()
    assert code == 3, out
    assert "ocs" in out
    assert "password" in out
    assert "another" not in out


def test_a_killed_live_run_blocks_the_next_until_it_is_recovered(rack: Lab) -> None:
    with unit(rack.folder) as ready:
        (rack.folder / "known").write_text(ready.host_keys[0] + "\n")
        bench_file(rack, ready.urls[0], "known")
        path = rack.folder / "scenario.toml"
        path.write_text(path.read_text().replace("count = 2", "count = 100"))
        process = rack.start()
        rack.await_traffic(process)
        process.kill()
        process.communicate()
        killed = os.readlink(rack.run_folder)
        code, out = rack.run()
        assert code == 3, out
        assert f"harness recover {rack.runs / killed}" in out
        code, out = rack.harness("recover", str(rack.runs / killed))
        assert code == 0, out
        path.write_text(SCENARIO)
        code, out = rack.run()
        assert code == 0, out
