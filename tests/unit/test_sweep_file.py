"""A sweep's file and its points: what is refused, what is made once, and what a result is of."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_study import SCENARIOS, TEXT, study, written

from harness.errors import BadFile, NothingRan
from harness.sweeps.bench import bench_of
from harness.sweeps.costs import price_by
from harness.sweeps.grid import cells_of, points_of
from harness.sweeps.point import Point, Scalar, differences
from harness.sweeps.sweep import load_sweep

SWEEPS = sorted((SCENARIOS / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_of_the_house_opens_with_its_question_and_has_benches_and_prices(
    path: Path,
) -> None:
    sweep = load_sweep(path)
    assert path.read_text().splitlines()[0] == f'question = "{sweep.question}"'
    price = price_by(sweep.prices, sweep.power)
    cells = cells_of(sweep)
    assert {cell.design for cell in cells} == set(sweep.designs)
    for cell in cells:
        bill = price(cell.points[0])
        assert bill.is_priced == (sweep.designs[cell.design].kind != "bound")
        assert bill.gpus == cell.points[0].values["gpus"]


def test_the_study_compares_all_networks_at_all_rates_and_switching_times() -> None:
    sweep = load_sweep(SCENARIOS / "sweeps/performance-cost.toml")
    fabrics = {design.bench["fabric"] for design in sweep.designs.values()}
    assert fabrics == {
        *("fat-tree", "rail-optimised", "rail-only", "topoopt", "mixnet", "rfabric", "ideal")
    }
    places = {tuple(cell.place.values()) for cell in cells_of(sweep) if cell.design == "RFabric"}
    for rate in (100, 200, 400, 800):
        for switching_ms in (0.01, 1, 10, 25):
            assert (256, rate, switching_ms) in places
    assert {place[0] for place in places} == {64, 256, 1024, 2048}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("gpus = 64", "gpu = 64", "base.gpu: no value of a generated bench; did you mean 'gpus'?"),
        ("switching_ms = [1.0, 25]", "switching_ms = []", "axes.switching_ms: empty"),
        ("switching_ms = [1.0, 25]", "gpus = [8]", "axes.gpus: base.gpus gives it a value, too"),
        ("[1.0, 25]", "[1, 1.0]", "axes.switching_ms: a value is there twice"),
        ("link_gbit_per_s =", "rate =", "axes.rate: no value of a generated bench"),
        ('baseline = "fat-tree"', 'baseline = "x"', "baseline: no design 'x'; there are"),
        ("@rfabric", "@rfabrik", "designs.RFabric.arm: no fabric 'rfabrik'; did you mean"),
        ("orchestrl@r", "orchestral@r", "designs.RFabric.arm: no policy 'orchestral'"),
        ('"switching_ms"', '"switch_ms"', "designs.fat-tree.ignores: no axis 'switch_ms'"),
        ('"fat-tree" }', '"fat-tree", switching_ms = 1 }', "ok"),
        ('"rfabric" }', '"rfabric", switching_ms = 1 }', "designs.RFabric.bench.switching_ms: an"),
        ("seeds = [1, 2, 3]", "seeds = []", "seeds: empty"),
        ("seeds = [1, 2, 3]", "seeds = [1, 1]", "seeds: each once"),
        ("seeds = [1, 2, 3]", 'performance = "rl.step_s"', "performance: rl.step_s is in s;"),
        ("seeds = [1, 2, 3]", 'performance = "rl.speed"', "performance: no metric 'rl.speed'"),
        ("seeds = [1, 2, 3]", "timeout_s = 0", "timeout_s: expected more than 0"),
        ("seeds = [1, 2, 3]", "gpu_usd = -1", "gpu_usd: expected more than 0"),
        ("seeds = [1, 2, 3]", "sedes = [1]", "sedes: unknown key; did you mean 'seeds'?"),
        ("[base]", "[[skip]]\ngpus = [1]\n[base]", "skip[0].gpus: no axis"),
        ("[base]", "[[only]]\nswitching_ms = [2]\n[base]", "only[0].switching_ms: 2 is not one"),
        ("[base]", "[[only]]\n[base]", "only[0]: empty; name an axis, design or seed"),
        (f'calibration = "{SCENARIOS}/calibrations/h800.toml"', "", "calibration: missing"),
    ],
)
def test_what_a_file_gets_wrong_is_told_with_its_key(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = written(tmp_path, TEXT, (old, new))
    if problem == "ok":  # an axis that a design ignores may have one value there
        assert load_sweep(path)
        return
    with pytest.raises(BadFile) as refused:
        load_sweep(path)
    assert any(each.startswith(problem) for each in refused.value.problems), refused.value


def test_files_that_are_not_there_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        load_sweep(tmp_path / "none.toml")
    with pytest.raises(BadFile, match="axes: missing"):
        load_sweep(SCENARIOS / "rl-simulated.toml")
    with pytest.raises(BadFile, match=r"gone\.toml"):
        cells_of(study(tmp_path, ("rl-simulated.toml", "gone.toml")))
    with pytest.raises(BadFile, match="generated: missing"):
        cells_of(
            study(
                tmp_path,
                ("[base]", "[base] # as it is"),
                ("metrics", f'bench = "{SCENARIOS}/benches/lab.toml"\nmetrics'),
            )
        )
    with pytest.raises(BadFile, match="has 0 rl steps"):
        cells_of(study(tmp_path, ("rl-simulated.toml", "quickstart.toml")))


def test_rules_that_leave_nothing_end_with_nothing_ran(tmp_path: Path) -> None:
    rule = "[[skip]]\nlink_gbit_per_s = [100, 400]\n[base]"
    with pytest.raises(NothingRan, match="leave no combination"):
        cells_of(study(tmp_path, ("[base]", rule)))


def test_only_adds_up_and_skip_takes_away(tmp_path: Path) -> None:
    rules = """[[only]]
