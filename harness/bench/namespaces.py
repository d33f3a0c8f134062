"""Makes the emulated network on one Linux machine: a namespace per node, per ToR and per switch.

`build` makes what `harness.bench.wiring` lays out and returns a `Network` of names and addresses;
`harness.bench.leftovers` takes it away again. Everything is on record before it is made. Needs
CAP_NET_ADMIN and CAP_SYS_ADMIN over the starting network namespace: an ordinary user gets both in a
user namespace of their own (`enter_user_namespace`).

Raises `UsageError` for names that cannot be, `InfrastructureError` for what the kernel refuses.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drivers import netlink, userns
from drivers.emulators import config
from drivers.interfaces import Interfaces
from harness.bench import leftovers
from harness.bench.leftovers import Record
from harness.bench.wiring import (
    CONTROL,
    CONTROL_NETWORKS,
    LightKind,
    Port,
    Room,
    Wire,
    Wiring,
    room_name,
    wire,
)
from harness.errors import InfrastructureError
from harness.fabric.topology import Topology
from harness.model.bench import Links
from harness.processes import Process

_SYSCTLS = {
    # No address is ever sought on a circuit, and no router is looked for.
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv6.conf.default.disable_ipv6": "1",
    # A packet may come by a circuit whose answer goes by the electrical path.
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    # Flows, not only pairs of nodes, are spread over parallel circuits.
    "net.ipv4.fib_multipath_hash_policy": "1",
    "net.ipv4.conf.all.send_redirects": "0",
    "net.ipv4.conf.default.send_redirects": "0",
    # The one algorithm that every kernel has and every namespace may choose.
    "net.ipv4.tcp_congestion_control": "reno",
    # Every run starts TCP afresh, and a drain does not send it back to slow start.
    "net.ipv4.tcp_no_metrics_save": "1",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    # A fabric for RDMA loses nothing: what several senders have under way fits a queue they share.
    "net.ipv4.tcp_wmem": "4096 65536 131072",
}


@dataclass(frozen=True)
class Network:
    """An emulated network that stands: names of namespaces, addresses, and ports for the light."""

    prefix: str
    record: Path
    """The state file by which it can be torn down."""
    netns: Mapping[str, str]
    """Namespace of each node, ToR and switch, by its name in the bench file."""
    coordinator_address: str
    """Of the starting namespace on the control network."""
    control_addresses: Mapping[str, str]
    """Of each node and ToR on the control network."""
    lights: Mapping[str, config.Light]
    """Per switch, what its emulator needs to move packets."""


def build(
    topology: Topology, links: Links, light: LightKind = "ebpf", *, folder: Path | None = None
) -> Network:
    """Make the emulated network of `topology`; on any failure nothing of it stays behind.

    `folder` holds the record, by default the user's own (`leftovers.record_folder`).
    """
    wiring, path = _reserve(topology, links, light, folder or leftovers.record_folder())
    try:
        _make(wiring)
    except OSError as error:
        leftovers.tear_down(path)
        raise InfrastructureError(f"emulated network: {error}") from error
    except BaseException:
        leftovers.tear_down(path)
        raise
    prefix = path.stem
    named = (*topology.nodes, *topology.tors, *topology.switches)
    return Network(
        prefix=prefix,
        record=path,
        netns={name: room_name(prefix, name) for name in named},
        coordinator_address=wiring.coordinator_address,
        control_addresses=wiring.control_addresses,
        lights=wiring.lights,
    )


def enter_user_namespace(member: int | None = None) -> str:
    """Start this command over with rights over a network of its own; see `drivers.userns.again`.

    `member`, a process of an earlier bench, leads to where its namespaces are. Returns only where
    that cannot be: the reason.
    """
    return userns.again(member)


def _reserve(
    topology: Topology, links: Links, light: LightKind, folder: Path
) -> tuple[Wiring, Path]:
    """Choose a free prefix and control network, and put the whole plan on record."""
    with leftovers.locked(folder):
        taken = {record.network for record in leftovers.records(folder).values()}
        taken |= _networks_in_use()
        free = next((k for k in range(CONTROL_NETWORKS) if k not in taken), None)
        if free is None:
            raise InfrastructureError(
                f"all {CONTROL_NETWORKS} control networks are taken: see {folder}"
            )
        prefix = _free_prefix()
        wiring = wire(topology, links, prefix=prefix, network=free, light=light)
        record = Record(
            prefix=prefix,
            boot=leftovers.boot_id(),
            owner=Process.of(os.getpid(), "owner"),
            network=free,
            namespaces=tuple(room.netns for room in wiring.rooms),
            links=(wiring.control_link,),
        )
        path = folder / f"{prefix}.json"
        leftovers.write_record(path, record)
    return wiring, path


def _free_prefix() -> str:
    taken = {name.partition("-")[0] for name in netlink.namespaces()}
    while (prefix := f"h{secrets.token_hex(3)}") in taken:
        pass
    return prefix


def _networks_in_use() -> set[int]:
    """Return the control networks that an address of this machine lies in."""

    def look() -> set[int]:
        with Interfaces() as interfaces:
            addresses = [address for address, _ in interfaces.addresses()]
        base = CONTROL.packed[:2]
        packed = [bytes(int(part) for part in address.split(".")) for address in addresses]
        return {address[2] for address in packed if address[:2] == base}

    return netlink.run_in("", look)


def _make(wiring: Wiring) -> None:
    for room in wiring.rooms:
        netlink.create_namespace(room.netns)
        netlink.run_in(room.netns, partial(_set_sysctls, room))
    netlink.run_in("", partial(_pull_wires, wiring.wires))
    for room in wiring.rooms:
        netlink.run_in(room.netns, partial(_furnish, room))
    netlink.run_in("", partial(_join_control, wiring))


def _set_sysctls(room: Room) -> None:
    """Set before the first link comes in: links copy the defaults when they are made."""
    for name, value in _SYSCTLS.items():
        netlink.write_sysctl(name, value)
    netlink.write_sysctl("net.ipv4.ip_forward", "1" if room.forwards else "0")


def _pull_wires(wires: tuple[Wire, ...]) -> None:
    with Interfaces() as interfaces:
        for wire_ in wires:
            interfaces.veth(wire_.a, wire_.b, mtu=wire_.mtu)


def _furnish(room: Room) -> None:
    with Interfaces() as interfaces:
        interfaces.up("lo")
        if room.bridged:
            interfaces.bridge("br0")
            interfaces.up("br0")
        for port in room.ports:
            if port.address:
                address, _, length = port.address.partition("/")
                interfaces.address(port.name, address, int(length))
            if port.bucket:
                interfaces.shape(port.name, port.bucket)
            if room.bridged:
                interfaces.enslave(port.name, "br0")
        for port in room.ports:
            bring_up(interfaces, room, port)


def bring_up(interfaces: Interfaces, room: Room, port: Port) -> None:
    """Bring a furnished port up, with its neighbours and routes, which go when it goes down."""
    interfaces.up(port.name)
    for neighbour in port.neighbours:
        interfaces.neighbour(port.name, neighbour.address, neighbour.mac)
    for path in room.paths:
        if path.port == port.name:
            interfaces.route(
                path.prefix, via=path.via, name=path.port,
                metric=path.metric, protocol=path.protocol,
            )  # fmt: skip


def _join_control(wiring: Wiring) -> None:
    with Interfaces() as interfaces:
        interfaces.address(wiring.control_link, wiring.coordinator_address, 24)
        interfaces.up(wiring.control_link)
