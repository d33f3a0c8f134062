"""``harness ocs``: one switch of a live bench at the prompt.

Reads show the whole map; changes go through `drivers.apply`, so only circuits whose both ports the
bench file calls ours are ever touched, and every change is read back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from drivers import apply as contract
from drivers.base import Applied, Circuit, Delta, Matching, Ocs, PowerMonitor
from drivers.catalog import open_ocs
from drivers.errors import NoLight
from harness.bench.credentials import credentials_of
from harness.bench.leases import held
from harness.cli.output import json_option, show
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import ExitCode, UsageError
from harness.model.bench import Switch
from harness.model.load import load_bench, load_map
from harness.model.mapfile import format_map
from harness.model.ports import parse_ports

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class Unit:
    """An open switch: its driver, its row of the bench file, and its ports that are ours."""

    ocs: Ocs
    spec: Switch
    ours: frozenset[int]

    def read(self) -> Matching:
        """Read our part of the map."""
        return contract.read_ours(self.ocs, self.ours)

    def apply(self, wanted: Matching) -> Applied:
        """Make `wanted` our part of the map."""
        limit_ns = after_ns(self.spec.apply_timeout_s)
        return contract.apply(self.ocs, wanted, self.ours, deadline_ns=limit_ns)

    def monitor(self) -> PowerMonitor | None:
        """Return the unit's power meter, if it has one."""
        has_power = self.ocs.capabilities.has_power
        return self.ocs if has_power and isinstance(self.ocs, PowerMonitor) else None


def after_ns(duration_s: float) -> int:
    """Return the monotonic deadline that lies `duration_s` ahead."""
    return time.monotonic_ns() + round(duration_s * NS_PER_S)


@contextmanager
def opened(bench_file: Path, name: str) -> Iterator[Unit]:
    """Open the switch that the bench file calls `name`; raises `UsageError` for no such switch."""
    bench = load_bench(bench_file)
    spec = bench.switches.get(name)
    if spec is None:
        there = ", ".join(bench.switches) or "none"
        raise UsageError(f"{bench_file}: no switch {name!r}; there are: {there}")
    if bench.world != "live":
        raise UsageError(
            f"{bench_file}: its world is {bench.world!r}, so its switches exist only during a run; "
            "to play with one, start it with: harness emulate polatis"
        )
    ocs = open_ocs(
        spec.driver,
        spec.url,
        name=name,
        credentials=credentials_of(name, spec),
        exchange_timeout_ns=round(spec.exchange_timeout_s * NS_PER_S),
    )
    try:
        yield Unit(ocs, spec, parse_ports(spec.ports))
    finally:
        ocs.close()


def on_switch(function: F) -> F:
    """Give a command its SWITCH and ``--bench``, passed as `switch` and `bench`."""
    option = click.option(
        "--bench", type=FILE, required=True, metavar="FILE", help="Bench file that has the switch."
    )
    return click.argument("switch")(option(function))


def dry_run_option(function: F) -> F:
    """Give a command its ``--dry-run`` flag, passed as `dry_run`."""
    text = "Read the map and print the device commands of the change; send none of them."
    return click.option("--dry-run", is_flag=True, help=text)(function)


class CircuitType(click.ParamType[Circuit]):
    """A circuit on the command line, ``1:17``."""

    name = "circuit"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Circuit:
        """Parse ``INGRESS:EGRESS``; fails with a usage error."""
        ingress, _, egress = str(value).partition(":")
        if not (ingress.isdecimal() and egress.isdecimal()):
            self.fail(f"{value!r} is no circuit; write INGRESS:EGRESS, such as 1:17", param, ctx)
        return int(ingress), int(egress)


CIRCUITS = click.argument("circuits", nargs=-1, required=True, type=CircuitType())


@click.group()
def ocs() -> None:
    """Read and change an optical circuit switch.

    \b
    harness ocs show agg0 --bench my-lab.toml
    harness ocs connect agg0 1:17 2:18 --bench my-lab.toml --dry-run
    harness ocs apply agg0 map.toml --bench my-lab.toml
    harness ocs verify agg0 map.toml --bench my-lab.toml
    """


