"""Figures fitted to runs: those by which runs were made come back; what can't be told is told."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec
import pytest
from fitted_runs import LOOP, QUICK, SCENARIOS, SWITCHES, measured, true_calibration
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cli.measured import read_measured
from harness.errors import UsageError
from harness.fabric.topology import topology_of
from harness.model.degrees import parse_degrees
from harness.model.documents import Event
from harness.model.load import load_bench, load_calibration, load_profile
from harness.model.simulation import Figure, figures
from harness.model.simulation_text import calibration_text
from harness.model.training.step import step_of
from harness.model.training.trainer import TrainerSpec
from harness.rlsim.fits import control
from harness.rlsim.fits.exchanges import _Told, groups_of
from harness.rlsim.fits.lines import lines_of
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Figures, Pooled, Row, pooled
from harness.rlsim.fits.solver import fit
from harness.rlsim.fits.wires import Loads, Wires
from harness.rlsim.fitting import MEASURED_BY, Fitted, calibrated, rows_of
from harness.seeds import seeded

UNTOLD = {"collectives.copy_ns_per_kb", "sync.bucket_us", "control.ssh_ms"}
"""Known figures that are 0, or that other figures hide in these runs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    folder = tmp_path_factory.mktemp("fitted")
    return [read_measured(measured(folder, scenario)).run for scenario in (QUICK, SWITCHES, LOOP)]


@pytest.fixture(scope="module")
def found(runs: list[Measured]) -> Fitted:
    return calibrated(runs, [], name="made", date="2026-11-30")


# -- what was known comes back ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MEASURED_BY if name not in UNTOLD])
def test_a_figure_that_runs_were_made_by_is_found_within_its_interval(
    found: Fitted, name: str, tmp_path: Path
) -> None:
    true = dict(figures(true_calibration(tmp_path)))[name].value
    figure = dict(figures(found.calibration))[name]
    if name in found.held:
        assert "not told apart" in found.held[name]
    elif not any(name in why for why in found.held.values()):  # else it has the part of others
        assert figure.value == pytest.approx(true, rel=0.02, abs=figure.plus_minus / 2)
        assert "measurements" in figure.source


def test_what_was_fitted_predicts_what_was_measured(found: Fitted) -> None:
    kinds = {off.kind: off for off in found.residuals}
    assert {"collective.all_reduce", "switch.weights", "sync.wire.chain", "decode"} <= kinds.keys()
    for off in kinds.values():
        assert abs(off.mean_pct) < 2, off
        assert off.n > 0
    assert median(off.p50_pct for off in found.predicted) < 1
    assert "parts of the rows" in found.predicted_on


def test_a_run_that_is_held_out_is_predicted(runs: list[Measured], tmp_path: Path) -> None:
    quick, switches, loop = runs
    base = true_calibration(tmp_path)
    found = calibrated([quick, switches], [loop], name="m", date="d", base=base)
    assert loop.name in found.predicted_on
    assert loop.name not in found.calibration.runs
    seen = {off.kind for off in found.predicted}
    assert {"sync.load", "sync.gather", "phase.all_reduce", "step"} <= seen
    assert median(off.p50_pct for off in found.predicted) < 1
    # collectives do not rest: a burst hides there what steps take
    assert "not told apart from collectives.step_us" in found.held["network.burst_kb"]


def test_loads_that_were_seen_are_the_range(found: Fitted) -> None:
    fitted = found.calibration.fitted
    assert (fitted["nodes"].low, fitted["nodes"].high) == (2, 4)
    assert fitted["link_mbit_per_s"].low == fitted["link_mbit_per_s"].high == 1000
    assert fitted["ranks"].high == 4
    assert fitted["size_bytes"].high > 4 * 2**20


def test_the_same_rows_give_the_same_figures(runs: list[Measured]) -> None:
    rows = pooled(rows_of(runs[1]))
    assert fit(rows, {}) == fit(rows, {})


