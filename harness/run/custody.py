"""Devices are put back as they were found: snapshots on disk before the first change.

A snapshot holds all that another process needs to undo the run: how to reach the unit (no secret,
only where secrets are), which ports are ours, and the circuits found on them. It is marked
*restored* only after the map was read back, so a file without the mark is work for
``harness recover``. Of a ToR that is steered nothing is kept but how to reach it: our routes bear
our mark, and it is put back by taking all of them away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from drivers.base import Delta, Matching
from drivers.errors import DriverError
from harness.bench.base import Bench, SwitchHandle
from harness.errors import InfrastructureError, RestoreFailed, SteeringFailed
from harness.model.bench import Switch, Tor

SUFFIX = ".snapshot.json"
STEERED_SUFFIX = ".steered.json"


S = TypeVar("S")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The map of one switch, on our ports, before the first change."""

    switch: str
    spec: Switch
    """With the URL that was really used (an emulated unit's is made at its start)."""
    ports: tuple[int, ...]
    circuits: tuple[tuple[int, int], ...]
    restored: bool = False

    @property
    def file(self) -> str:
        """The name of the snapshot's file."""
        return f"{self.switch}{SUFFIX}"

    @property
    def matching(self) -> Matching:
        """The circuits as a matching."""
        return Matching.of(self.circuits)


class Steered(msgspec.Struct, frozen=True, kw_only=True):
    """A ToR on which we write routes."""

    tor: str
    spec: Tor
    """With the URL that is really used."""
    restored: bool = False

    @property
    def file(self) -> str:
        """The name of the snapshot's file."""
        return f"{self.tor}{STEERED_SUFFIX}"


def write(folder: Path | None, snapshot: Snapshot | Steered) -> None:
    """Write or replace the snapshot, durably: it must outlive this process and this machine.

    Not where there is no folder: of a bench that ends with this process, nothing is left to put
    back.

    Raises `InfrastructureError` where it cannot be written; the one before stays.
    """
    if folder is None:
        return
    path = folder / snapshot.file
    scratch = path.with_suffix(".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(snapshot), indent=1))
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise InfrastructureError(f"{path}: cannot be written: {error.strerror}") from error


def read_all(folder: Path) -> dict[str, Snapshot]:
    """Read every snapshot of a run folder, by switch.

    Raises `RestoreFailed` on one that is damaged: what its switch held, nobody knows.
    """
    found = (_read_one(path, Snapshot) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return {snapshot.switch: snapshot for snapshot in found}


def read_steered(folder: Path) -> dict[str, Steered]:
    """Read which ToRs a run steers; raises `RestoreFailed` where that is damaged."""
    found = (_read_one(path, Steered) for path in sorted(folder.glob(f"*{STEERED_SUFFIX}")))
    return {steered.tor: steered for steered in found}


def pending(folder: Path) -> dict[str, Snapshot | Steered]:
    """Read all that is not marked restored, by switch or ToR; raises `RestoreFailed` as above."""
    found: dict[str, Snapshot | Steered] = {**read_steered(folder), **read_all(folder)}
    return {name: snapshot for name, snapshot in found.items() if not snapshot.restored}


def _read_one(path: Path, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        text = f"{path}: the snapshot cannot be read, so a person must look at the device: {error}"
        raise RestoreFailed(text) from error


async def take(bench: Bench, folder: Path | None) -> dict[str, Snapshot]:
    """Write snapshots of every switch, and of ToRs; nothing may be changed before this returns.

    Returns those of switches. Raises `InfrastructureError` naming a switch that cannot be read.
    """
    maps = await asyncio.gather(*(_read(switch) for switch in bench.switches.values()))
    snapshots = {
        name: Snapshot(
            switch=name,
            spec=switch.spec,
            ports=tuple(sorted(bench.topology.ours[name])),
            circuits=tuple(matching),
        )
        for (name, switch), matching in zip(bench.switches.items(), maps, strict=True)
    }
    for snapshot in snapshots.values():
        write(folder, snapshot)
    for name, tor in bench.tors.items():
        write(folder, Steered(tor=name, spec=tor.spec))
    return snapshots


async def _read(switch: SwitchHandle) -> Matching:
    try:
        return await switch.read()
    except DriverError as error:
        raise InfrastructureError(f"{switch.name}: its map cannot be read: {error}") from error


async def unsteer(bench: Bench, folder: Path | None) -> list[str]:
    """Steer everything to the electrical path; return what failed, each with its ToR's name."""
    failures: dict[str, str] = {}
    try:
        await bench.steer(bench.topology.routes(frozenset()))
    except SteeringFailed as refusal:
        failures = refusal.failures
    except Exception as error:
        return [f"steering: {str(error) or type(error).__name__}"]
    for name, tor in bench.tors.items():
        if name not in failures:
            with suppress(InfrastructureError):  # unmarked, `recover` will find no route of ours
                write(folder, Steered(tor=name, spec=tor.spec, restored=True))
    return list(failures.values())


async def give_back(
    switches: Mapping[str, SwitchHandle], folder: Path | None, snapshots: Mapping[str, Snapshot]
) -> dict[str, tuple[str, str]]:
    """Put every switch back at once; return (outcome, difference) by switch.

    Outcomes: *unchanged*, *restored*, or *failed* with the circuits that differ or the reason.
    Each is marked as soon as it is back, and whatever one of them raises, all are tried.
    """
    results = await asyncio.gather(
        *(_give_back(switches[name], folder, snapshot) for name, snapshot in snapshots.items())
    )
    return dict(zip(snapshots, results, strict=True))


async def _give_back(
    switch: SwitchHandle, folder: Path | None, snapshot: Snapshot
) -> tuple[str, str]:
    try:
        applied = await switch.apply(snapshot.matching)
    except DriverError as error:
        return "failed", await _difference(switch, snapshot, error)
    except Exception as error:  # a bug of ours needs a person no less
        return "failed", f"{type(error).__name__}: {error}"
    outcome, done = ("restored", describe(applied.delta)) if applied.delta else ("unchanged", "")
    try:
        write(folder, msgspec.structs.replace(snapshot, restored=True))
    except InfrastructureError as unmarked:  # it is as it was found: `recover` will see that
        done = "; ".join(filter(None, (done, str(unmarked))))
    return outcome, done


async def _difference(switch: SwitchHandle, snapshot: Snapshot, error: DriverError) -> str:
    """Say exactly what differs, if the unit can still be read; else only why it could not."""
    try:
        found = await switch.read()
    except DriverError as unreadable:
        wanted = ", ".join(f"{a}->{b}" for a, b in snapshot.circuits) or "no circuit"
        why = "" if str(unreadable) == str(error) else f" ({unreadable})"
        return f"{error}; map unknown{why}; it should hold {wanted}"
    left = describe(Delta.between(found, snapshot.matching))
    return f"{error}; still to do: {left}" if left else f"{error}; but the map is as it was found"


def describe(delta: Delta) -> str:
    """Return a change in words: ``drop 1->17; make 1->18``."""
    parts = [
        f"{verb} " + ", ".join(f"{a}->{b}" for a, b in circuits)
        for verb, circuits in (("drop", delta.drop), ("make", delta.make))
        if circuits
    ]
    return "; ".join(parts)
