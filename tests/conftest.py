"""What every test gets: skips that say what is missing, and a check that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

MARK = "HARNESS_TEST_SESSION"
"""Environment variable that every process started below this one inherits: it is how ours are
known, whoever their parent is by now."""
CAP_NET_ADMIN = 12
GONE_WITHIN_S = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bench",
        type=Path,
        metavar="FILE",
        help="live bench file for tests/hardware; circuits of its ports are changed and restored",
    )


def pytest_configure() -> None:
    os.environ[MARK] = uuid.uuid4().hex
    # how long an example takes says nothing here: cores are shared
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile("shared", deadline=None, suppress_health_check=slow)
    settings.load_profile("shared")


def may_configure_networks() -> bool:
    """Whether this process has CAP_NET_ADMIN."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> CAP_NET_ADMIN & 1)
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "emulated" in item.path.parts:
            item.add_marker("emulated")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("emulated") and sys.platform != "linux":
        pytest.skip("emulated benches need Linux: namespaces, ptys, eBPF")
    if item.get_closest_marker("root") and not may_configure_networks():
        pytest.skip("needs CAP_NET_ADMIN for network namespaces: run the tests as root")


def our_processes() -> dict[int, str]:
    """pid -> command line of every live process that inherited our mark, and of our children."""
    mark, parent = f"{MARK}={os.environ[MARK]}".encode(), f"PPid:\t{os.getpid()}\n"
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            if not marked and parent not in (entry / "status").read_text():
                continue
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if line.strip() and "multiprocessing.resource_tracker" not in line:
                found[int(entry.name)] = line.strip()
    return found


def our_terminals() -> set[str]:
    """Descriptors of pty masters that this process holds open."""
    held = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry) in ("/dev/ptmx", "/dev/pts/ptmx"):
                held.add(f"pty master, fd {entry.name}")
    return held


def network() -> set[str]:
    """Named network namespaces, and links of the namespace that we are in."""
    found = set()
    with suppress(OSError):
        found |= {f"namespace {name}" for name in os.listdir("/run/netns")}
    with suppress(OSError):
        found |= {f"link {path.parent.name}" for path in Path("/sys/class/net").glob("*/iflink")}
    return found - networks_of_others()


def networks_of_others() -> set[str]:
    """What benches on record hold whose owners live and are not ours: another run, beside us."""
    ours, held = {os.getpid(), *our_processes()}, set()
    for path in Path("/run/orchestrl-harness").glob("*.json"):
        with suppress(OSError, ValueError, KeyError):
            record = json.loads(path.read_text())
            owner = record["owner"]["pid"]
            if owner not in ours and Path(f"/proc/{owner}").exists():
                held |= {f"namespace {name}" for name in record["namespaces"]}
                held |= {f"link {name}" for name in record["links"]}
    return held


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an emulated test that leaves a process, namespace, link or pty; kill what is left."""
    if not request.node.get_closest_marker("emulated"):
        yield
        return
    processes, terminals, net = set(our_processes()), our_terminals(), network()
    yield
    deadline, clean = time.monotonic() + GONE_WITHIN_S, 0
    while True:
        left = {pid: line for pid, line in our_processes().items() if pid not in processes}
        things = (our_terminals() - terminals) | (network() - net)
        # Twice, because a process that is just being started shows no environment for a moment.
        clean = 0 if left or things else clean + 1
        if clean == 2:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    things |= {f"process {pid}: {line}" for pid, line in left.items()}
    pytest.fail("left behind by this test:\n  " + "\n  ".join(sorted(things)), pytrace=False)
