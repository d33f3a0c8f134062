"""What a run is asked to generate with: the scenario's table `[generation]` with its files read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.model.layout import Layout
from harness.model.replay import Replay
from harness.wire.generation import EngineSpec


@dataclass(frozen=True, kw_only=True)
class GenerationAsked:
    """The engine, what is up first, the requests, and the GPUs of each node, in node order."""

    spec: EngineSpec
    layout: Layout
    replay: Replay
    gpus_of: Mapping[str, int]
    pool: tuple[Layout, ...] = ()
    """Layouts that are built beforehand, for the strategy `pool`."""
    link_bytes_per_s: float = 125e6
    """Of the data network between nodes: for the first estimates of what a move takes."""
