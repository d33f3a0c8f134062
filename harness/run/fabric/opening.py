"""The network that a loop runs over, by its arm: set up before it, undone after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.model.fabric_rules import Arm
from harness.run.fabric.controller import Controller
from harness.run.session import Session

IDEAL = 1.0
"""Oversubscription of a network that blocks nothing."""


@asynccontextmanager
async def network(session: Session, arm: Arm, number: int) -> AsyncIterator[Controller | None]:
    """Give the body the fabric of an arm; None where circuits are left as they are.

    Raises `UsageError` for ``ideal`` on a bench that cannot become it.
    """
    if not arm.fabric:
        yield None
        return
    await session.steer(frozenset())
    if arm.fabric == "ideal":
        await session.bench.electrical(IDEAL)
    try:
        async with Controller.opened(session, arm, number) as controller:
            yield controller
    finally:
        if arm.fabric == "ideal":
            await session.bench.electrical(None)
