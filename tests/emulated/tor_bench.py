"""ToRs in network namespaces, SSH servers and FRR on them, and drivers opened there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from drivers import netlink
from drivers.address import Credentials
from drivers.catalog import open_tor
from drivers.emulators.config import EmulatedTor, Ready, TorFaults
from drivers.interfaces import End, Interfaces
from drivers.tor.base import Hop, Tor
from drivers.tor.conformance import Specimen, TorMaker, Trouble
from drivers.tor.netlink import ELECTRICAL_METRIC, ELECTRICAL_PROTOCOL, FLOW_HASH
from tests.emulated.driver_bench import first_line, stop

USER, PASSWORD = "admin", "testbed pass"
EXCHANGE_NS = 5_000_000_000
LOST_EXCHANGE_NS = 500_000_000
LIMIT_S = 20.0
FAR, FARTHER = "198.18.128.9", "198.18.128.8"
ELECTRICAL_GATEWAY = "198.18.192.0"
PREFIXES = tuple(f"198.19.{i}.0/24" for i in range(1, 6))
PINNED = "198.19.1.10/32"
HOPS = (Hop(FAR, "u1"), Hop(FAR, "u2"), Hop(FARTHER, "u2"))
DOWN = Hop(FAR, "u3")
FRR = Path("/usr/lib/frr")


@contextmanager
def namespace(name: str = "tor", *, electrical: bool = True) -> Iterator[str]:
    """A ToR: uplinks u1, u2, and u3 which is down; electrical routes to every prefix."""
    netns = f"{name}{os.getpid()}"
    netlink.create_namespace(netns)
    try:
        netlink.run_in(netns, partial(_furnish, electrical))
        yield netns
    finally:
        netlink.delete_namespace(netns)


def _furnish(electrical: bool) -> None:
    netlink.write_sysctl(*FLOW_HASH)
    with Interfaces() as interfaces:
        interfaces.up("lo")
        for i in (1, 2, 3):
            interfaces.veth(End(f"u{i}", ""), End(f"far{i}", ""), mtu=1500)
            interfaces.address(f"u{i}", f"198.18.128.{i}", 32)
            if i == 3:
                continue
            interfaces.up(f"u{i}")
            interfaces.up(f"far{i}")
            for gateway in (FAR, FARTHER, ELECTRICAL_GATEWAY):
                interfaces.neighbour(f"u{i}", gateway, "02:00:00:00:00:09")
        for prefix in PREFIXES if electrical else ():
            interfaces.route(
                prefix, via=ELECTRICAL_GATEWAY, name="u2",
                metric=ELECTRICAL_METRIC, protocol=ELECTRICAL_PROTOCOL,
            )  # fmt: skip


def kernel_routes(netns: str) -> list[dict[str, Any]]:
    """Every route of the main table, as ``ip`` tells."""
    argv = ["ip", "-n", netns, "-json", "-details", "route", "show"]
    return json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)


def ours_in_kernel(netns: str) -> frozenset[str]:
    """The prefixes of routes that lead over uplinks to the far end of a circuit."""
    gateways = {FAR, FARTHER}
    prefixes = [
        str(route["dst"])
        for route in kernel_routes(netns)
        if gateways & {hop.get("gateway") for hop in route.get("nexthops", [route])}
    ]
    return frozenset(p if "/" in p else f"{p}/32" for p in prefixes)


def foreign_in_kernel(netns: str) -> list[str]:
    """Every route that does not bear our protocol number."""
    found = kernel_routes(netns)
    return sorted(json.dumps(route) for route in found if route["protocol"] != "202")


def vtysh(pathspace: str, *commands: str) -> str:
    words = [word for command in commands for word in ("-c", command)]
    argv = ["vtysh", "-N", pathspace, *words]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


def foreign_in_frr(pathspace: str) -> list[str]:
    """Every line of the configuration that does not bear our tags."""
    lines = vtysh(pathspace, "show running-config").splitlines()
    return [line for line in lines if not re.search(r"tag 20[12]\b", line)]


@dataclass(frozen=True)
class Server:
    """A running emulated SSH server of a ToR."""

    process: subprocess.Popen[bytes]
    url: str
    credentials: Credentials

    def open(self, driver: str = "linux-ssh", *, exchange_ns: int = EXCHANGE_NS) -> Tor:
        return open_tor(
            driver, self.url, name="tor0",
            credentials=self.credentials, exchange_timeout_ns=exchange_ns,
        )  # fmt: skip


@contextmanager
def served(
    folder: Path,
    netns: str,
    *,
    user: str = USER,
    frr: str = "",
    faults: TorFaults = TorFaults(),  # noqa: B008  frozen
    authorized_keys: str | None = None,
    host_key_file: str | None = None,
    port: int = 0,
) -> Iterator[Server]:
    """Start the SSH server of the ToR in `netns` and wait until it answers."""
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    password_file.chmod(0o600)
    config = EmulatedTor(
        name="tor0",
        netns=netns,
        user=user,
        frr=frr,
        port=port,
        password_file=str(password_file),
        authorized_keys=authorized_keys,
        host_key_file=host_key_file,
        faults=faults,
    )
    path = folder / "tor.json"
    path.write_bytes(msgspec.json.encode(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "drivers.emulators.tor_server", str(path)], stdout=subprocess.PIPE
    )
    try:
        ready = msgspec.json.decode(first_line(process), type=Ready)
        known_hosts = folder / "known_hosts"
        known_hosts.write_text(ready.host_keys[0] + "\n")
        credentials = Credentials(user, PASSWORD, known_hosts=known_hosts)
        yield Server(process, ready.urls[0], credentials)
    finally:
        stop(process)


@contextmanager
def frr(netns: str) -> Iterator[str]:
    """Run a real FRR (zebra and staticd) in `netns`; yield its pathspace."""
    folders = [Path("/etc/frr") / netns, Path("/var/run/frr") / netns]
    for folder in folders:
        folder.mkdir(parents=True)
        shutil.chown(folder, "frr", "frr")
    (folders[0] / "vtysh.conf").touch()
    daemons = []
    try:
        for name in ("zebra", "staticd"):
            argv = ["ip", "netns", "exec", netns, str(FRR / name), "-N", netns, "-f", "/dev/null"]
            quiet = subprocess.DEVNULL
            daemons.append(subprocess.Popen([*argv, "-P", "0"], stdout=quiet, stderr=quiet))
            _await_socket(folders[1] / f"{name}.vty")
        way = f"{ELECTRICAL_GATEWAY} u2 onlink 200"
        vtysh(netns, "configure terminal", *(f"ip route {prefix} {way}" for prefix in PREFIXES))
        yield netns
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(LIMIT_S)
        for folder in folders:
            shutil.rmtree(folder)


def _await_socket(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path} after {LIMIT_S} s"
        time.sleep(0.01)


FAULTS = {
    Trouble.LOST_REPLY: TorFaults(lose_reply=1),
    Trouble.CUT: TorFaults(cut_apply=1),
}


def maker(folder: Path, driver: str, *, user: str = USER) -> TorMaker:
    """Return the maker for `check_tor`: a fresh ToR for each trouble."""

    @contextmanager
    def make(trouble: Trouble) -> Iterator[Specimen]:
        with ExitStack() as stack:
            netns = stack.enter_context(namespace(electrical=driver != "frr-ssh"))
            pathspace = stack.enter_context(frr(netns)) if driver == "frr-ssh" else ""
            if driver == "netlink":
                tor = open_tor(driver, f"netns://{netns}", name="tor0", exchange_timeout_ns=1)
            else:
                faults = FAULTS.get(trouble, TorFaults())
                server = stack.enter_context(
                    served(folder, netns, user=user, frr=pathspace, faults=faults)
                )
                lost = trouble is not Trouble.NONE
                tor = server.open(driver, exchange_ns=LOST_EXCHANGE_NS if lost else EXCHANGE_NS)
            stack.callback(tor.close)
            yield Specimen(
                tor,
                PREFIXES,
                PINNED,
                HOPS,
                foreign=partial(foreign_in_frr if pathspace else foreign_in_kernel, netns),
                ours=partial(ours_in_kernel, netns),
                refused=DOWN if trouble is Trouble.REFUSAL else None,
            )

    return make
