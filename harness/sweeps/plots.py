"""Results as pictures, SVG and PNG: the same results give the same SVG, byte for byte.

Designs are told apart by marker and dash, too, so that they are on black-and-white paper. A plot
has one axis of the sweep along x, and a panel for each value of another; the rest is held at the
values where most was made, which its title says. A plot whose axis the sweep has not is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.sweeps.findings import spoken
from harness.sweeps.grid import Place
from harness.sweeps.point import Scalar
from harness.sweeps.results import Estimate, Result, at, by_place, ratio
from harness.sweeps.sweep import Sweep
from harness.sweeps.table import MILLION, stem_of, unit_of, unit_of_metric
from harness.sweeps.timeline import draw_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALE, RATE, SWITCHING = "gpus", "link_gbit_per_s", "switching_ms"
MARKERS = "os^Dv*PX<>hd"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
STYLE: Any = {
    "svg.hashsalt": "harness",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar is a dollar
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.fontsize": 8.0,
}
PANEL_INCHES = (3.6, 3.4)
PNG_DOTS_PER_INCH = 150
Along = Callable[[Result], Estimate | None]


class Slice(NamedTuple):
    """Results of which only two axes vary; `held` is where the others stand."""

    held: Place
    results: tuple[Result, ...]


def draw_all(sweep: Sweep, results: Sequence[Result], folder: Path) -> list[Path]:
    """Write every plot that these results allow; return the files."""
    from matplotlib import rc_context  # noqa: PLC0415

    written: list[Path] = []
    with rc_context(STYLE):
        for name, plot in PLOTS.items():
            figure = plot(sweep, results)
            if figure is not None:
                written += _saved(figure, folder / name)
    return written


def _saved(figure: Figure, stem: Path) -> list[Path]:
    svg, png = stem.with_suffix(".svg"), stem.with_suffix(".png")
    figure.savefig(svg, metadata={"Date": None})
    figure.savefig(png, dpi=PNG_DOTS_PER_INCH)
    return [svg, png]


# -- which results ---------------------------------------------------------------------------------


def slice_of(results: Sequence[Result], free: Sequence[str]) -> Slice:
    """Return the results in which only these axes vary, at the place of the rest with most."""
    slices: dict[tuple[Scalar, ...], list[Result]] = {}
    for result in results:
        if result.performance:
            rest = tuple(value for axis, value in result.place.items() if axis not in free)
            slices.setdefault(rest, []).append(result)
    if not slices:
        return Slice({}, ())
    found = max(slices.values(), key=len)
    held = {axis: value for axis, value in found[0].place.items() if axis not in free}
    return Slice(held, tuple(found))


def _panels(results: Sequence[Result], axis: str) -> dict[Scalar | None, list[Result]]:
    panels: dict[Scalar | None, list[Result]] = {}
    for result in results:
        panels.setdefault(result.place.get(axis), []).append(result)
    return panels


# -- plots -----------------------------------------------------------------------------------------


def _throughput_by_scale(sweep: Sweep, results: Sequence[Result]) -> Figure | None:
    title = f"{sweep.performance} by scale"
    label = f"{sweep.performance} [{unit_of_metric(sweep.performance)}]"
    figure = _lines(
        sweep, results, (SCALE, RATE), title=title, label=label, along=lambda one: one.performance
    )
    for axes in figure.axes if figure else ():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    return figure


def _gain_by_scale(sweep: Sweep, results: Sequence[Result]) -> Figure | None:
    return _gain(sweep, results, (SCALE, RATE), "Gain by scale")


def _gain_by_switching(sweep: Sweep, results: Sequence[Result]) -> Figure | None:
    return _gain(sweep, results, (SWITCHING, RATE), "Gain by switching time")


def _gain(
    sweep: Sweep, results: Sequence[Result], axes_of: tuple[str, str], title: str
) -> Figure | None:
    """Draw how many times the baseline's performance designs have."""
    baseline = {
        tuple(there[0].place.values()): at(there, sweep.baseline) for there in by_place(results)
    }

    def gain(result: Result) -> Estimate | None:
        over = baseline[tuple(result.place.values())]
        return ratio(result, over) if over else None

    label = f"{sweep.performance} over {sweep.baseline} [ratio]"
    figure = _lines(sweep, results, axes_of, title=title, label=label, along=gain)
    for axes in figure.axes if figure else ():
        axes.axhline(1.0, color="black", linewidth=0.8)
    return figure


def _worth_by_rate(sweep: Sweep, results: Sequence[Result]) -> Figure | None:
    """Draw what a dollar buys: a panel for each divisor."""
    there = slice_of([result for result in results if result.bill], (RATE,))
    if RATE not in sweep.axes or not there.results:
        return None
    unit = unit_of_metric(sweep.performance)
    panels = (("per_network_usd", "the network's price alone"), ("per_usd", "with GPUs"))
    figure, all_axes = _figure(len(panels))
    for axes, (merit, what) in zip(all_axes, panels, strict=True):

        def worth(result: Result, merit: str = merit) -> Estimate | None:
            found = result.merit(merit)
            return found.times(MILLION) if found else None

        _draw_lines(sweep, axes, there.results, RATE, worth)
        axes.set_title(what)
        axes.set_ylabel(f"{sweep.performance} per M$ [{unit} per M$]")
        axes.set_ylim(bottom=0.0)
    return _finished(figure, all_axes[0], "What a dollar buys, by link rate", there.held)