design = ["fat-tree"]
[[only]]
switching_ms = [1.0]
[[skip]]
design = ["ideal"]
link_gbit_per_s = [100]
[base]"""
    made = {
        (cell.design, *cell.place.values()) for cell in cells_of(study(tmp_path, ("[base]", rules)))
    }
    assert made == {
        *(("fat-tree", rate, ms) for rate in (100, 400) for ms in (1, 25)),
        *(("RFabric", rate, 1) for rate in (100, 400)),
        ("ideal", 400, 1),
    }


def test_a_place_may_have_fewer_seeds(tmp_path: Path) -> None:
    rule = "[[skip]]\nlink_gbit_per_s = [400]\nseed = [2, 3]\n[base]"
    seeds = {
        cell.place["link_gbit_per_s"]: [point.seed for point in cell.points]
        for cell in cells_of(study(tmp_path, ("[base]", rule)))
    }
    assert seeds == {100: [1, 2, 3], 400: [1]}


def test_what_a_design_ignores_is_made_once_and_shown_everywhere(tmp_path: Path) -> None:
    cells = cells_of(study(tmp_path))
    keys = {design: set() for design in ("fat-tree", "RFabric", "ideal")}
    for cell in cells:
        keys[cell.design].update(point.key for point in cell.points)
    assert len(cells) == 12
    assert {design: len(found) for design, found in keys.items()} == {
        "fat-tree": 6, "RFabric": 12, "ideal": 6,
    }  # fmt: skip
    assert len(points_of(cells)) == 24
    assert "switching_ms" not in cells[0].points[0].values


def test_designs_meet_side_by_side(tmp_path: Path) -> None:
    assert [cell.design for cell in cells_of(study(tmp_path))][:4] == [
        "fat-tree", "RFabric", "ideal", "fat-tree",
    ]  # fmt: skip


def a_point(**changes: object) -> Point:
    point = Point(
        scenario="/a/s.toml",
        bench="",
        calibration="/a/c.toml",
        values={"gpus": 64, "link_gbit_per_s": 400},
        arm="orchestrl@rfabric",
        seed=1,
        files={"/a/s.toml": "11", "/a/c.toml": "22"},
        version="1",
        timeout_s=1.0,
        memory_gb=1.0,
    )
    return msgspec.structs.replace(point, **changes)


def test_a_key_is_of_all_that_decides_a_result_and_of_nothing_else() -> None:
    key = a_point().key
    for same in (
        a_point(timeout_s=9.0, memory_gb=9.0),
        a_point(scenario="/b/s.toml", files={"/b/s.toml": "11", "/b/c.toml": "22"}),
        a_point(values={"link_gbit_per_s": 400.0, "gpus": 64}),
    ):
        assert same.key == key
    others = {
        a_point(seed=2).key,
        a_point(arm="orchestrl@static").key,
        a_point(version="2").key,
        a_point(files={"/a/s.toml": "11", "/a/c.toml": "33"}).key,
        a_point(values={"gpus": 64, "link_gbit_per_s": 401}).key,
        a_point(values={"gpus": 64}).key,
        a_point(values={"gpus": 64, "link_gbit_per_s": "400"}).key,
    }
    assert len(others) == 7
    assert key not in others


scalars = st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.booleans(), st.text(max_size=3))


@given(st.dictionaries(st.text(max_size=3), scalars, max_size=5), st.randoms())
def test_a_key_does_not_depend_on_the_order_of_values(
    values: dict[str, Scalar], chance: random.Random
) -> None:
    items = list(values.items())
    chance.shuffle(items)
    assert a_point(values=dict(items)).key == a_point(values=values).key


def test_a_file_that_was_changed_since_is_seen(tmp_path: Path) -> None:
    calibration = tmp_path / "c.toml"
    calibration.write_bytes((SCENARIOS / "calibrations/h800.toml").read_bytes())
    change = (f"{SCENARIOS}/calibrations/h800.toml", str(calibration))
    point = cells_of(study(tmp_path, change))[0].points[0]
    assert not list(differences(point))
    calibration.write_text(calibration.read_text() + "\n")
    assert [*differences(point)] == [
        f"{calibration}: not the file that was asked for; it was changed since, or is another"
    ]
    assert cells_of(study(tmp_path, change))[0].points[0].key != point.key


def test_prices_are_no_part_of_a_result(tmp_path: Path) -> None:
    keys = [point.key for point in points_of(cells_of(study(tmp_path)))]
    priced = study(tmp_path, ("seeds =", 'prices = "prices.toml"\nseeds ='))
    assert [point.key for point in points_of(cells_of(priced))] == keys


def test_a_value_that_a_bench_refuses_is_refused_with_the_benchs_words(tmp_path: Path) -> None:
    point = cells_of(study(tmp_path, ("gpus = 64", "gpus = 60")))[0].points[0]
    with pytest.raises(BadFile, match=r"generated\.gpus: 60"):
        bench_of(point)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gpus = 64", 'gpus = "many"', "designs.fat-tree: gpus: expected a whole number, found te"),
        ("= [100, 400]", '= [100, "x"]', "designs.fat-tree: link_gbit_per_s: expected a number"),
        ('"rfabric" }', '"rfabrick" }', "designs.RFabric: fabric: 'rfabrick' is not one of .*mean"),
    ],
)
def test_a_value_that_no_bench_has_is_refused_before_anything_is_made(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    with pytest.raises(BadFile, match=f"study.toml: {told}"):
        cells_of(study(tmp_path, (old, new)), "study.toml")


def test_values_go_over_the_table_of_a_bench_file(tmp_path: Path) -> None:
    (tmp_path / "bench.toml").write_text(
        'name = "b"\nworld = "simulated"\n[generated]\nfabric = "rfabric"\ngpus = 128\n'
        'roles = ["generate", "train"]\n[simulation]\ncalibration = "h800.toml"\n'
    )
    (tmp_path / "h800.toml").write_bytes((SCENARIOS / "calibrations/h800.toml").read_bytes())
    sweep = study(
        tmp_path,
        (f'calibration = "{SCENARIOS}/calibrations/h800.toml"', 'bench = "bench.toml"'),
        ("[base]\ngpus = 64\n", ""),
    )
    points = cells_of(sweep)[1].points
    bench = bench_of(points[0])
    assert bench.generated
    assert (bench.generated.gpus, bench.generated.link_gbit_per_s) == (128, 100)
    assert bench.generated.roles == ("generate", "train")
    assert bench.simulation.calibration == str(tmp_path / "h800.toml")
    assert str(tmp_path / "h800.toml") in points[0].files
