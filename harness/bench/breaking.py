"""Break an emulated unit while it works, from any process that may signal it; for tests.

What a bench file can break from the start (`harness.model.bench.EmulatedUnit`) can come later, too:
the unit reads its faults again when it is told to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from drivers.emulators.config import EmulatedSwitch, Faults
from harness.bench.leftovers import private_folder, read_record
from harness.errors import InfrastructureError, UsageError


def break_unit(record: Path, unit: str, faults: Faults) -> None:
    """Let `unit` of the bench on record at `record` have these faults instead of those it has.

    It takes them at once, without an answer. Ports are the unit's; a port that it does not have
    goes to the unit's log, and nothing changes.
    """
    running = [p for p in read_record(record).processes if p.name == unit_process(unit)]
    if not running:
        raise UsageError(f"{unit}: no emulated unit of the bench {record.stem}")
    path = unit_file(private_folder(record), unit)
    told = msgspec.json.decode(path.read_bytes(), type=EmulatedSwitch)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, faults=faults)))
    fresh.replace(path)
    handle = os.pidfd_open(running[0].pid)
    try:
        if not running[0].is_alive():
            raise InfrastructureError(f"{unit}: the emulated unit is dead")
        signal.pidfd_send_signal(handle, signal.SIGHUP)
    finally:
        os.close(handle)


def unit_file(folder: Path, unit: str) -> Path:
    """Return the file by which an emulated unit is told what it is."""
    return folder / f"{unit}.unit.json"


def unit_process(unit: str) -> str:
    """Return the name of an emulated unit's process."""
    return f"unit-{unit}"
