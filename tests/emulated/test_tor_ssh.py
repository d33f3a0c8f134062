"""A Linux ToR over SSH as it goes wrong: who is let in, what may be run, and what is lost."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from drivers.address import SshAddress, parse
from drivers.catalog import open_commands, open_tor
from drivers.emulators.config import TorFaults
from drivers.errors import (
    AccessDenied,
    BadAddress,
    Indeterminate,
    Misuse,
    Refused,
    Unreachable,
    Untrusted,
)
from drivers.tor.base import Route
from drivers.transports.commands import Finished
from tests.emulated.tor_bench import (
    DOWN,
    FAR,
    HOPS,
    LIMIT_S,
    PREFIXES,
    Server,
    kernel_routes,
    namespace,
    served,
)

pytestmark = pytest.mark.root
ONE = frozenset({Route(PREFIXES[0], HOPS[:1])})
TWO = frozenset({Route(PREFIXES[0], HOPS[:2]), Route(PREFIXES[1], HOPS[1:2])})
SHORT_NS = 300_000_000


@pytest.fixture
def netns() -> Iterator[str]:
    with namespace() as name:
        yield name


def ask(server: Server, command: str, stdin: str = "") -> Finished:
    deadline_ns = time.monotonic_ns() + int(LIMIT_S * 1e9)
    address = parse(server.url)
    assert isinstance(address, SshAddress)
    session = open_commands(address, server.credentials, deadline_ns)
    try:
        return session.run(command, stdin, deadline_ns)
    finally:
        session.close()


def test_routes_made_over_ssh_are_the_ones_netlink_sees(tmp_path: Path, netns: str) -> None:
    local = open_tor("netlink", f"netns://{netns}", name="tor0", exchange_timeout_ns=1)
    with served(tmp_path, netns) as server:
        tor = server.open()
        tor.apply(TWO)
        assert local.read() == TWO
        local.apply(ONE)
        tor.apply(frozenset())
        assert (local.read(), tor.read()) == (frozenset(), frozenset())
        tor.close()
    local.close()


@pytest.mark.parametrize(
    ("command", "stdin", "status", "words"),
    [
        ("reboot", "", 126, "-rbash: reboot: restricted"),
        ("ip -json link show", "", 126, "-rbash: ip: restricted"),
        ("sudo -n ip link set u1 down", "", 126, "-rbash: ip: restricted"),
        ("vtysh -c 'show version'", "", 126, "-rbash: vtysh: restricted"),
        ("sudo -n ip -json -batch -", "link set u1 down\n", 1, "restricted"),
        ("sudo -n ip -json -batch -", "route del 1.0.0.0/8 `x`\n", 1, "restricted"),
        ("ip -json -batch -", "route del 198.19.1.0/24\n", 2, "Operation not permitted"),
        ("unbalanced '", "", 126, "shell: restricted"),
    ],
)
def test_only_what_steering_needs_may_be_run(
    tmp_path: Path, netns: str, command: str, stdin: str, status: int, words: str
) -> None:
    before = kernel_routes(netns)
    with served(tmp_path, netns) as server:
        finished = ask(server, command, stdin)
    assert (finished.status, finished.out) == (status, "")
    assert words in finished.err
    assert kernel_routes(netns) == before


def test_a_key_opens_a_tor_and_a_wrong_one_does_not(tmp_path: Path, netns: str) -> None:
    files = {}
    for name in ("right", "wrong"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        files[name] = tmp_path / name
        key.write_private_key(files[name])
        key.write_public_key(f"{files[name]}.pub")
    with served(tmp_path, netns, authorized_keys=f"{files['right']}.pub") as server:
        by_key = replace(server.credentials, password=None, key_file=files["right"])
        tor = replace(server, credentials=by_key).open()
        tor.apply(ONE)
        tor.close()
        by_wrong = replace(by_key, key_file=files["wrong"])
        with pytest.raises(AccessDenied, match="wrong was refused"):
            replace(server, credentials=by_wrong).open()


def test_a_wrong_password_and_an_unknown_host_are_refused(tmp_path: Path, netns: str) -> None:
    with served(tmp_path, netns) as server:
        with pytest.raises(AccessDenied, match="password was refused"):
            replace(server, credentials=replace(server.credentials, password="no")).open()
        nobody = replace(server.credentials, known_hosts=tmp_path / "nobody")
        with pytest.raises(Untrusted, match="nobody"):
            replace(server, credentials=nobody).open()
        url = server.url
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        replace(server, url=url).open()


def test_an_answer_later_than_the_deadline_leaves_the_routes_unknown(
    tmp_path: Path, netns: str
) -> None:
    with served(tmp_path, netns, faults=TorFaults(answer_ms=2 * SHORT_NS / 1e6)) as server:
        tor = server.open(exchange_ns=5 * SHORT_NS)
        tor.apply(ONE)
        tor.close()
        hasty = server.open(exchange_ns=SHORT_NS)
        hasty._seen = ONE
        with pytest.raises(Indeterminate, match="could not be read back"):
            hasty.apply(TWO)
        hasty.close()


def test_a_tor_that_dies_in_the_middle_leaves_the_routes_unknown(
    tmp_path: Path, netns: str
) -> None:
    with served(tmp_path, netns, faults=TorFaults(die_on_apply=1)) as server:
        tor = server.open()
        with pytest.raises(Indeterminate, match="could not be read back"):
            tor.apply(TWO)
        tor.close()
    local = open_tor("netlink", f"netns://{netns}", name="tor0", exchange_timeout_ns=1)
    assert local.read() not in (frozenset(), TWO)
    local.apply(frozenset())
    local.close()


def test_a_tor_that_is_started_anew_is_reached_again(tmp_path: Path, netns: str) -> None:
    host_key = str(tmp_path / "host_key")
    with served(tmp_path, netns, host_key_file=host_key) as server:
        tor = server.open()
        tor.apply(ONE)
    port = int(server.url.rpartition(":")[2])
    with served(tmp_path, netns, host_key_file=host_key, port=port):
        tor.apply(TWO)
        assert tor.read() == TWO
    tor.close()


def test_a_tor_that_denies_an_uplink_says_so(tmp_path: Path, netns: str) -> None:
    with served(tmp_path, netns, faults=TorFaults(deny_devices=("u2",))) as server:
        tor = server.open()
        tor.apply(ONE)
        with pytest.raises(Refused, match="ToR tor0: RTNETLINK answers: Operation not permitted"):
            tor.apply(TWO)
        assert tor.read() == ONE
        with pytest.raises(Refused, match="Nexthop device is not up"):
            tor.apply(frozenset({Route(PREFIXES[2], (DOWN,))}))
        tor.close()


@pytest.mark.parametrize(
    ("driver", "url", "kind", "words"),
    [
        ("cumulus", "ssh://a@b", Misuse, "no ToR driver 'cumulus'; there are frr-ssh, linux-ssh"),
        ("netlink", "ssh://a@b", BadAddress, "use netns://NAME"),
        ("linux-ssh", "tcp://10.0.0.5:22", BadAddress, "use ssh://admin@10.0.0.5:22"),
        ("netlink", "netns://nowhere", Unreachable, "namespace nowhere"),
    ],
)
def test_what_names_no_tor_is_refused(driver: str, url: str, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        open_tor(driver, url, name="tor0", exchange_timeout_ns=1)


def test_a_server_that_would_let_nobody_in_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "tor.json"
    path.write_text('{"name": "tor0"}')
    argv = [sys.executable, "-m", "drivers.emulators.tor_server", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "tor0: nobody may log in" in done.stderr


def test_closing_leaks_no_descriptor(tmp_path: Path, netns: str) -> None:
    with served(tmp_path, netns) as server:
        server.open().close()
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            tor = server.open()
            tor.apply(ONE)
            tor.close()
        assert len(os.listdir("/proc/self/fd")) == len(before)
    assert FAR in str(kernel_routes(netns))
