"""A small sweep of four places and three designs, and a measure that only reckons.

Workers import measures by their names. A formula stands for the simulation: links
of more Gbit/s help an electrical network most, and a circuit that switches slowly costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import BadFile
from harness.sweeps.costs import price_by
from harness.sweeps.grid import cells_of, points_of
from harness.sweeps.point import Measured, Point, Row, Step, Value, row_of
from harness.sweeps.pool import Rows
from harness.sweeps.results import Result, results_of
from harness.sweeps.sweep import Sweep, load_sweep

SCENARIOS = Path(__file__).parents[2] / "scenarios"
TEXT = f'''
question = "Which of them is it?"
scenario = "{SCENARIOS}/rl-simulated.toml"
calibration = "{SCENARIOS}/calibrations/h800.toml"
baseline = "fat-tree"
metrics = ["rl.step_s"]
seeds = [1, 2, 3]
[base]
gpus = 64
[axes]
link_gbit_per_s = [100, 400]
switching_ms = [1.0, 25]
[designs.fat-tree]
arm = "orchestrl@electrical"
bench = {{ fabric = "fat-tree" }}
ignores = ["switching_ms"]
[designs.RFabric]
kind = "optical"
arm = "orchestrl@rfabric"
bench = {{ fabric = "rfabric" }}
[designs.ideal]
kind = "bound"
bench = {{ fabric = "ideal" }}
ignores = ["switching_ms"]
'''


def written(folder: Path, text: str = TEXT, *changes: tuple[str, str]) -> Path:
    """Write the sweep file, with parts of it replaced."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "study.toml"
    path.write_text(text)
    return path


def study(folder: Path, *changes: tuple[str, str]) -> Sweep:
    """Load the sweep, with parts of its file replaced."""
    return load_sweep(written(folder, TEXT, *changes))


def measure(point: Point) -> Measured:
    """Reckon what a network achieves."""
    fabric, rate = point.values["fabric"], float(point.values["link_gbit_per_s"])
    best = 100.0 * (1 + rate / 800) * (1 + point.seed / 100)
    share = {"ideal": 1.2, "fat-tree": 0.5 + rate / 1000}.get(str(fabric), 0.0)
    share = share or 1.0 - float(point.values["switching_ms"]) / 50
    arm = point.arm or "orchestrl"
    metrics = {
        f"rl.samples_per_s[step=0,policy={arm}]": Value(value=best * share, unit="1/s", n=3),
        f"rl.step_s[step=0,policy={arm}]": Value(value=1000 / best, unit="s", n=3),
    }
    ends_s = [1000 / best * (step + 1) for step in range(3)]
    steps = tuple(
        Step(
            begin_s=end - 1000 / best,
            batch_end_s=end - 3,
            train_begin_s=end - 3,
            train_end_s=end - 1,
            sync_end_s=end,
        )
        for end in ends_s
    )
    return Measured(metrics=metrics, notes=("reckoned",), steps=steps)


def refuses_fast_links(point: Point) -> Measured:
    """Fail where links carry 400 Gbit/s."""
    if point.values["link_gbit_per_s"] == 400:
        raise BadFile("bench of this point", ["generated.link_gbit_per_s: 400 is too fast"])
    return measure(point)


class Here:
    """Makes points in this process; `asked` are those that it was given."""

    def __init__(self, measure: object = measure, stop_after: int | None = None) -> None:
        self.asked: list[Point] = []
        self._measure, self._stop_after = measure, stop_after

    def made(self, points: Sequence[Point]) -> Rows:
        """See `harness.sweeps.pool.Executor`."""
        for point in points:
            if len(self.asked) == self._stop_after:
                raise KeyboardInterrupt
            self.asked.append(point)
            yield made_here(point, self._measure)


def made_here(point: Point, measure: object = measure) -> Row:
    """Return a point's row."""
    assert callable(measure)
    try:
        return row_of(point, measured=measure(point), cpu_s=1.0, peak_mb=100.0)
    except BadFile as error:
        return row_of(point, error=str(error))


def rows_of(sweep: Sweep, measure: object = measure) -> Mapping[str, Row]:
    """Return the rows of all points."""
    return {point.key: made_here(point, measure) for point in points_of(cells_of(sweep))}


def found(sweep: Sweep, measure: object = measure) -> list[Result]:
    """Return the results of a whole sweep, priced by the house's table."""
    return results_of(sweep, cells_of(sweep), rows_of(sweep, measure), price_by())