def test_a_calibration_is_read_as_it_was_written(found: Fitted, tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    path.write_text(calibration_text(found.calibration, ["Fitted.", "", 'Off by "2 %".']))
    assert load_calibration(path) == found.calibration
    assert path.read_text().startswith('# Fitted.\n#\n# Off by "2 %".\n\nname = "made"')


# -- changes of circuits ---------------------------------------------------------------------------


def test_changes_of_circuits_take_what_a_simulated_unit_makes_of_the_figures(
    runs: list[Measured], tmp_path: Path
) -> None:
    true = {name: figure.value for name, figure in figures(true_calibration(tmp_path))}
    rows = [row for row in control.rows(runs[0]) if row.kind in ("read", "switch", "light")]
    assert {row.kind for row in rows} == {"read", "switch", "light"}
    for row in rows:
        assert row.measured_s == pytest.approx(row.model(true), rel=1e-4), row.kind


def test_a_serial_line_tells_nothing_of_changes_whose_circuits_nobody_knows(
    runs: list[Measured],
) -> None:
    lit = runs[0].links_of
    assert lines_of(runs[0], ["agg0", "agg1"]) == ()  # agg0 is at a serial line, agg1 behind SSH
    assert lines_of(runs[0], ["agg1"])[0].longer == "control.ssh_ms"
    serial, _ = lines_of(runs[0], ["agg0", "agg1"], lit["electrical"], lit["ring"])
    assert serial.acknowledged_s > serial.commanded_s > 0
    assert serial.look is not None
    (still,) = lines_of(runs[0], ["agg0"], lit["ring"], lit["ring"])
    assert not still.changes
    assert still.read_s > 0


# -- what no run tells -----------------------------------------------------------------------------


def test_figures_that_no_run_speaks_of_are_refused_by_name(runs: list[Measured]) -> None:
    with pytest.raises(UsageError, match="no run speaks of these figures") as refused:
        calibrated([runs[0]], [], name="m", date="d")
    text = str(refused.value)
    assert 'generation.processes_s: a generate step with layouts and strategy = "restart"' in text
    assert "--base FILE" in text
    assert "network.link_share" not in text


def test_figures_that_no_run_speaks_of_are_the_bases(runs: list[Measured], tmp_path: Path) -> None:
    base = true_calibration(tmp_path)
    odd = msgspec.structs.replace(
        base, name="odd", sync=msgspec.structs.replace(base.sync, load_gb_per_s=Figure(value=7.0))
    )
    found = calibrated([runs[0]], [], name="m", date="d", base=odd)
    assert found.calibration.sync.load_gb_per_s.value == 7.0
    assert "as in odd" in found.calibration.sync.load_gb_per_s.source
    assert found.held["sync.load_gb_per_s"] == "no run speaks of it: as in odd"


def test_a_run_that_says_nothing_is_refused(runs: list[Measured]) -> None:
    silent = Measured(
        name="silent",
        bench=runs[0].bench,
        topology=runs[0].topology,
        scenario=runs[0].scenario,
        events=(Event(stream="note", seq=1, t_ns=0, data={"text": "nothing"}),),
    )
    with pytest.raises(UsageError, match="silent: nothing in there tells a figure"):
        calibrated([silent], [], name="m", date="d")


# -- least squares ---------------------------------------------------------------------------------

FIXED, RATE = "sync.load_fixed_s", "sync.load_gb_per_s"


def loads(pairs: list[tuple[float, float]]) -> list[Pooled]:
    """Rows of (GB, s), a fixed time and a rate behind them."""

    def row(size_gb: float, took_s: float, number: int) -> Row:
        def model(figures: Figures) -> float:
            return figures[FIXED] + size_gb / figures[RATE]

        return Row("load", "run", number, took_s, (FIXED, RATE), model)

    return pooled(row(size, took, number) for number, (size, took) in enumerate(pairs))


@settings(max_examples=20, deadline=None)
@given(
    fixed_s=st.floats(0.001, 10),
    rate=st.floats(0.01, 100),
    sizes=st.sets(st.integers(1, 50), min_size=4),
)
def test_a_line_is_found_whatever_its_size(fixed_s: float, rate: float, sizes: set[int]) -> None:
    unit_gb = fixed_s * rate / 10  # so that neither part is hidden by the other
    spread = {1, *sizes, 60}
    pairs = [(n * unit_gb, fixed_s + n * unit_gb / rate) for n in sorted(spread)]
    found = fit(loads(pairs), {})
    assert found.values[FIXED] == pytest.approx(fixed_s, rel=1e-2)
    assert found.values[RATE] == pytest.approx(rate, rel=1e-2)
    assert not found.held


def test_one_row_in_five_that_met_a_busy_moment_moves_little() -> None:
    true = [(size, 0.5 + size / 2) for size in (0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7)]
    busy = [(size, took * (4 if n in (2, 7) else 1)) for n, (size, took) in enumerate(true)]
    found = fit(loads(busy), {})
    assert found.values[FIXED] == pytest.approx(0.5, rel=0.1)
    assert found.values[RATE] == pytest.approx(2, rel=0.1)


def test_rows_of_one_size_cannot_tell_a_start_from_a_rate() -> None:
    found = fit(loads([(1, 0.5), (1, 0.51), (1, 0.49)]), {})
    assert found.values[FIXED] == 0
    assert found.values[RATE] == pytest.approx(2, rel=0.02)
    assert found.held == {FIXED: f"not told apart from {RATE}; held at 0"}


def test_a_figure_that_its_row_tells_is_not_held_for_others_that_no_row_tells_apart() -> None:
    def both(figures: Figures) -> float:
        return (figures["control.switch_ms"] + figures["control.serial_ms"]) / 1e3

    def light(figures: Figures) -> float:
        return figures["control.light_ms"] / 1e3

    two = ("control.switch_ms", "control.serial_ms")
    rows = [
        Row("switch", "run", 0, 0.03, two, both),
        Row("light", "run", 0, 0.002, ("control.light_ms", *two), light),
    ]
    found = fit(pooled([*rows, *rows]), {})
    assert found.values["control.light_ms"] == pytest.approx(2, rel=0.01)
    assert len(found.held) == 1
    assert found.held.keys() < {*two}


def test_no_figure_is_negative() -> None:
    found = fit(loads([(1, 0.4), (2, 0.9), (3, 1.5), (4, 2.2)]), {})
    assert found.values[FIXED] == pytest.approx(0, abs=1e-3)


def test_a_rate_that_is_never_the_slower_one_is_a_bound() -> None:
    def model(figures: Figures) -> float:
        return max(1.0, 0.5 / figures["generation.kv_gb_per_s"])

    row = Row("kv", "run", 0, 1.0, ("generation.kv_gb_per_s",), model)
    found = fit(pooled([row, row]), {})
    assert 0.5 <= found.values["generation.kv_gb_per_s"] <= 1.1
    assert "it is this or more" in found.held["generation.kv_gb_per_s"]


@pytest.mark.parametrize("seed", range(8))
def test_intervals_are_as_wide_as_the_noise_makes_them(seed: int) -> None:
    rng = seeded(seed, "noise")
    pairs = [(size, (0.5 + size / 2) * rng.gauss(1, 0.05)) for size in (0.2, 0.5, 1, 2, 3, 5) * 8]
    found = fit(loads(pairs), {})
    for name, true in ((FIXED, 0.5), (RATE, 2.0)):
        off = abs(found.values[name] - true)
        assert off < 2.5 * found.plus_minus[name]
        assert found.plus_minus[name] < 0.2 * true


# -- formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2.5-14b", "DP4"),
        ("qwen2.5-14b", "DP2 TP2"),
        ("qwen2.5-14b", "DP2 PP2"),
        ("qwen2.5-14b", "DP2 TP2 PP2"),
        ("qwen3-235b-a22b", "DP4 EP2"),
    ],
)
def test_a_phase_is_known_by_its_name(model: str, layout: str) -> None:
    profile = load_profile(SCENARIOS / f"profiles/{model}-h800.toml")
    degrees = parse_degrees(layout)
    spec = TrainerSpec(mode="paced", degrees=degrees, profile=profile)
    for move in step_of(spec, profile, [900] * 64).schedule.moves:
        phase = move.phase
        assert groups_of(phase.name, phase.axis, degrees, profile.shape.layers) == phase.groups
        told = _Told(phase.name, phase.op, phase.axis, phase.bytes, 0.0, 0, 0.0, frozenset())
        assert told.times == phase.times, phase.name


