"""One communication of a training step, as it is announced and as it is told. Pure."""

from __future__ import annotations

import msgspec

from harness.model.scenario import Op
from harness.model.training.axes import Axis


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One communication of a training step, as it can be known before the step begins.

    `bytes`: of one rank, as nccl-tests counts a size, really sent (scaled). `groups` list the
    ranks of each group that communicates in it. `gap_ns`: expected from the end of the phase
    before it, while nothing is sent. `times`: on end, with the same gap before each.
    """

    name: str
    """Such as ``layer 3 backward``."""
    op: Op
    axis: Axis
    groups: tuple[tuple[int, ...], ...]
    bytes: int
    gap_ns: int
    times: int = 1
