"""Undo a run whose process is gone: put its switches and ToRs back, from snapshots alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from drivers.errors import DriverError
from harness.bench.leases import held
from harness.bench.running import close_all
from harness.bench.switches import ThreadedSwitch
from harness.bench.tors import SteerableTor
from harness.errors import HarnessError, InfrastructureError, RestoreFailed
from harness.run import custody


def recover(snapshots: Path) -> dict[str, str]:
    """Restore every switch and ToR that is not marked; return how each was left, by name.

    Raises `RestoreFailed`, naming each device that a person must look at, after trying them all.
    """
    pending = custody.pending(snapshots)
    with held({name: snapshot.spec for name, snapshot in pending.items()}, "harness recover"):
        outcomes = asyncio.run(_recover(pending, snapshots))
    if failed := {name: text for name, text in outcomes.items() if text.startswith("failed")}:
        told = "; ".join(f"{name} {text}" for name, text in failed.items())
        raise RestoreFailed(f"not as they were found: {told}")
    return outcomes


def abandon(snapshots: Path) -> dict[str, str]:
    """Mark the snapshots of devices that exist no more: there is nothing to put back."""
    pending = custody.pending(snapshots)
    for snapshot in pending.values():
        custody.write(snapshots, msgspec.structs.replace(snapshot, restored=True))
    return dict.fromkeys(pending, "gone: what was emulated ended with its bench")


async def _recover(
    pending: Mapping[str, custody.Snapshot | custody.Steered], folder: Path
) -> dict[str, str]:
    """Take all steering routes away, then put the switches back that traffic has left."""
    steered = {name: one for name, one in pending.items() if isinstance(one, custody.Steered)}
    maps = {name: one for name, one in pending.items() if isinstance(one, custody.Snapshot)}
    tors = {name: SteerableTor(name, one.spec) for name, one in steered.items()}
    switches = {
        name: ThreadedSwitch(name, one.spec, frozenset(one.ports), None)
        for name, one in maps.items()
    }
    try:
        unreachable = await _unopened((*tors.values(), *switches.values()))
        names = [name for name in tors if name not in unreachable]
        told = await asyncio.gather(*(_unsteer(tors[n], folder, steered[n]) for n in names))
        reached = {name: unit for name, unit in switches.items() if name not in unreachable}
        results = await custody.give_back(reached, folder, {name: maps[name] for name in reached})
    finally:
        await close_all((*tors.values(), *switches.values()))
    restored = {
        name: f"{outcome}: {difference}" if difference else outcome
        for name, (outcome, difference) in results.items()
    }
    return dict(zip(names, told, strict=True)) | restored | unreachable


async def _unopened(devices: Iterable[SteerableTor | ThreadedSwitch]) -> dict[str, str]:
    """Open devices at once; return why some of them were not."""

    async def open_one(device: SteerableTor | ThreadedSwitch) -> tuple[str, str]:
        try:
            await device.open()
        except HarnessError as error:
            return device.name, f"failed: {error}"
        return device.name, ""

    told = await asyncio.gather(*(open_one(device) for device in devices))
    return {name: text for name, text in told if text}


async def _unsteer(tor: SteerableTor, folder: Path, steered: custody.Steered) -> str:
    """Take the steering routes of one ToR away; return how that went."""
    try:
        found = await tor.read()
        await tor.apply(frozenset())
    except DriverError as error:
        return f"failed: {error}"
    told = f"restored: drop {', '.join(map(str, sorted(found)))}" if found else "unchanged"
    try:
        custody.write(folder, msgspec.structs.replace(steered, restored=True))
    except InfrastructureError as unmarked:  # it has no route of ours: the next one will see that
        told = f"{told}; {unmarked}"
    return told
