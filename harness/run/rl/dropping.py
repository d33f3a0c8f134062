"""Samples that nobody will use: taken from wherever they are, and forgotten."""

from __future__ import annotations

from collections.abc import Collection

from harness.errors import InfrastructureError, StepFailed
from harness.run.generation.fleet import Fleet


async def drop(fleet: Fleet, ids: Collection[str], timeout_ns: int) -> None:
    """Withdraw requests and let go of them; those that end meanwhile stay, finished.

    An instance that does not let go of its own is given up: what it has goes nowhere any more.
    """
    entries = fleet.ledger.entries
    async with fleet.changing:
        for name in {entries[id_].at for id_ in ids} - {""}:
            there = [id_ for id_ in ids if entries[id_].at == name]
            if not there or name not in fleet.places or fleet.places[name].dead:
                continue
            try:
                await fleet.withdraw([name], ids=there, timeout_ns=timeout_ns)
            except (StepFailed, InfrastructureError) as error:
                fleet.give_up([name], f"it does not let go of requests: {error}")
    fleet.let_go(id_ for id_ in ids if entries[id_].state in {"queued", "held"})
