"""Undo a run whose process is gone: put its switches back, from snapshots alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from harness.bench.leases import held
from harness.bench.running import close_switches
from harness.bench.switches import ThreadedSwitch
from harness.errors import HarnessError, RestoreFailed
from harness.run import custody


def recover(snapshots: Path) -> dict[str, str]:
    """Restore every switch that is not marked restored; return how each was left, by name.

    Raises `RestoreFailed`, naming each switch that a person must look at, after trying them all.
    """
    pending = {
        name: snapshot
        for name, snapshot in custody.read_all(snapshots).items()
        if not snapshot.restored
    }
    with held({name: snapshot.spec for name, snapshot in pending.items()}, "harness recover"):
        outcomes = asyncio.run(_recover(pending, snapshots))
    if failed := {name: text for name, text in outcomes.items() if text.startswith("failed")}:
        told = "; ".join(f"{name} {text}" for name, text in failed.items())
        raise RestoreFailed(f"switches are not as they were found: {told}")
    return outcomes


def abandon(snapshots: Path) -> dict[str, str]:
    """Mark the snapshots of units that exist no more: there is nothing to put back."""
    pending = [one for one in custody.read_all(snapshots).values() if not one.restored]
    for snapshot in pending:
        custody.write(snapshots, msgspec.structs.replace(snapshot, restored=True))
    return {snapshot.switch: "gone: the emulated unit ended with its bench" for snapshot in pending}


async def _recover(pending: dict[str, custody.Snapshot], folder: Path) -> dict[str, str]:
    switches = {
        name: ThreadedSwitch(name, snapshot.spec, frozenset(snapshot.ports), None)
        for name, snapshot in pending.items()
    }
    unreachable: dict[str, str] = {}

    async def open_one(name: str) -> None:
        try:
            await switches[name].open()
        except HarnessError as error:
            unreachable[name] = f"failed: {error}"

    await asyncio.gather(*(open_one(name) for name in switches))
    reached = {name: switch for name, switch in switches.items() if name not in unreachable}
    try:
        results = await custody.give_back(
            reached, folder, {name: pending[name] for name in reached}
        )
    finally:
        await close_switches(switches)
    told = {
        name: f"{outcome}: {difference}" if difference else outcome
        for name, (outcome, difference) in results.items()
    }
    return told | unreachable
