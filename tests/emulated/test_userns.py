"""A user namespace of its own: what is found in it, how to join it, how a refusal reads."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0
MOVE = [sys.executable, "-m", "drivers.userns"]

HOLDER = """
import socket, sys
from drivers import netlink
with socket.create_server(("127.0.0.1", 0)):
    netlink.create_namespace("held")
    print(open("/proc/self/status").read().split("CapEff:")[1].split()[0], flush=True)
    sys.stdin.read()
"""
VISITOR = "from drivers import netlink; print(*netlink.namespaces())"
REFUSED = """
import os, subprocess, sys
open("/proc/sys/user/max_user_namespaces", "w").write("0")
move = [sys.executable, "-m", "drivers.userns"]
tried = subprocess.run([*move, "--try"], capture_output=True, text=True)
print(tried.returncode, tried.stderr)
tell = "import os; print(os.environ['ORCHESTRL_NO_USER_NAMESPACE'])"
subprocess.run([*move, sys.executable, "-c", tell])
"""


@pytest.fixture(autouse=True)
def _allowed() -> None:
    tried = subprocess.run([*MOVE, "--try"], capture_output=True, text=True, check=False, cwd=ROOT)
    if tried.returncode:
        pytest.skip(tried.stderr)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that has moved, and made a network namespace there."""
    process = subprocess.Popen(
        [*MOVE, sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with process:
        yield process
        process.kill()


def test_a_command_has_all_rights_over_a_network_with_a_loopback(
    holder: subprocess.Popen[str],
) -> None:
    assert holder.stdout
    cap_net_admin = 12
    assert int(holder.stdout.readline(), 16) >> cap_net_admin & 1
    assert "held" not in subprocess.check_output([sys.executable, "-c", VISITOR], cwd=ROOT).decode()


def test_another_command_joins_and_sees_the_same_network(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout
    holder.stdout.readline()
    visit = [*MOVE, "--join", str(holder.pid), sys.executable, "-c", VISITOR]
    seen = subprocess.run(
        visit, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=ROOT
    )
    assert seen.stdout.split() == ["held"]


def test_a_refusal_is_told_and_the_command_runs_where_it_was() -> None:
    done = subprocess.run(
        [*MOVE, sys.executable, "-c", REFUSED],
        capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=ROOT,
    )  # fmt: skip
    reason = "no user namespace: No space left on device"
    assert done.stdout.splitlines() == [f"1 {reason}", reason]
