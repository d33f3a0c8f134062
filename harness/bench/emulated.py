"""The emulated world: a whole bench on one Linux machine, drivers and agents as on a real one.

Emulated units answer real drivers over a pty, SSH or TCP, and a cross-connect made there moves
packets between network namespaces. Where this machine lets us move no packets, the bench still
stands, *control plane only*: agents meet on the loopback, circuits carry nothing, and the first
note of the run says so.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from drivers.address import SerialAddress, baud_of
from drivers.catalog import NETNS
from drivers.emulators import config
from drivers.emulators.light.abilities import probe
from drivers.netlink import namespace_path
from drivers.userns import outer_uid
from harness.bench import leftovers, namespaces
from harness.bench.behaviour import behaviour_of
from harness.bench.breaking import unit_file, unit_process
from harness.bench.children import Children, agent_argv
from harness.bench.credentials import secret_variables
from harness.bench.electrical import ElectricalPath
from harness.bench.running import Places, RunningBench, join
from harness.clock import Clock
from harness.errors import InfrastructureError
from harness.fabric.topology import Topology
from harness.model.bench import Bench, Links, Switch, Tor
from harness.wire import keys

Emulated = TypeVar("Emulated", Switch, Tor)

LOOPBACK = "127.0.0.1"
PASSWORD_FILE = "unit.password"  # noqa: S105 - the name of a file
USER = "admin"
PROTOCOL_OF_DRIVER: dict[str, Literal["scpi", "tl1"]] = {
    "polatis-scpi": "scpi",
    "polatis-tl1": "tl1",
}
SERVER_OF_SCHEME: dict[str, Literal["serial", "tcp", "ssh"]] = {
    "serial": "serial",
    "ssh": "ssh",
    "tcp": "tcp",
}


@dataclass(frozen=True)
class Means:
    """Who moves the packets of a bench on this machine; `why` nobody does, where it is "none"."""

    light: Literal["none", "ebpf", "mirred"]
    why: str = ""


@asynccontextmanager
async def open_emulated(
    bench: Bench, topology: Topology, places: Places, means: Means, clock: Clock
) -> AsyncIterator[RunningBench]:
    """Build the network, start units and agents, and take all of it down on every way out."""
    async with AsyncExitStack() as stack:
        network, record = await _network(stack, bench, topology, means)
        if network is None:
            topology = _on_loopback(topology)
        leftovers.keep_for(record, places.run)
        folder = leftovers.private_folder(record)
        children = Children(places.logs, record, secret_variables(bench))
        stack.callback(children.end)
        _write_password(folder)
        steered = _start_tors(bench, topology, network, folder, children)
        _start_units(bench, network, folder, children)
        switches = {
            name: await _answering(unit_process(name), switch, folder, children)
            for name, switch in bench.switches.items()
        }
        tors = {
            name: await _answering(_tor_process(name), tor, folder, children)
            if tor.driver == "linux-ssh"
            else tor
            for name, tor in steered.items()
        }
        agents = (*topology.nodes, *(topology.tors if network else ()))
        keys.make_folder(folder, agents)
        joined = join(
            bench,
            topology,
            places,
            switches=switches,
            tors=tors,
            agents=agents,
            keys_folder=folder,
            bind=f"{network.coordinator_address if network else LOOPBACK}:0",
            children=children,
            start_agents=lambda link: _start_agents(
                agents, link.address, network, folder, children
            ),
            clock=clock,
        )
        running = await stack.enter_async_context(joined)
        if network:
            running.electrical_path = ElectricalPath(topology, bench.links, network.prefix)
        yield running


async def _network(
    stack: AsyncExitStack, bench: Bench, topology: Topology, means: Means
) -> tuple[namespaces.Network | None, Path]:
    """Build the network, if there is to be one; return it and the bench's record."""
    await asyncio.to_thread(leftovers.sweep, include_unrecovered=True)
    if means.light == "none":
        network, record = None, leftovers.reserve()
    else:
        network = await _build(bench, topology, means.light)
        record = network.record
    stack.push_async_callback(asyncio.to_thread, leftovers.tear_down, record)
    return network, record


async def _build(
    bench: Bench, topology: Topology, light: Literal["ebpf", "mirred"]
) -> namespaces.Network:
    """Build the network; when cancelled meanwhile, take down what was built."""
    work = asyncio.to_thread(namespaces.build, topology, bench.links, light)
    building = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        await asyncio.wait({building})
        if not building.exception():  # else nothing was built
            leftovers.tear_down(building.result().record)
        raise


def _on_loopback(topology: Topology) -> Topology:
    """Return the topology of a bench whose circuits move nothing: all nodes on the loopback."""
    return replace(
        topology,
        nodes={
            name: replace(place, interface="lo", address=LOOPBACK)
            for name, place in topology.nodes.items()
        },
        tors={name: replace(place, steered=False) for name, place in topology.tors.items()},
    )


def join_killed(run_folder: Path) -> bool:
    """Go where the bench of a killed run still stands; False where it is gone.

    An ordinary user's bench stands in a user namespace, which this command must enter.
    """
    standing = leftovers.kept_for(run_folder)
    if outer_uid() != 0:
        processes = (process for record in standing.values() for process in record.processes)
        if living := next((process for process in processes if process.is_alive()), None):
            namespaces.enter_user_namespace(living.pid)
    return bool(standing)


def release(run_folder: Path) -> None:
    """Take down what still stands of the bench of a run that is recovered."""
    for path in leftovers.kept_for(run_folder):
        leftovers.tear_down(path)


