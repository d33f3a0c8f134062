"""A fleet in its first layout, from the scenario's table; it ends when the run does."""

from __future__ import annotations

from harness.clock import NS_PER_S
from harness.model.layout import Layout, Mix
from harness.model.placement import place
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.fleet import Fleet
from harness.run.session import Session
from harness.scheduling.waves import names
from harness.wire.generation import Strategy

OPEN_NS = 300 * NS_PER_S
"""To start all ranks: each imports vLLM, which takes a minute or more where cores are few."""


async def open_fleet(
    session: Session,
    asked: GenerationAsked,
    *,
    stall_s: float,
    stage_timeout_s: float,
    layout: Layout | Mix | None = None,
) -> Fleet:
    """Start the engines in `layout` (None: the one that was asked for), accepting requests."""
    timeout_ns = round(stage_timeout_s * NS_PER_S)
    layout = asked.layout if layout is None else layout
    placed = place(layout, asked.gpus_of)
    opened = Fleet.opened(
        session,
        asked.spec,
        asked.gpus_of,
        [place(layout, asked.gpus_of) for layout in asked.pool],
        stall_ns=round(stall_s * NS_PER_S),
        timeout_ns=max(timeout_ns, OPEN_NS),
        block_tokens=asked.replay.block_tokens,
    )
    fleet = await session.closing.enter_async_context(opened)
    async with fleet.changing:
        strategy: Strategy = "pool" if layout in asked.pool else "rebuild"
        await fleet.prepare(placed, strategy, timeout_ns)
        await fleet.build(
            {node: here for node, here in placed.items() if here}, strategy, timeout_ns
        )
        fleet.layout = layout
        fleet.accept(names(placed))
    return fleet
