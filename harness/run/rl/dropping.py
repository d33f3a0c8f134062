"""Samples that nobody will use: taken from wherever they are, and forgotten."""

from __future__ import annotations

from collections.abc import Collection

from harness.errors import InfrastructureError, StepFailed
from harness.run.generation.fleet import Fleet


async def drop(fleet: Fleet, ids: Collection[str], timeout_ns: int) -> None:
    """Withdraw requests and let go of them; those that end meanwhile stay, finished.

    An instance that does not let go of its own is given up: what it has goes nowhere any more.
    """
    async with fleet.changing:
        while name := _let_go(fleet, ids):
            there = [id_ for id_ in fleet.ledger.at(name) if id_ in ids]
            try:
                await fleet.withdraw([name], ids=there, timeout_ns=timeout_ns)
            except (StepFailed, InfrastructureError) as error:
                fleet.give_up([name], f"it does not let go of requests: {error}")


def _let_go(fleet: Fleet, ids: Collection[str]) -> str:
    """Let go of those at no instance, before they are sent to one; return one that has others."""
    there = [entry for id_ in ids if (entry := fleet.ledger.entries.get(id_))]
    fleet.let_go(entry.id for entry in there if entry.state in {"queued", "held"})
    return next((entry.at for entry in there if entry.at), "")
