"""What must hold between the values of a bench file, beyond their types. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises,
whatever the (well-typed) bench; `harness.model.load` collects them all. URLs are never quoted:
they are where a password ends up by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import NamedTuple

from harness.model.access_rules import bounded_int, is_address, secret_problems, url_problems
from harness.model.bench import Bench, EmulatedUnit, Node, Switch
from harness.model.ports import PORT_MAX, Fibres, is_trunk, parse_cable, parse_ports, parse_trunk
from harness.model.schema import did_you_mean, dotted
from harness.model.tor_rules import tor_problems

GPUS_MAX = 1024

LINES_OF: Mapping[str, tuple[str, ...]] = {
    "polatis-scpi": ("serial", "tcp"),
    "polatis-tl1": ("ssh", "tcp"),
}
"""Driver -> the lines that its units answer on."""

EXAMPLES: Mapping[str, str] = {
    "serial": "serial:///dev/ttyUSB0?baud=38400",
    "ssh": "ssh://admin@10.0.0.5:6252",
    "tcp": "tcp://10.0.0.5:5025",
}

LAUNCHERS_OF: Mapping[str, tuple[str, ...]] = {
    "live": ("manual", "local"),
    "emulated": ("namespaces", "local"),
    "simulated": ("manual", "local", "namespaces"),
}
"""World -> launchers that can start its agents; a simulated world starts none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}", re.ASCII)
_TOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,31}", re.ASCII)


def bench_problems(bench: Bench) -> Iterator[str]:
    """Yield all problems of a bench, in the order of the file's tables."""
    yield from _world(bench)
    yield from _names(bench)
    yield from _nodes(bench)
    yield from tor_problems(bench)
    for name, switch in bench.switches.items():
        yield from _switch(bench, dotted("switches", name), switch)
    yield from _each_once(bench)
    yield from _cables(bench)
    yield from _links(bench)


# -- world, names, nodes -----------------------------------------------------------------------


def _world(bench: Bench) -> Iterator[str]:
    launchers = LAUNCHERS_OF[bench.world]
    if bench.launcher not in launchers:
        right = " or ".join(f'"{launcher}"' for launcher in launchers)
        yield (
            f'launcher: "{bench.launcher}" does not go with world = "{bench.world}"; use {right}'
        )
    if bench.listen:
        host, _, port = bench.listen.rpartition(":")
        if (
            not host
            or not port.isascii()
            or not port.isdigit()
            or not 1 <= bounded_int(port) <= PORT_MAX
        ):
            yield 'listen: expected HOST:PORT, such as "10.0.0.1:7000"'
        elif host in ("0.0.0.0", "*", "[::]"):  # noqa: S104 - refused, not bound to
            yield "listen: name the address that the nodes reach, not all of this machine's"
    elif bench.world == "live" and bench.launcher == "manual":
        yield (
            "listen: missing; a live bench says where the coordinator waits for its agents, "
            'such as "10.0.0.1:7000"'
        )
    if bench.world == "live" and bench.launcher == "manual" and not bench.keys:
        yield "keys: missing; name the folder that `harness keys make` made for this bench"
    if bench.keys.startswith("~") and not bench.keys.startswith("~/"):
        yield "keys: only your own home folder can be written with ~, as in ~/.harness/keys"
    if not bench.max_wait_s > 0:
        yield "max_wait_s: expected more than 0"
    if bench.world == "simulated" and not bench.simulation.calibration:
        yield (
            "simulation.calibration: missing; say what times are taken from, as in [simulation] "
            'with calibration = "../calibrations/h800.toml"; `harness calibrate run RUN --out FILE`'
            " makes one of runs"
        )