def _cost_by_performance(sweep: Sweep, results: Sequence[Result]) -> Figure | None:
    """Draw every priced result at the scale with most of them, and the front of what is best."""
    free = [axis for axis in sweep.axes if axis != SCALE]
    there = slice_of([result for result in results if result.bill], free)
    if not there.results:
        return None
    figure, (axes,) = _figure(1)
    for index, name in enumerate(sweep.designs):
        points = [_spot(result) for result in there.results if result.design == name]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, linestyle="none", **_look(index))
    front = pareto([_spot(result) for result in there.results])
    axes.plot(
        *zip(*front, strict=True),
        color="black",
        linewidth=1.0,
        drawstyle="steps-post",
        label="Pareto front",
        zorder=0,
    )
    rates = {_spot(result): result.place.get(RATE) for result in there.results}
    for spot in front:
        if rates[spot] is not None:
            said = f"{rates[spot]:g} {unit_of(RATE)}"
            axes.annotate(said, spot, (0, 7), textcoords="offset points", ha="center", fontsize=7)
    axes.margins(y=0.1)
    axes.set_xlabel("network [M$]")
    axes.set_ylabel(f"{sweep.performance} [{unit_of_metric(sweep.performance)}]")
    varied = ", ".join(map(stem_of, free))
    return _finished(figure, axes, f"Cost and performance, by {varied}", there.held)


def _spot(result: Result) -> tuple[float, float]:
    assert result.bill is not None
    assert result.performance is not None
    return result.bill.usd / MILLION, result.performance.value


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, performance) that no other beats in both, from the cheapest on."""
    front: list[tuple[float, float]] = []
    for cost, performance in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or performance > front[-1][1]:
            front.append((cost, performance))
    return front


def _timeline(sweep: Sweep, results: Sequence[Result]) -> Figure | None:
    """Draw a loop of each design, at the last of the places where most designs were made."""
    places = [there for there in by_place(results) if any(result.steps for result in there)]
    if not places:
        return None
    found = max(reversed(places), key=lambda there: sum(bool(result.steps) for result in there))
    figure, (axes,) = _figure(1)
    draw_bars(axes, tuple(sweep.designs), found)
    return _finished(figure, axes, "A loop of each design", found[0].place)


PLOTS: Mapping[str, Callable[[Sweep, Sequence[Result]], Figure | None]] = {
    "throughput-by-scale": _throughput_by_scale,
    "gain-by-scale": _gain_by_scale,
    "cost-by-performance": _cost_by_performance,
    "gain-by-switching": _gain_by_switching,
    "worth-by-rate": _worth_by_rate,
    "timeline": _timeline,
}


# -- how ----------------------------------------------------------------------------------------


def _lines(
    sweep: Sweep,
    results: Sequence[Result],
    axes_of: tuple[str, str],
    *,
    title: str,
    label: str,
    along: Along,
) -> Figure | None:
    """Draw a line for each design along the first axis, and a panel for each of the second."""
    x, panel = axes_of
    there = slice_of([result for result in results if along(result)], axes_of)
    panels = {
        value: found
        for value, found in _panels(there.results, panel).items()
        if len({result.place.get(x) for result in found}) > 1
    }
    if x not in sweep.axes or not panels:
        return None
    figure, all_axes = _figure(len(panels))
    for axes, (value, found) in zip(all_axes, panels.items(), strict=True):
        _draw_lines(sweep, axes, found, x, along)
        if value is not None:
            axes.set_title(spoken({panel: value}))
        axes.set_ylabel(label)
    return _finished(figure, all_axes[0], title, there.held)


def _draw_lines(sweep: Sweep, axes: Axes, results: Sequence[Result], x: str, along: Along) -> None:
    for index, name in enumerate(sweep.designs):
        found = sorted(
            (float(result.place[x]), estimate)
            for result in results
            if result.design == name and (estimate := along(result))
        )
        if found:
            axes.errorbar(
                [at_x for at_x, _ in found],
                [estimate.value for _, estimate in found],
                yerr=[estimate.plus_minus or 0.0 for _, estimate in found],
                label=name,
                linestyle=DASHES[index % len(DASHES)],
                markersize=4,
                linewidth=1.2,
                capsize=2,
                **_look(index),
            )
    axes.set_xscale("log")
    values = sorted({float(result.place[x]) for result in results})
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(f"{stem_of(x)} [{unit_of(x)}]")


def _look(index: int) -> dict[str, Any]:
    return {"marker": MARKERS[index % len(MARKERS)], "color": f"C{index % 10}"}


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Return so many panels side by side, and room for a legend below them."""
    from matplotlib.figure import Figure as Empty  # noqa: PLC0415

    across, high = PANEL_INCHES
    figure = Empty(figsize=(across * max(2, panels), high + 0.9), layout="constrained")
    grid = figure.subplots(1, panels, squeeze=False)
    return figure, list(grid[0])


def _finished(figure: Figure, axes: Axes, title: str, held: Place) -> Figure:
    """Add the title, with what is held, and one legend for all panels."""
    figure.suptitle(f"{title} ({spoken(held)})" if held else title)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure
