"""A world for simulated labours: nodes on a network where each has a rate, and nobody shares."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from harness.bench.simulated.world import Flow, Labour, World
from harness.clock import NS_PER_S
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Node, Tor
from harness.model.simulation import (
    Backend,
    Calibration,
    Collectives,
    Control,
    Figure,
    Generation,
    Network,
    Sync,
    Training,
)
from harness.virtual import VirtualClock, run_virtually
from harness.wire.messages import Message

T = TypeVar("T")

GBYTE_PER_S = 1.0
"""In and out of each node."""


class Wires:
    """Every node takes in and gives out at a rate of its own; carries do not see each other."""

    def __init__(self, clock: VirtualClock, gb_per_s: float = GBYTE_PER_S) -> None:
        self._clock, self.gb_per_s = clock, gb_per_s
        self.carried: list[tuple[int, tuple[Flow, ...]]] = []
        """When, and what."""
        self.ended: list[int] = []

    async def stands_still(self, source: str, target: str, for_ns: int) -> None:
        await asyncio.Event().wait()

    async def carry(self, flows: Sequence[Flow]) -> None:
        self.carried.append((self._clock.now_ns(), tuple(flows)))
        load: Counter[tuple[str, str]] = Counter()
        for flow in flows:
            if flow.source != flow.target:
                load["out", flow.source] += flow.bytes  # type: ignore[assignment]  # of floats
                load["in", flow.target] += flow.bytes  # type: ignore[assignment]  # of floats
        await self._clock.sleep_ns(round(max(load.values(), default=0) / self.gb_per_s))
        self.ended.append(self._clock.now_ns())


def figures(table: type[msgspec.Struct], values: Mapping[str, float]) -> dict[str, Figure]:
    """Return a table of figures: 0, or 1 where nothing goes on with none of it."""
    names = [name for name in table.__struct_fields__ if name not in ("backend", "gpu")]
    rates = {name: float(name.endswith(("_per_s", "_share"))) for name in names}
    return {name: Figure(value=values.get(name, rates[name])) for name in names}


def calibration(backend: Backend = "gloo", **tables: dict[str, float]) -> Calibration:
    """Return figures that take no time, but for those that are given by table."""
    kinds = {
        "network": Network, "control": Control, "generation": Generation,
        "training": Training, "sync": Sync,
    }  # fmt: skip
    found: dict[str, Any] = {
        name: kind(**figures(kind, tables.get(name, {}))) for name, kind in kinds.items()
    }
    joined = figures(Collectives, tables.get("collectives", {}))
    return Calibration(
        name="test", date="2026-01-01", **found,
        collectives=Collectives(backend=backend, **joined),
    )  # fmt: skip


def world(nodes: int, backend: Backend = "gloo", **tables: dict[str, float]) -> World:
    """Return nodes ``n0``... under one ToR."""
    bench = Bench(
        name="test", world="simulated", tors={"t0": Tor()},
        nodes={f"n{i}": Node(tor="t0") for i in range(nodes)},
    )  # fmt: skip
    clock = VirtualClock()
    return World(bench, topology_of(bench), clock, calibration(backend, **tables), Wires(clock))


async def ask(labour: Labour, body: Message) -> Any:
    """Have a labour answer."""
    return await labour.verbs()[type(body)](body)


async def ask_all(labours: Sequence[Labour], body: Message) -> list[Any]:
    """Ask all the same at once."""
    return list(await asyncio.gather(*(ask(labour, body) for labour in labours)))


def virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run it, which ends within a virtual day."""

    async def limited() -> T:
        async with asyncio.timeout(86_400 * NS_PER_S):
            return await main

    return run_virtually(limited())