def _names(bench: Bench) -> Iterator[str]:
    taken: dict[str, str] = {}
    for table, names in (
        ("tors", bench.tors),
        ("nodes", bench.nodes),
        ("switches", bench.switches),
    ):
        for name in names:
            where = dotted(table, name)
            if table == "tors" and not _TOR_NAME.fullmatch(name):
                yield (
                    f"{where}: a ToR's name is up to 32 letters, digits, '_' and '.'; no '-', "
                    "which joins two ToRs in a circuit"
                )
            elif not _NAME.fullmatch(name):
                yield f"{where}: a name is up to 32 letters, digits, '_', '.' and '-'"
            if name in taken:
                yield f"{where}: {taken[name]} has the same name; every name is given once"
            taken.setdefault(name, where)


def _nodes(bench: Bench) -> Iterator[str]:
    if not bench.nodes and bench.generated is None:
        yield "nodes: none; a bench has at least one node"
    for name, node in bench.nodes.items():
        where = dotted("nodes", name)
        yield from _plugged(bench, where, node)
        yield from _gpus(where, node)
        yield from _speed(bench, where, node)
        for key in ("host", "interface", "address") if bench.world == "live" else ():
            if not getattr(node, key):
                yield f"{where}.{key}: missing; every node of a live bench states it"
        if node.address and bench.world != "live":
            yield f"{where}.address: an {bench.world} bench makes its addresses; leave it out"
        if node.address and not is_address(node.address):
            yield f'{where}.address: expected an IP address, such as "10.1.0.11"'


def _plugged(bench: Bench, where: str, node: Node) -> Iterator[str]:
    """Check the ToRs that a node hangs on."""
    if node.tor and node.rails:
        yield f"{where}.rails: the node names tor, too, for its only NIC; keep one of the two"
    elif not node.tor and not node.rails:
        yield f"{where}.tor: missing; name the ToR that its NIC is plugged into"
    elif len(node.rails) > 1 and bench.world != "simulated":
        yield (
            f"{where}.rails: {len(node.rails)} NICs, which only a node of a simulated bench can "
            "have; name the ToR of its one data port with tor"
        )
    else:
        key = "rails" if node.rails else "tor"
        for tor in dict.fromkeys(node.tors):
            if tor not in bench.tors:
                yield f"{where}.{key}: no ToR {tor!r}{did_you_mean(tor, bench.tors)}"


def _gpus(where: str, node: Node) -> Iterator[str]:
    for key in ("gpus", "emulated_gpus"):
        if not 0 <= getattr(node, key) <= GPUS_MAX:
            yield f"{where}.{key}: expected 0 to {GPUS_MAX}"
    if node.gpus and node.emulated_gpus:
        yield f"{where}.emulated_gpus: the node has GPUs of its own (gpus); keep one of the two"


def _speed(bench: Bench, where: str, node: Node) -> Iterator[str]:
    if not (node.speed > 0 and isfinite(node.speed)):
        yield f"{where}.speed: expected more than 0; 1 is as fast as figures say, 0.5 half as fast"
    elif node.speed != 1 and bench.world != "simulated":
        yield (
            f"{where}.speed: only a simulated bench has nodes that are slower or faster; what "
            f"{'an emulated' if bench.world == 'emulated' else 'a live'} one computes on is as "
            "fast as it is; leave it out"
        )


# -- links -------------------------------------------------------------------------------------


def _links(bench: Bench) -> Iterator[str]:
    links = bench.links
    for key in ("link_mbit_per_s", "oversubscription"):
        if not getattr(links, key) > 0:
            yield f"links.{key}: expected more than 0"
    if links.nic_hold_ms < 0:
        yield "links.nic_hold_ms: expected 0 or more"
    if bench.world != "simulated":
        if links.electrical != "spine":
            yield (
                f'links.electrical: "{links.electrical}" is for simulated benches; the electrical '
                'path of others is always there, between all ToRs ("spine")'
            )
        if links.forwarding:
            yield "links.forwarding: only a simulated bench has hosts that forward; leave it out"
    elif links.electrical == "rail":
        yield from _rails_apart(bench)


