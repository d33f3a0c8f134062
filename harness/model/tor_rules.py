"""What must hold of the ToRs of a bench file: how they are steered, and what routes are made of.

As the rules of `harness.model.bench_rules`: pure, none raises, URLs are never quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, ip_address

from drivers.tor.base import DEVICE
from harness.model.access_rules import is_address, secret_problems, url_problems
from harness.model.bench import Bench, EmulatedTor, Port, Tor
from harness.model.ports import parse_cable
from harness.model.schema import dotted

UPLINKS_MAX = 1024
TORS_MAX = 250
"""Of a bench with addresses in the room for benchmarks: harness.fabric.topology has the plan."""
NODES_MAX = 245
"""Addresses of a ToR's /24 there, from .10 on."""
FRR_EXCHANGE_S = 10.0
"""The least for an FRR: a change is waited for until its daemons have put it in force."""
SSH = {"ssh": "ssh://admin@10.0.0.21:22"}
NETNS = 'netns:// where the coordinator itself is the ToR, or "netns://NAME" of a namespace there'
PORT = 'u1 = { interface = "swp49", address = "10.9.0.1" }'

_NETNS = re.compile(r"netns://[A-Za-z0-9_.-]{0,64}", re.ASCII)


def tor_problems(bench: Bench) -> Iterator[str]:
    """Yield all problems of a bench's ToRs, in the order of the file."""
    for name, tor in bench.tors.items():
        where = dotted("tors", name)
        if not 0 <= tor.uplinks <= UPLINKS_MAX:
            yield f"{where}.uplinks: expected 0 to {UPLINKS_MAX}"
        if not tor.exchange_timeout_s > 0:
            yield f"{where}.exchange_timeout_s: expected more than 0"
        if tor.driver == "frr-ssh" and tor.exchange_timeout_s < FRR_EXCHANGE_S:
            yield f"{where}.exchange_timeout_s: frr-ssh needs {FRR_EXCHANGE_S:g} or more"
        yield from (_reached if bench.world == "live" else _made)(where, tor, bench.world)
        yield from secret_problems(where, tor)
    if bench.world == "live":
        yield from _each_once(bench)
        yield from _laid_out(bench)


# -- how each is steered -----------------------------------------------------------------------


def _reached(where: str, tor: Tor, _world: str) -> Iterator[str]:
    """Check how a live ToR is reached: by what its driver speaks."""
    if tor.driver == "none":
        if tor.url:
            yield (
                f'{where}.url: driver = "none" steers nothing; name a driver ("linux-ssh", '
                '"frr-ssh", "netlink"), or leave the url out'
            )
    elif tor.driver == "netlink":
        if not _NETNS.fullmatch(tor.url):
            yield f"{where}.url: expected {NETNS}; netlink does not cross a network"
    elif not tor.url:
        yield f"{where}.url: missing; {tor.driver} steers over SSH, such as {SSH['ssh']}"
    else:
        yield from url_problems(where, tor, SSH, live=True)


def _made(where: str, tor: Tor, world: str) -> Iterator[str]:
    """Check a ToR of a bench that makes its own addresses and servers."""
    for key in ("url", "prefix", "ports"):
        if getattr(tor, key):
            yield f"{where}.{key}: only a live bench states it; leave it out where world = {world}"
    if tor.driver == "frr-ssh" and world == "emulated":
        yield (
            f"{where}.driver: frr-ssh steers real ToRs, and no FRR runs on emulated ones; use "
            '"linux-ssh" (over SSH, too) or "netlink"'
        )
    if tor.driver != "linux-ssh" and tor.emulate != EmulatedTor():
        yield (
            f'{where}.emulate: it is about a ToR\'s SSH server, which driver = "{tor.driver}" does '
            'not have; use "linux-ssh"'
        )
    ours = [f"u{k}" for k in range(1, min(tor.uplinks, UPLINKS_MAX) + 1)]
    if strange := [name for name in tor.emulate.deny_devices if name not in ours]:
        yield f"{where}.emulate.deny_devices: no uplink {strange[0]!r}; there are {_range(ours)}"
    for key in ("answer_ms", "lose_reply", "cut_apply", "die_on_apply"):
        if getattr(tor.emulate, key) < 0:
            yield f"{where}.emulate.{key}: expected 0 (never) or more"