@ocs.command("show")
@on_switch
@click.option("--map", "as_map", is_flag=True, help="Print our circuits as a map file for apply.")
@json_option
def show_switch(switch: str, bench: Path, as_map: bool, as_json: bool) -> None:
    """Show who SWITCH is, its circuits and its light; nothing is changed.

    \b
    harness ocs show agg0 --bench my-lab.toml
    harness ocs show agg0 --bench my-lab.toml --map > map.toml
    """
    with opened(bench, switch) as unit:
        whole, identity = unit.ocs.read(), unit.ocs.identify()
        monitor, egress = unit.monitor(), [b for _, b in whole]
        powers = dict(monitor.power_dbm(egress)) if monitor and egress else {}
    mine = Matching.of((a, b) for a, b in whole if a in unit.ours and b in unit.ours)
    if as_map:
        click.echo(format_map(mine))
        return
    value = {
        "switch": switch,
        "vendor": identity.vendor,
        "model": identity.model,
        "serial": identity.serial,
        "firmware": identity.firmware,
        "ingress": bounds(identity.ingress),
        "egress": bounds(identity.egress),
        "ours": unit.spec.ports,
        "circuits": [
            {"ingress": a, "egress": b, "ours": (a, b) in mine, "power_dbm": powers.get(b)}
            for a, b in whole
        ],
    }
    who = f"{identity.vendor} {identity.model} {identity.serial}, firmware {identity.firmware}"
    ports = f"ports {span(identity.ingress)} to {span(identity.egress)}, ours {unit.spec.ports}"
    lines = [f"{switch}: {who}; {ports}"]
    for a, b in whole:
        lines.append(f"  {a}:{b}{light(powers, b)}{'' if (a, b) in mine else '  not ours'}")
    show(value, "\n".join(lines if len(whole) else [*lines, "  no circuit"]), as_json=as_json)


def span(ports: range) -> str:
    """Write a range of ports as people do, ``1-16``."""
    return f"{ports.start}-{ports.stop - 1}"


def bounds(ports: range) -> tuple[int, int]:
    """Return the first and the last port."""
    return ports.start, ports.stop - 1


def light(powers: dict[int, float], egress: int) -> str:
    """Write the power at an egress port, where it was measured."""
    return f"  {powers[egress]:.1f} dBm" if egress in powers else ""


@ocs.command("apply")
@on_switch
@click.argument("map_file", type=FILE, metavar="MAP")
@dry_run_option
@json_option
def apply_map(switch: str, map_file: Path, bench: Path, dry_run: bool, as_json: bool) -> None:
    """Make MAP the whole map of our ports of SWITCH; only the difference is sent, then read back.

    A map file is TOML: [circuits] with one line "1" = 17 for each circuit.

    \b
    harness ocs apply agg0 map.toml --bench my-lab.toml --dry-run
    """
    wanted = load_map(map_file)
    with opened(bench, switch) as unit:
        change(switch, unit, wanted, dry_run=dry_run, as_json=as_json)


@ocs.command()
@on_switch
@CIRCUITS
@dry_run_option
@json_option
def connect(
    switch: str, circuits: tuple[Circuit, ...], bench: Path, dry_run: bool, as_json: bool
) -> None:
    """Make CIRCUITS on SWITCH; all others stay, and a busy port is refused.

    \b
    harness ocs connect agg0 1:17 2:18 --bench my-lab.toml
    """
    with opened(bench, switch) as unit:
        before = unit.read()
        if busy := [held for held in before if shares_port(held, circuits)]:
            raise UsageError(
                f"{switch}: {written(circuits)} needs ports of {written(busy)}; disconnect first"
            )
        wanted = Matching.of([*before, *circuits])
        change(switch, unit, wanted, dry_run=dry_run, as_json=as_json)


def shares_port(held: Circuit, circuits: tuple[Circuit, ...]) -> bool:
    """Return whether one of `circuits` would take a port from `held`."""
    return held not in circuits and any(held[0] == a or held[1] == b for a, b in circuits)