def _rails_apart(bench: Bench) -> Iterator[str]:
    """Check that each ToR is of one rail, where the electrical path joins those of a rail."""
    rail_of: dict[str, int] = {}
    for name, node in bench.nodes.items():
        for rail, tor in enumerate(node.tors):
            if (first := rail_of.setdefault(tor, rail)) != rail:
                yield (
                    f"{dotted('nodes', name)}.rails: NIC {rail} is on {tor}, which has NICs "
                    f'{first} of others; with links.electrical = "rail" a ToR is of one rail'
                )
                return


# -- switches ----------------------------------------------------------------------------------


def _switch(bench: Bench, where: str, switch: Switch) -> Iterator[str]:
    examples = {line: EXAMPLES[line] for line in LINES_OF[switch.driver]}
    yield from url_problems(where, switch, examples, live=bench.world == "live")
    yield from secret_problems(where, switch)
    if not 1 <= switch.power_averaging <= 8:
        yield f"{where}.power_averaging: expected 1 to 8, as set on the unit"
    for key in ("exchange_timeout_s", "apply_timeout_s", "light_timeout_s", "switch_ms"):
        if not getattr(switch, key) > 0:
            yield f"{where}.{key}: expected more than 0"
    yield from _unit(f"{where}.emulate", switch.emulate)
    try:
        ours = parse_ports(switch.ports)
    except ValueError as error:
        yield f"{where}.ports: {error}"
        return
    size = switch.emulate.ports
    if bench.world != "live" and 1 <= size < max(ours) / 2:
        yield (
            f"{where}.ports: port {max(ours)} is beyond the emulated unit: ingress 1-{size}, "
            f"egress {size + 1}-{2 * size} (emulate.ports = {size})"
        )


def _unit(where: str, unit: EmulatedUnit) -> Iterator[str]:
    if not 1 <= unit.ports <= PORT_MAX // 2:
        yield f"{where}.ports: expected 1 to {PORT_MAX // 2}, the N of an N x N unit"
        return
    for key in ("switch_ms", "switch_sd_ms", "answer_ms", "insertion_loss_db", "reboot_ms"):
        if getattr(unit, key) < 0:
            yield f"{where}.{key}: expected 0 or more"
    for key in ("failed_ports", "stuck_ports", "deny_ports"):
        if beyond := [port for port in getattr(unit, key) if not 1 <= port <= 2 * unit.ports]:
            yield f"{where}.{key}: port {beyond[0]} is not one of 1-{2 * unit.ports}"
    swapped = [port for pair in unit.swapped_ports for port in pair]
    pairs = all(len(pair) == 2 for pair in unit.swapped_ports)
    if not pairs or any(not unit.ports < port <= 2 * unit.ports for port in swapped):
        egress = f"{unit.ports + 1}-{2 * unit.ports}"
        yield f"{where}.swapped_ports: expected pairs of egress ports, {egress}"
    if len(set(swapped)) != len(swapped):
        yield f"{where}.swapped_ports: names a port twice"
    for key in ("die_on_command", "reboot_on_command", "cut_reply", "lose_reply"):
        if getattr(unit, key) < 0:
            yield f"{where}.{key}: expected 0 (never) or more"


def _each_once(bench: Bench) -> Iterator[str]:
    """Addresses of nodes and devices: two with the same one cannot both be right."""
    if bench.world != "live":
        return
    owner: dict[str, str] = {}
    for name, node in bench.nodes.items():
        where = dotted("nodes", name)
        if node.address and (first := owner.setdefault(node.address, where)) != where:
            yield f"{where}.address: {first} has the same address"
    for name, switch in bench.switches.items():
        where = dotted("switches", name)
        if (first := owner.setdefault(switch.url.partition("?")[0], where)) != where:
            yield f"{where}.url: {first} has the same device"


# -- cables ------------------------------------------------------------------------------------