def _each_once(bench: Bench) -> Iterator[str]:
    owner: dict[str, str] = {}
    for name, tor in bench.tors.items():
        where = dotted("tors", name)
        if tor.url and (first := owner.setdefault(tor.url, where)) != where:
            yield f"{where}.url: {first} has the same device"


# -- what routes are made of -------------------------------------------------------------------


def _laid_out(bench: Bench) -> Iterator[str]:
    """Check what routes are made of: where one ToR is steered, they lead to all of them."""
    steered = any(tor.driver != "none" for tor in bench.tors.values())
    cabled = _cabled(bench)
    owner = {node.address: dotted("nodes", name) for name, node in bench.nodes.items()}
    seen: dict[str, IPv4Network] = {}
    for name, tor in bench.tors.items():
        where = dotted("tors", name)
        if steered or tor.prefix:
            yield from _prefix(bench, name, seen)
        missing = [up for up in cabled.get(name, ()) if up not in tor.ports] if steered else []
        for uplink in missing:
            yield (
                f"{where}.ports.{uplink}: missing; say what the ToR calls it and its address on "
                f"the link, as in {PORT.replace('u1', uplink)}"
            )
        ours = [f"u{k}" for k in range(1, min(tor.uplinks, UPLINKS_MAX) + 1)]
        named: dict[str, str] = {}
        for uplink, port in tor.ports.items():
            here = f"{where}.{dotted('ports', uplink)}"
            if uplink not in ours:
                yield f"{here}: {name} has no such uplink; there are {_range(ours)}"
                continue
            yield from _port(here, port, owner, needs_name=tor.driver != "none")
            if port.interface and (first := named.setdefault(port.interface, here)) != here:
                yield f"{here}.interface: {first} is the same interface"


def _prefix(bench: Bench, name: str, seen: dict[str, IPv4Network]) -> Iterator[str]:
    where, text = f"{dotted('tors', name)}.prefix", bench.tors[name].prefix
    if not text:
        yield (
            f"{where}: missing; a live bench with steered ToRs states the network of each one's "
            'servers, such as "10.1.0.0/24"'
        )
        return
    try:
        network = IPv4Network(text)
    except ValueError:
        yield f'{where}: expected an IPv4 network, such as "10.1.0.0/24"'
        return
    if str(network) != text:
        yield f'{where}: write "{network}"'
    yield from (
        f"{where}: it overlaps {other}.prefix, so a route to one would lead to both"
        for other, theirs in seen.items()
        if network.overlaps(theirs)
    )
    seen[dotted("tors", name)] = network
    for node, place in bench.nodes.items():
        address = place.address
        if name in place.tors and is_address(address) and ip_address(address) not in network:
            yield f"{dotted('nodes', node)}.address: {address} is not in {where}, {network}"


def _port(where: str, port: Port, owner: dict[str, str], *, needs_name: bool) -> Iterator[str]:
    if not port.interface and needs_name:
        yield f"{where}.interface: missing; what the ToR calls this uplink, as in {PORT}"
    elif port.interface and not DEVICE.fullmatch(port.interface):
        yield f'{where}.interface: {port.interface!r} is no name of an interface, such as "swp49"'
    if not port.address:
        yield f"{where}.address: missing; the ToR's address on this uplink, as in {PORT}"
    elif not _is_ipv4(port.address):
        yield f'{where}.address: expected an IPv4 address, such as "10.9.0.1"'
    elif (first := owner.setdefault(port.address, where)) != where:
        yield f"{where}.address: {first} has the same address"


def _cabled(bench: Bench) -> Mapping[str, list[str]]:
    """Return the uplinks that cables name, by ToR; rows that are none are told elsewhere."""
    found: dict[str, list[str]] = {}
    for near, far in bench.cables.items():
        with suppress(ValueError):  # a trunk, or no cable at all
            cable = parse_cable(near, far)
            found.setdefault(cable.tor, []).append(cable.uplink)
    return found


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def _range(names: list[str]) -> str:
    return f"{names[0]} to {names[-1]}" if names else "none"