def means_of(bench: Bench) -> Means:
    """Find out who can move packets here, in a user namespace of our own where that helps.

    Raises `InfrastructureError` where the bench file asks for what cannot be had.
    """
    wanted = bench.links.light
    if wanted == "none":
        return Means("none", 'the bench file says links.light = "none"')
    abilities = probe()
    if abilities.light == "none" and not abilities.user_namespaces:
        namespaces.enter_user_namespace()
        abilities = probe()
    reasons = {"ebpf": abilities.ebpf, "mirred": abilities.mirred}
    if wanted == "auto":
        return Means(abilities.light, abilities.namespaces or abilities.mirred)
    if reasons[wanted]:
        raise InfrastructureError(f'links.light = "{wanted}" is not to be had: {reasons[wanted]}')
    return Means(wanted)


def notes(bench: Bench, means: Means) -> tuple[str, ...]:
    """Return what a reader of an emulated run must know first."""
    if means.light == "none":
        told = (
            f"control plane only: circuits move no packets on this machine ({means.why});"
            " all traffic crosses the loopback"
        )
    elif bench.switches:
        told = (
            f"emulated bench: circuits move real packets on this machine ({means.light});"
            " switches are emulated units, their times are configured"
        )
    else:
        told = "emulated bench: nodes and their network are on this machine; no optical switch"
    return (told,)


# -- units and ToRs ----------------------------------------------------------------------


def _write_password(folder: Path) -> None:
    """Make the password by which drivers log in to what is emulated."""
    password_file = folder / PASSWORD_FILE
    password_file.touch(mode=0o600)
    password_file.write_text(secrets.token_urlsafe(18))


def _start_units(
    bench: Bench, network: namespaces.Network | None, folder: Path, children: Children
) -> None:
    """Start every emulated unit."""
    for name, switch in bench.switches.items():
        light = network.lights[name] if network else config.Light()
        unit = unit_of(name, switch, bench.links, folder, light)
        path = unit_file(folder, name)
        path.write_bytes(msgspec.json.encode(unit))
        argv = [sys.executable, "-m", "drivers.emulators", str(path)]
        # A pipe for its first line only: like hardware, the unit outlives whoever talks to it.
        children.start(unit_process(name), argv, follow=True)


def _start_tors(
    bench: Bench,
    topology: Topology,
    network: namespaces.Network | None,
    folder: Path,
    children: Children,
) -> dict[str, Tor]:
    """Start the SSH servers of ToRs that have one; return all that are steered, where they are."""
    if network is None:
        return {}
    steered = {
        name: msgspec.structs.replace(bench.tors[name], url=f"{NETNS}{network.netns[name]}")
        for name, place in topology.tors.items()
        if place.steered
    }
    for name, tor in steered.items():
        if tor.driver == "linux-ssh":
            path = folder / f"{name}.tor.json"
            path.write_bytes(msgspec.json.encode(_server_of(name, tor, network, folder)))
            argv = [sys.executable, "-m", "drivers.emulators.tor_server", str(path)]
            children.start(_tor_process(name), argv, follow=True)
    return steered


def _server_of(
    name: str, tor: Tor, network: namespaces.Network, folder: Path
) -> config.EmulatedTor:
    """Return what the SSH server of a bench file's ToR is told at its start."""
    return config.EmulatedTor(
        name=name,
        netns=network.netns[name],
        user=USER,
        password_file=str(folder / PASSWORD_FILE),
        faults=config.TorFaults(**msgspec.structs.asdict(tor.emulate)),
    )


def _tor_process(tor: str) -> str:
    return f"tor-{tor}"


async def _answering(process: str, spec: Emulated, folder: Path, children: Children) -> Emulated:
    """Wait until an emulated device answers; return the spec by which drivers reach it."""
    ready = msgspec.json.decode(await children.first_line(process), type=config.Ready)
    known_hosts = folder / f"{process}.known_hosts"
    known_hosts.write_text(ready.host_keys[0] + "\n")
    return msgspec.structs.replace(
        spec,
        url=ready.urls[0],
        known_hosts=str(known_hosts),
        key_file="",
        password_env="",
        password_file=str(folder / PASSWORD_FILE) if ready.host_keys[0] else "",
    )


def unit_of(
    name: str, switch: Switch, links: Links, folder: Path, light: config.Light
) -> config.EmulatedSwitch:
    """Return what the emulated unit of a bench file's switch is told at its start."""
    server = SERVER_OF_SCHEME[urlsplit(switch.url).scheme]
    protocol = PROTOCOL_OF_DRIVER[switch.driver]
    ssh = server == "ssh"
    face = config.Face(
        protocol=protocol,
        server=server,
        baud=baud_of(switch.url) or SerialAddress.baud,
        link=str(folder / f"{name}.tty") if server == "serial" else None,
        user=USER if ssh else None,
        password_file=str(folder / PASSWORD_FILE) if ssh else None,
        host_key_file=str(folder / f"{name}.hostkey") if ssh else None,
    )
    return behaviour_of(name, switch, links, faces=(face,), light=light)


# -- agents ------------------------------------------------------------------------------


def _start_agents(
    agents: Sequence[str],
    coordinator: str,
    network: namespaces.Network | None,
    folder: Path,
    children: Children,
) -> None:
    for name in agents:
        argv = [sys.executable, *agent_argv(name, coordinator, folder)]
        if network is not None:
            argv = ["nsenter", f"--net={namespace_path(network.netns[name])}", "--", *argv]
        children.start(f"agent-{name}", argv)