@ocs.command()
@on_switch
@CIRCUITS
@dry_run_option
@json_option
def disconnect(
    switch: str, circuits: tuple[Circuit, ...], bench: Path, dry_run: bool, as_json: bool
) -> None:
    """Drop CIRCUITS on SWITCH; all others stay.

    \b
    harness ocs disconnect agg0 1:17 --bench my-lab.toml
    """
    with opened(bench, switch) as unit:
        before = unit.read()
        if absent := [circuit for circuit in circuits if circuit not in before]:
            raise UsageError(
                f"{switch}: no circuit of ours is {written(absent)}; there are {written(before)}"
            )
        wanted = Matching(before.circuits - set(circuits))
        change(switch, unit, wanted, dry_run=dry_run, as_json=as_json)


@ocs.command()
@on_switch
@click.argument("map_file", type=FILE, metavar="MAP")
@json_option
def verify(switch: str, map_file: Path, bench: Path, as_json: bool) -> int:
    """Compare our part of the map of SWITCH with MAP, and look for light; ends with 1 if not so.

    \b
    harness ocs verify agg0 map.toml --bench my-lab.toml
    """
    wanted = load_map(map_file)
    with opened(bench, switch) as unit:
        contract.check(wanted, unit.ours, unit.ocs.identify())
        delta = Delta.between(unit.read(), wanted)
        dark = dark_ports(unit, [b for _, b in delta.keep])
        measured = unit.monitor() is not None
    wrong = [f"missing: {written(delta.make)}"] if delta.make else []
    wrong += [f"unexpected: {written(delta.drop)}"] if delta.drop else []
    wrong += [f"dark: egress {b} ({dbm:.1f} dBm)" for b, dbm in sorted(dark.items())]
    good = f"as {map_file} says: {len(wanted)} circuits, " + (
        "all lit" if measured else "light not measured (the unit has no power meter)"
    )
    value = {
        "switch": switch,
        "same": not delta,
        "missing": delta.make,
        "unexpected": delta.drop,
        "dark_dbm": dark if measured else None,
    }
    show(value, "\n".join(f"{switch}: {line}" for line in wrong or [good]), as_json=as_json)
    return ExitCode.FAILED if wrong else ExitCode.PASSED


def dark_ports(unit: Unit, egress: list[int]) -> dict[int, float]:
    """Return the ports of `egress` that stay dark, with their dBm; empty without a power meter."""
    monitor = unit.monitor()
    if monitor is None or not egress:
        return {}
    limit_ns = after_ns(unit.spec.light_timeout_s)
    try:
        contract.wait_for_light(monitor, egress, unit.spec.light_floor_dbm, limit_ns)
    except NoLight as error:
        return error.ports
    return {}


def change(switch: str, unit: Unit, wanted: Matching, *, dry_run: bool, as_json: bool) -> None:
    """Apply `wanted` and tell what changed and when, or only what would be sent."""
    if dry_run:
        delta = contract.plan(unit.ocs, wanted, unit.ours)
        commands = unit.ocs.preview(delta)
        text = "\n".join([told(switch, delta), *(f"  {line}" for line in commands)])
        show({"switch": switch, **asdict(delta), "commands": commands}, text, as_json=as_json)
        return
    with held({switch: unit.spec}, "harness ocs"):
        applied = unit.apply(wanted)
    acknowledged_ms = (applied.acknowledged_ns - applied.sent_ns) / NS_PER_MS
    done_ms = (applied.done_ns - applied.sent_ns) / NS_PER_MS
    text = told(switch, applied.delta)
    if applied.delta:
        text += (
            f"\n  acknowledged {acknowledged_ms:.3f} ms and read back {done_ms:.3f} ms after the "
            "last command"
        )
    value = {
        "switch": switch,
        **asdict(applied.delta),
        "acknowledged_ms": acknowledged_ms,
        "done_ms": done_ms,
    }
    show(value, text, as_json=as_json)


def told(switch: str, delta: Delta) -> str:
    """Say in one line what a change does."""
    if not delta:
        return f"{switch}: nothing to change, {len(delta.keep)} circuits stay"
    return (
        f"{switch}: drop {written(delta.drop)}; make {written(delta.make)}; "
        f"{len(delta.keep)} circuits stay"
    )


def written(circuits: tuple[Circuit, ...] | list[Circuit] | Matching) -> str:
    """Write circuits as the command line takes them."""
    return " ".join(f"{a}:{b}" for a, b in circuits) or "none"
