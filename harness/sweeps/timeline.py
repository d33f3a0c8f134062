"""When each design generates, trains and syncs: a loop of each at one place, as bars over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.sweeps.point import Step
from harness.sweeps.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 0.26
"""Of a bar; a design has three lanes of them."""
LANES: tuple[tuple[str, str, str, str], ...] = (
    ("generate", "begin_s", "batch_end_s", ""),
    ("train", "train_begin_s", "train_end_s", "///"),
    ("sync", "train_end_s", "sync_end_s", "..."),
)
"""What is under way, from which moment of a step to which, and its hatch."""


def draw_bars(axes: Axes, designs: Sequence[str], results: Sequence[Result]) -> None:
    """Draw the steps of each design's first seed, the first design at the top."""
    there = {result.design: result.steps for result in results if result.steps}
    rows = [name for name in designs if name in there]
    for row, name in enumerate(rows):
        for lane, (what, begin, end, hatch) in enumerate(LANES):
            axes.broken_barh(
                [(getattr(step, begin), _length_s(step, begin, end)) for step in there[name]],
                (row + (lane - 1.5) * HEIGHT, HEIGHT),
                label=what if row == 0 else None,
                **_look(lane, hatch),
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("time since the first step began [s]")
    axes.grid(visible=False, axis="y")


def _length_s(step: Step, begin: str, end: str) -> float:
    return max(0.0, float(getattr(step, end) - getattr(step, begin)))


def _look(lane: int, hatch: str) -> dict[str, Any]:
    return {"facecolor": f"C{lane}", "hatch": hatch, "edgecolor": "black", "linewidth": 0.4}
