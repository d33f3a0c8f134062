"""The three worlds: how a bench of each is opened, by which clock, and what to know of it first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bench.base import Bench as RunningBench
from harness.bench.emulated import means_of, open_emulated
from harness.bench.emulated import notes as emulated_notes
from harness.bench.live import open_live
from harness.bench.pressure import waited_us
from harness.bench.running import Places
from harness.clock import Clock, RealClock
from harness.model.bench import Bench
from harness.model.simulation import Calibration, beyond
from harness.run.asked import Asked
from harness.run.pressure import untold
from harness.virtual import VirtualClock, run_virtually

Tell = Callable[[str], None]


@dataclass(frozen=True)
class World:
    """How this bench is opened and its run is run; `notes` come first in its report."""

    notes: tuple[str, ...]
    clock: Clock
    open: Callable[[Places, Tell], AbstractAsyncContextManager[RunningBench]]
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    waited_us: Callable[[], int | None] = untold
    """How long some task has waited for a CPU, where all of the bench shares this machine's."""

    @property
    def is_real(self) -> bool:
        """Whether its time is that of this machine."""
        return isinstance(self.clock, RealClock)


def world_of(asked: Asked) -> World:
    """Choose the world of a bench file; raises `UsageError` for one that this machine has not."""
    match asked.bench.world:
        case "live":
            return _live(asked.bench, asked)
        case "emulated":
            return _emulated(asked.bench, asked)
        case "simulated":
            return _simulated(asked.bench, asked)


def _live(bench: Bench, asked: Asked) -> World:
    folder, clock = Path(bench.keys) if bench.keys else None, RealClock()
    return World(
        notes=(),
        clock=clock,
        open=lambda places, tell: open_live(
            bench, asked.topology, places, clock, keys_folder=folder, tell=tell
        ),
    )


def _emulated(bench: Bench, asked: Asked) -> World:
    means, clock = means_of(bench), RealClock()
    return World(
        notes=emulated_notes(bench, means),
        clock=clock,
        open=lambda places, _: open_emulated(bench, asked.topology, places, means, clock),
        waited_us=waited_us,
    )


def _simulated(bench: Bench, asked: Asked) -> World:
    from harness.bench.simulated.bench import open_simulated  # noqa: PLC0415 - numba takes a while

    assert asked.figures is not None, "loaded with every simulated bench"
    figures, clock = asked.figures, VirtualClock()
    return World(
        notes=_of_models(bench, figures),
        clock=clock,
        open=lambda _places, _tell: open_simulated(
            bench, asked.topology, figures, clock, asked.scenario.seed
        ),
        run=run_virtually,
    )


def _of_models(bench: Bench, figures: Calibration) -> tuple[str, ...]:
    """Return what a reader of a simulated run must know first."""
    basis = f"fitted to {len(figures.runs)} runs" if figures.runs else "stated, not measured"
    told = (
        "simulated bench: agents, switches and network are models on a clock that jumps; times "
        f"are those of calibration {figures.name} ({basis}, {figures.date})"
    )
    loads = (("nodes", len(bench.nodes)), ("link_mbit_per_s", bench.links.link_mbit_per_s))
    extrapolated = beyond(figures, loads)
    return (told, *(f"extrapolated beyond the calibration: {what}" for what in extrapolated))