def test_flows_take_as_long_as_the_busiest_link_of_their_way() -> None:
    topology = topology_of(load_bench(SCENARIOS / "benches/two-tier.toml"))  # 500 Mbit/s, 4 : 1
    wires = Wires(topology)

    def loads_of(at: Wires, *sent: tuple[str, str, float]) -> tuple[float, float]:
        found = at.loads(sent)
        assert found is not None
        return found.link_s, found.electrical_s

    assert loads_of(wires, ("t0", "t1", 62.5e6)) == (1.0, 0.0)  # below one ToR
    assert loads_of(wires, ("t0", "t2", 31.25e6)) == (0.5, 1.0)
    assert loads_of(wires, ("t0", "t2", 31.25e6), ("t1", "g0", 31.25e6)) == (0.5, 2.0)
    lit = Wires(topology, {("train0", "train1"): 2})
    assert loads_of(lit, ("t0", "t2", 62.5e6), ("t1", "t3", 62.5e6)) == (1.0, 0.0)
    assert loads_of(lit, ("t0", "t2", 62.5e6), ("t1", "t2", 62.5e6)) == (2.0, 0.0)  # one of two
    ideal = Wires(topology, {}, 1.0)
    assert loads_of(ideal, ("t0", "t2", 62.5e6), ("t1", "t3", 62.5e6)) == (1.0, 1.0)