def _cables(bench: Bench) -> Iterator[str]:
    uplinks: dict[tuple[str, str], str] = {}
    fibres: dict[tuple[str, int], str] = {}
    for near, far in bench.cables.items():
        where = dotted("cables", near)
        try:
            ends = _parsed(bench, near, far, uplinks)
        except ValueError as error:
            yield f"{where}: {error}"
            continue
        yield from (f"{where}: {problem}" for problem in ends.problems)
        for end in ends.fibres:
            yield from (f"{where}: {problem}" for problem in _end(bench, end))
            for port in _ports_of(bench, end):
                if (first := fibres.setdefault((end.switch, port), near)) != near:
                    yield f"{where}: port {port} of {end.switch} is taken by the cable of {first!r}"


class _Ends(NamedTuple):
    """The fibre pairs that a cable takes, and what is wrong with it as a whole."""

    fibres: tuple[Fibres, ...]
    problems: tuple[str, ...]


def _parsed(bench: Bench, near: str, far: str, uplinks: dict[tuple[str, str], str]) -> _Ends:
    """Read a row; `uplinks` remembers who took which. Raises `ValueError` where it is none."""
    if is_trunk(near) and near.partition(":")[0] not in bench.tors:
        ends = parse_trunk(near, far)
        tiers = sorted(bench.switches[e.switch].tier for e in ends if e.switch in bench.switches)
        wrong = len(tiers) == 2 and tiers != ["aggregation", "core"]
        text = "a trunk joins an aggregation switch and a core switch (switches.NAME.tier)"
        return _Ends(ends, (text,) if wrong else ())
    cable = parse_cable(near, far)
    problems = []
    if cable.tor not in bench.tors:
        problems += [f"no ToR {cable.tor!r}{did_you_mean(cable.tor, bench.tors)}"]
    elif int(cable.uplink[1:]) > (count := bench.tors[cable.tor].uplinks):
        there = f"(tors.{cable.tor}.uplinks = {count})"
        problems += [f"{cable.tor} has no uplink {cable.uplink} {there}"]
    if (first := uplinks.setdefault((cable.tor, cable.uplink), near)) != near:
        problems += [f"the same uplink as {first!r}; an uplink takes one cable"]
    return _Ends((Fibres(cable.switch, cable.ingress, cable.egress),), tuple(problems))


def _end(bench: Bench, end: Fibres) -> Iterator[str]:
    if end.switch not in bench.switches:
        yield f"no switch {end.switch!r}{did_you_mean(end.switch, bench.switches)}"
        return
    if bench.world == "live" and end.egress is None:
        yield (
            "a live bench names both ports, ingress and egress, as in "
            f'"{end.switch}:{end.ingress}/{end.ingress + 16}"'
        )
    yield from _on_the_unit(bench, end)
    try:
        ours = parse_ports(bench.switches[end.switch].ports)
    except ValueError:  # told where the switch is checked
        return
    for port in _ports_of(bench, end):
        if port not in ours:
            yield (
                f"port {port} of {end.switch} is not ours; move the cable, or add the port to "
                f'switches.{end.switch}.ports ("{bench.switches[end.switch].ports}")'
            )


def _on_the_unit(bench: Bench, cable: Fibres) -> Iterator[str]:
    """Ports of an N x N unit whose N we know: ingress 1..N, egress N+1..2N."""
    if cable.ingress == cable.egress:
        yield f"ingress and egress are the same port {cable.ingress}"
    size = bench.switches[cable.switch].emulate.ports
    if bench.world == "live":
        return
    if cable.ingress > size:
        yield f"{cable.switch} has ingress ports 1-{size}, not {cable.ingress}"
    elif cable.egress is not None and not size < cable.egress <= 2 * size:
        yield f"{cable.switch} has egress ports {size + 1}-{2 * size}, not {cable.egress}"


def _ports_of(bench: Bench, cable: Fibres) -> list[int]:
    """Ports that the cable takes, as far as the file tells."""
    if cable.switch not in bench.switches:
        return []
    if cable.egress is not None:
        return [cable.ingress, cable.egress]
    if bench.world == "live":
        return [cable.ingress]
    return [cable.ingress, cable.ingress + bench.switches[cable.switch].emulate.ports]
