"""What breaks in the night: a named cause, the right exit code, and no light left wrong.

`nothing_left_behind` (tests/conftest.py) adds: no process, namespace, link or pty.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated.lab import Lab, lab

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def free_port() -> int:
    """A port that is free, and the next one too: heartbeats take that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- switches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "url"),
    [("polatis-scpi", "tcp://"), ("polatis-scpi", "serial://"), ("polatis-tl1", "ssh://admin@")],
)
def test_a_denied_circuit_names_the_pair_and_the_previous_map_is_back(
    bench: Lab, driver: str, url: str
) -> None:
    bench.files(driver=driver, url=url, emulate="deny_ports = [4]")
    code, out = bench.run()
    assert code == 3, out
    assert "4->10" in out
    assert bench.snapshots() == {"ocs": True}


def test_a_unit_that_dies_in_mid_command_needs_a_person_and_is_named(bench: Lab) -> None:
    bench.files(emulate="die_on_command = 2")
    code, out = bench.run()
    assert code == 5, out
    assert "ocs: " in out
    assert "it should hold" in out
    assert bench.snapshots() == {"ocs": False}


def test_a_reply_cut_in_the_middle_costs_nothing_but_time(bench: Lab) -> None:
    bench.files(emulate="cut_reply = 6")
    code, out = bench.run()
    assert code == 0, out
    assert bench.snapshots() == {"ocs": True}


def test_a_lost_reply_to_a_change_is_resolved_by_reading_back(bench: Lab) -> None:
    bench.files(emulate="lose_reply = 2")
    code, out = bench.run()
    assert code == 0, out
    assert bench.snapshots() == {"ocs": True}


def test_a_circuit_without_light_stays_electrical_and_is_named(bench: Lab) -> None:
    bench.files(emulate="failed_ports = [11]")
    code, out = bench.run()
    assert code == 3, out
    assert "no light on egress ports 11" in out
    assert bench.snapshots() == {"ocs": True}


# -- agents and ranks ------------------------------------------------------------------------


def test_an_agent_killed_in_a_collective_is_named(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    os.kill(bench.pid_of_agent(process, "b"), signal.SIGKILL)
    code, out = bench.finish(process)
    assert code == 3, out
    assert "b" in out.splitlines()[-1] or "agent b" in out or "b:" in out
    assert bench.snapshots() == {"ocs": True}


def test_a_stopped_agent_is_named(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    pid = bench.pid_of_agent(process, "b")
    os.kill(pid, signal.SIGSTOP)
    code, out = bench.finish(process)
    assert code == 3, out
    assert "b" in out
    assert bench.snapshots() == {"ocs": True}


def test_a_rank_killed_in_a_collective_is_named_with_its_signal(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    os.kill(bench.pid_of_rank(process, 1), signal.SIGKILL)
    code, out = bench.finish(process)
    assert code in {1, 3}, out
    assert "rank 1" in out
    assert "SIGKILL" in out
    assert bench.snapshots() == {"ocs": True}


def test_a_rank_that_never_enters_is_named(bench: Lab) -> None:
    bench.files(count=100, step_timeout_s=3.0)
    process = bench.start()
    bench.await_traffic(process)
    os.kill(bench.pid_of_rank(process, 1), signal.SIGSTOP)
    code, out = bench.finish(process)
    assert code in {1, 3}, out
    assert "1" in out
    assert bench.snapshots() == {"ocs": True}


def test_agents_that_do_not_come_are_named_in_time(
    bench: Lab,
) -> None:
    bench.files()
    path = bench.folder / "bench.toml"
    live = path.read_text().replace('world = "emulated"', 'world = "live"')
    live = live.replace('launcher = "namespaces"', 'launcher = "manual"\nlisten = "127.0.0.1:PORT"')
    live = live.replace("max_wait_s = 30.0", 'max_wait_s = 1.0\nkeys = "keys"')
    live = live[: live.index("[switches")].replace('driver = "netlink"', 'driver = "none"')
    live = live.replace("uplinks = 2\n", "")
    for node, address in (("a", "127.0.0.2"), ("b", "127.0.0.3")):
        live = live.replace(
            f"[nodes.{node}]\n",
            f'[nodes.{node}]\nhost = "{node}.lab"\ninterface = "lo"\naddress = "{address}"\n',
        )
    path.write_text(live.replace("PORT", str(free_port())))
    (bench.folder / "scenario.toml").write_text(
        'question = "Who comes?"\nbench = "bench.toml"\n[[steps]]\ndo = "collectives"\n'
    )
    code, out = bench.harness("keys", "make", "keys", "--agents", "a,b")
    assert code == 0, out
    code, out = bench.run()
    assert code == 3, out
    assert "a, b" in out
    assert "python -m agents --name a" in out


# -- devices that cannot be opened -------------------------------------------------------------


LIVE_SWITCH = """
name = "lab"
world = "live"
launcher = "local"
listen = "127.0.0.1:{port}"
keys = "keys"

[nodes.a]
tor = "left"
host = "localhost"
interface = "lo"
address = "127.0.0.1"
gpus = 2
[tors.left]
uplinks = 1

[switches.ocs]
driver = "{driver}"
url = "{url}"
ports = "1-4,9-12"
{secret}

[cables]
"left:u1" = "ocs:1/9"
"""


@pytest.mark.parametrize(
    ("driver", "url", "secret", "told"),
    [
        ("polatis-tl1", "ssh://admin@127.0.0.1:9", 'known_hosts = "known"', "127.0.0.1"),
        ("polatis-scpi", "serial:///dev/does-not-exist", "", "/dev/does-not-exist"),
    ],
)
def test_a_device_that_cannot_be_opened_is_named_before_anything_starts(
    bench: Lab, driver: str, url: str, secret: str, told: str
) -> None:
    (bench.folder / "known").write_text("")
    (bench.folder / "bench.toml").write_text(
        LIVE_SWITCH.format(driver=driver, url=url, secret=secret, port=free_port())
    )
    (bench.folder / "scenario.toml").write_text(
        'question = "Does it open?"\nbench = "bench.toml"\n[[steps]]\ndo = "collectives"\n'
    )
    bench.harness("keys", "make", "keys", "--agents", "a")
    code, out = bench.run()
    assert code == 3, out
    assert "ocs" in out
    assert told in out
    assert "Traceback" not in out