def test_links_that_were_idle_let_a_burst_pass_at_once() -> None:
    loads = Loads(electrical_s=1.0, electrical_kb_s=1e-3)
    shares = {"network.link_share": 0.9, "network.electrical_share": 0.5}
    figures = {**shares, "network.latency_us": 0.0, "network.burst_kb": 100.0}
    assert loads.takes_s(figures) == pytest.approx(2.0)
    assert loads.takes_s(figures, idle_s=0.05) == pytest.approx(1.95)
    assert loads.takes_s(figures, idle_s=9.0) == pytest.approx(1.8)  # 100 kB at half the rate
    assert loads.takes_s(figures, idle_s=9.0, times=3) == pytest.approx(5.8)


def test_hops_share_links_max_min_fairly() -> None:
    topology = topology_of(load_bench(SCENARIOS / "benches/two-tier.toml"))
    shared = Wires(topology).shared([("t0", "g0"), ("g0", "g1"), ("g0", "g2"), ("g1", "g3")])
    assert shared is not None
    mbit_per_s = {
        hop: 8e-6 / max(loads.link_s, loads.electrical_s) for hop, loads in shared.items()
    }
    assert mbit_per_s == pytest.approx(
        {("t0", "g0"): 250, ("g0", "g1"): 375, ("g0", "g2"): 125, ("g1", "g3"): 125}
    )
    assert shared["g0", "g1"].electrical_s == 0
    assert shared["g0", "g2"].link_s == 0


def test_rows_that_are_alike_are_told_by_the_mean_of_all_but_the_extremes() -> None:
    rows = [
        Row("load", f"run{n % 2}", "same", took, (), lambda _: 1.0)
        for n, took in enumerate((1.0, 1.2, 0.8, 50.0, 1.4))
    ]
    (one,) = pooled([*rows, Row("load", "run0", "none", 0.0, (), lambda _: 1.0)])
    assert (one.n, one.runs) == (5, ("run0", "run1"))
    assert one.measured_s == pytest.approx(1.2)
    assert one.off_s < 0.3
