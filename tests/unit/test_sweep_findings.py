"""What a reader gets of a sweep: ratios with their spread, tables with units, plain conclusions."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_study import found, measure, refuses_fast_links, rows_of, study

from harness.sweeps.costs import bills_text, price_by
from harness.sweeps.findings import conclusions, contests
from harness.sweeps.grid import cells_of
from harness.sweeps.outcome import outcome_of
from harness.sweeps.plots import draw_all, pareto
from harness.sweeps.point import Measured, Point
from harness.sweeps.results import Result, at, by_place, ratio, results_of
from harness.sweeps.sweep import Sweep
from harness.sweeps.table import csv_text, json_value, table_of, text_lines


def at_place(results: list[Result], rate: int, switching_ms: float, design: str) -> Result:
    wanted = {"link_gbit_per_s": rate, "switching_ms": switching_ms}
    there = next(there for there in by_place(results) if there[0].place == wanted)
    result = at(there, design)
    assert result
    return result


def test_ratios_are_over_common_seeds_so_that_what_a_seed_does_to_both_cancels(
    tmp_path: Path,
) -> None:
    results = found(study(tmp_path))
    fast = at_place(results, 100, 1.0, "RFabric")
    base = at_place(results, 100, 1.0, "fat-tree")
    gain = ratio(fast, base)
    assert gain
    assert gain.value == pytest.approx(0.98 / 0.6)
    assert gain.plus_minus == pytest.approx(0.0, abs=1e-9)
    assert gain.n == 3
    assert fast.performance
    assert fast.performance.plus_minus
    assert fast.performance.plus_minus > 1.0, "seeds differ, though their ratios do not"


def test_worth_is_performance_over_what_the_bill_says(tmp_path: Path) -> None:
    result = at_place(found(study(tmp_path)), 400, 1.0, "fat-tree")
    assert result.bill
    assert result.performance
    network, cluster = result.merit("per_network_usd"), result.merit("per_usd")
    assert network
    assert cluster
    assert network.value == pytest.approx(result.performance.value / result.bill.usd)
    assert cluster.value == pytest.approx(
        result.performance.value / (result.bill.usd + 64 * 30_000)
    )
    versus = ratio(at_place(found(study(tmp_path)), 400, 1.0, "RFabric"), result, "per_network_usd")
    assert versus
    assert versus.value == pytest.approx(
        at_place(found(study(tmp_path)), 400, 1.0, "RFabric").merit("per_network_usd").value
        / network.value
    )


def test_what_gpus_count_as_is_the_files_and_is_told(tmp_path: Path) -> None:
    sweep = study(tmp_path, ("seeds =", "gpu_usd = 1000\nseeds ="))
    results = found(sweep)
    result = at_place(results, 400, 1.0, "fat-tree")
    assert result.bill
    assert 1 / result.share.per_usd == pytest.approx(result.bill.usd + 64_000)
    lines = conclusions(sweep, results)
    assert "A GPU counts as $1,000 and 700 W, where it is counted." in lines
    assert "prices: list prices of 2025" in lines


def test_a_bound_has_no_price_and_wins_nothing(tmp_path: Path) -> None:
    results = found(study(tmp_path))
    ideal = at_place(results, 100, 1.0, "ideal")
    assert ideal.bill is None
    assert ideal.merit("per_usd") is None
    assert ideal.performance
    for merit in ("performance", "per_network_usd"):
        assert "ideal" not in {contest.first.design for contest in contests(results, merit)}


def test_every_column_has_a_unit_in_all_forms(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    table = table_of(sweep, found(sweep))
    assert all(column.unit for column in table.columns)
    head, *rows = csv.reader(io.StringIO(csv_text(table)))
    assert head[:6] == [
        "design [name]",
        "link_gbit_per_s [Gbit/s]",
        "switching_ms [ms]",
        "seeds [count]",
        "rl.samples_per_s [1/s]",
        "rl.samples_per_s_plus_minus [1/s]",
    ]
    assert "per_network_musd [1/s per M$]" in head
    assert "rl.step_s [s]" in head
    assert len(rows) == 12
    assert {len(row) for row in rows} == {len(head)}
    value = json_value(table)
    assert [each["unit"] for each in value["columns"]] == [c.unit for c in table.columns]
    first = value["rows"][0]
    assert (first["design"], first["seeds"], first["gain_over_baseline"]) == ("fat-tree", 3, 1.0)
    assert first["network_usd"] + 64 * 30_000 == pytest.approx(first["cluster_usd"])
    assert value["rows"][2]["network_usd"] is None
    assert csv_text(table).splitlines()[3].count(",,") >= 4, "what is not known is left empty"


def test_the_text_table_shows_names_units_and_every_design(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    names, units, *lines = text_lines(sweep, found(sweep))
    assert names.split()[:3] == ["design", "link_gbit_per_s", "switching_ms"]
    assert "Gbit/s" in units
    assert "x fat-tree" in units
    assert len(lines) == 12
    assert lines[2].split()[0] == "ideal"
    assert lines[2].split().count("-") == 6, "no price of the network, none with GPUs, no worth"


def test_a_failed_point_is_listed_and_the_rest_is_told(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    results = found(sweep, refuses_fast_links)
    outcome = outcome_of(sweep, results)
    assert len(outcome.failed) == 18
    assert (
        "RFabric, link_gbit_per_s 400, switching_ms 25: seed 3: bench of this point"
        in (outcome.failed[-4])
    )
    text = "\n".join(outcome.conclusions)
    assert "6 of 12 combinations have a result" in text
    assert "failed (6 times): seed 1: bench of this point: generated.link_gbit_per_s" in text
    by_design = {row["design"]: row["status"] for row in outcome.rows[-3:]}
    assert by_design["RFabric"].startswith("seed 1: bench of this point")
    assert outcome.rows[0]["status"] == "ok"
    msgspec.json.encode(outcome)


def test_a_metric_that_was_not_measured_or_is_not_the_only_one_fails_its_point(
    tmp_path: Path,
) -> None:
    def none(point: Point) -> Measured:
        return Measured(metrics={})

    def two(point: Point) -> Measured:
        both = measure(point).metrics
        name, value = next(iter(both.items()))
        return Measured(metrics={name: value, name.replace("step=0", "step=1"): value})

    sweep = study(tmp_path)
    assert "rl.samples_per_s: not measured" in outcome_of(sweep, found(sweep, none)).failed[0]
    assert "rl.samples_per_s: 2 metrics fit: " in outcome_of(sweep, found(sweep, two)).failed[0]


def test_points_that_are_not_made_yet_are_told_so(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    rows = dict(list(rows_of(sweep).items())[:3])
    results = results_of(sweep, cells_of(sweep), rows, price_by())
    assert results[0].errors == ()
    assert results[1].errors == tuple(f"seed {seed}: not made yet" for seed in (1, 2, 3))


def test_a_price_that_is_not_known_is_a_doubt_and_no_failure(tmp_path: Path) -> None:
    sweep = study(tmp_path, ("[100, 400]", "[100, 300]"))
    result = at_place(found(sweep), 300, 1.0, "fat-tree")
    assert result.performance
    assert not result.errors
    assert "no figure at 300 Gbit/s" in result.doubts[0]
    assert any("without a price" in line for line in conclusions(sweep, found(sweep)))


# -- conclusions -----------------------------------------------------------------------------------


def told(sweep: Sweep, results: list[Result], title: str) -> list[str]:
    """Return the lines of one part of the conclusions."""
    lines = conclusions(sweep, results)
    begin = lines.index(f"## {title}")
    ends = [i for i, line in enumerate(lines) if line.startswith("## ") and i > begin]
    return lines[begin + 1 : ends[0] if ends else len(lines)]


def test_conclusions_name_the_winner_where_and_by_how_much(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    lines = told(sweep, found(sweep), "By performance itself")
    # at 100G a fat-tree has 0.6 of the best, at 400G 0.9; circuits 0.98 at 1 ms and 0.5 at 25 ms
    assert "RFabric leads at 2 of 4 places, by 8.9 % to 63.3 %." in lines
    assert "fat-tree leads at 2 of 4 places, by 20.0 % to 80.0 %." in lines
    assert "  link 400 Gbit/s, switching 25 ms: fat-tree, 1.800 x RFabric" in lines


def test_conclusions_say_where_optics_lose(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    lines = told(sweep, found(sweep), "RFabric against the best electrical design")
    assert (
        "By performance itself, of 4 places: wins at 2 (1.09 to 1.63 x), loses at 2 (0.556 to"
        " 0.833 x)." in lines
    )
    assert "  link 400 Gbit/s, switching 25 ms: loses, 0.5556 x fat-tree" in lines
    assert "Ahead of fat-tree, by switching time, at 2 places: up to 1 ms at 2." in lines
    assert "  link 100 Gbit/s: up to 1 of 25 ms, 1.633 x there" in lines


def test_conclusions_follow_the_numbers(tmp_path: Path) -> None:
    def slow(point: Point) -> Measured:
        return measure(
            msgspec.structs.replace(point, values={**point.values, "switching_ms": 49.0})
        )

    sweep = study(tmp_path)
    results = found(sweep, slow)
    assert told(sweep, results, "By performance itself")[1].startswith("fat-tree leads at 4 of 4")
    lines = told(sweep, results, "RFabric against the best electrical design")
    assert "Ahead of fat-tree, by switching time, at 2 places: never at 2." in lines
    assert "  link 100 Gbit/s: never, 0.03333 x at best" in lines


def test_what_is_within_its_spread_is_not_told_apart(tmp_path: Path) -> None:
    def noisy(point: Point) -> Measured:
        sign = 1 if point.values["fabric"] == "fat-tree" else -1
        one = next(iter(measure(point).metrics.values()))
        value = msgspec.structs.replace(one, value=100.0 + sign * (point.seed - 2) * 5)
        return Measured(metrics={"rl.samples_per_s[step=0,policy=x]": value})

    sweep = study(tmp_path)
    lines = told(sweep, found(sweep, noisy), "By performance itself")
    assert "At 4 of 4 places the first two cannot be told apart." in lines
    assert not [line for line in lines if "leads" in line]


@pytest.mark.parametrize(("seeds", "is_told"), [("[1, 2, 3]", True), ("[7]", False)])
def test_half_a_per_cent_is_told_of_three_seeds_and_not_of_one(
    tmp_path: Path, seeds: str, is_told: bool
) -> None:
    def near(point: Point) -> Measured:
        one = next(iter(measure(point).metrics.values()))
        value = 100.5 if point.values["fabric"] == "fat-tree" else 100.0
        return Measured(metrics={"rl.samples_per_s": msgspec.structs.replace(one, value=value)})

    sweep = study(tmp_path, ("seeds = [1, 2, 3]", f"seeds = {seeds}"))
    lines = told(sweep, found(sweep, near), "By performance itself")
    assert ("fat-tree leads at 4 of 4 places, by 0.5 % to 0.5 %." in lines) == is_told
    assert ("At 4 of 4 places the first two cannot be told apart." in lines) != is_told


def test_one_seed_has_no_spread_and_says_so(tmp_path: Path) -> None:
    sweep = study(tmp_path, ("seeds = [1, 2, 3]", "seeds = [7]"))
    lines = conclusions(sweep, found(sweep))
    assert lines[2].endswith("of 1 seed, so without a spread.")
    assert "note (12 times): reckoned" in lines


def test_divisors_that_name_different_winners_are_told(tmp_path: Path) -> None:
    """A cheap slow network wins by its own price, and loses with GPUs in the divisor."""

    def cheap_and_slow(point: Point) -> Measured:
        fabric = point.values["fabric"]
        value = {"fat-tree": 100.0, "topoopt": 60.0}.get(str(fabric), 50.0)
        one = next(iter(measure(point).metrics.values()))
        metrics = {"rl.samples_per_s": msgspec.structs.replace(one, value=value)}
        return Measured(metrics=metrics)

    sweep = study(tmp_path, ('fabric = "rfabric" }', 'fabric = "topoopt" }'))
    lines = told(sweep, found(sweep, cheap_and_slow), "Which divisor")
    assert "at 4 of 4 places" in lines[1]
    assert lines[2] == (
        "  link 100/400 Gbit/s, switching 1/25 ms: RFabric by the network alone, fat-tree with GPUs"
    )


def test_bills_are_printed_line_by_line_each_once(tmp_path: Path) -> None:
    text = bills_text(found(study(tmp_path)))
    assert text.count("# RFabric\n") == 2, "one for each link rate, not for each switching time"
    assert "aggregation, towards ToRs" in text
    assert "prices: list prices of 2025" in text


# -- plots -----------------------------------------------------------------------------------------

PLACES = ("gpus = 64", "gpus_per_server = 8"), ("[1.0, 25]", "[1.0, 25]\ngpus = [64, 128]")


def test_plots_are_drawn_with_units_and_legends_and_the_same_each_time(tmp_path: Path) -> None:
    sweep = study(tmp_path, *PLACES)
    names = {
        "gain-by-scale",
        "throughput-by-scale",
        "cost-by-performance",
        "gain-by-switching",
        "worth-by-rate",
        "timeline",
    }
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        files = draw_all(sweep, found(sweep), folder)
        assert {path.name for path in files} == {
            f"{n}.{kind}" for n in names for kind in ("svg", "png")
        }
        assert all(path.stat().st_size > 5000 for path in files)
        drawn.append({path.name: path.read_bytes() for path in files if path.suffix == ".svg"})
    assert drawn[0] == drawn[1]
    by_scale = drawn[0]["throughput-by-scale.svg"].decode()
    for text in ("RFabric", "fat-tree", "ideal", "[1/s]", "gpus [count]", "link 400 Gbit/s"):
        assert text in by_scale
    assert "Pareto front" in drawn[0]["cost-by-performance.svg"].decode()
    assert "switching [ms]" in drawn[0]["gain-by-switching.svg"].decode()
    for text in ("generate", "train", "sync", "since the first step began [s]", "RFabric"):
        assert text in drawn[0]["timeline.svg"].decode()


def test_a_plot_whose_axis_is_not_swept_is_not_drawn(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    names = {path.name for path in draw_all(sweep, found(sweep), tmp_path)}
    assert "throughput-by-scale.svg" not in names
    assert "gain-by-switching.svg" in names


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    sweep = study(tmp_path)
    results = results_of(sweep, cells_of(sweep), {}, price_by())
    assert draw_all(sweep, results, tmp_path) == []
    assert conclusions(sweep, results)


spots = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30)


@given(spots)
def test_nobody_beats_the_front_and_all_others_are_beaten(points: list[tuple[int, int]]) -> None:
    front = pareto([(float(cost), float(performance)) for cost, performance in points])

    def beaten(cost: float, performance: float) -> bool:
        return any(
            (c <= cost and p >= performance) and (c, p) != (cost, performance) for c, p in points
        )

    assert front == sorted(front)
    for cost, performance in points:
        assert beaten(cost, performance) != ((cost, performance) in front)
