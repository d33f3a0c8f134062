"""Latency profiles: public figures repeated, a larger load never cheaper, an honest range."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile, UsageError
from harness.model.layout import Layout, parse_layout
from harness.model.load import load_profile
from harness.model.profile import Figure, Profile, costs_of, load_ns
from harness.model.steptime import (
    FittedCosts,
    StepCosts,
    TableCosts,
    floor_sum,
    step_ns,
    step_time,
)

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
H200_QWEN3_32B_MS = {
    "8xTP1": {8: 18.4, 64: 20.8, 256: 26.8},
    "4xTP2": {8: 11.4, 64: 13.1, 256: 18.8},
    "2xTP4": {8: 7.2, 64: 9.6, 256: 16.0},
    "1xTP8": {8: 5.4, 64: 8.1, 256: 16.0},
}
"""aiconfigurator 0.12.0, vLLM: requests in flight on 8 GPUs -> ms per decode step."""
MEAN_CONTEXT_TOKENS = 1024 + 4096 // 2
TOLERANCE = 0.04
"""Of the fit of the profile's shares and overheads to that table, in each of its cells."""


def on_h200(profile: Profile) -> Profile:
    """The same profile with the bandwidth, link and memory of an H200."""
    figures = {"memory_gb": 141, "bandwidth_gb_per_s": 4800, "link_gb_per_s": 450}
    changed = {key: Figure(value, "h800") for key, value in figures.items()}
    return msgspec.structs.replace(profile, gpu=msgspec.structs.replace(profile.gpu, **changed))


@pytest.mark.parametrize("name", H200_QWEN3_32B_MS)
def test_the_32b_profile_with_h200_bandwidth_repeats_the_published_table(name: str) -> None:
    profile = on_h200(load_profile(PROFILES / "qwen2.5-32b-h800.toml"))
    layout = parse_layout(name)
    costs = costs_of(profile, layout)
    for in_flight, published_ms in H200_QWEN3_32B_MS[name].items():
        batch = in_flight // layout.instances
        found_ms = step_ns(costs, batch, batch * MEAN_CONTEXT_TOKENS) / 1e6
        assert found_ms == pytest.approx(published_ms, rel=TOLERANCE), (name, in_flight)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_best_tp_rises_as_requests_drain(path: Path) -> None:
    """The reason for switching inside a step: throughput of 8 GPUs, many requests and few."""
    profile = load_profile(path)
    if profile.shape.experts:
        return
    per_step = {
        n: [step_ns(costs_of(profile, Layout(8 // tp, tp)), n * tp // 8, n * tp // 8 * 2000)
            for tp in (2, 8)]
        for n in (8, 1024)
    }  # fmt: skip
    assert per_step[8][1] < per_step[8][0] / 1.8
    assert per_step[1024][1] > per_step[1024][0] / 1.8


def rooflines() -> list[StepCosts]:
    found = []
    for path in sorted(PROFILES.glob("*.toml")):
        profile = load_profile(path)
        layouts = ["1xTP1", "1xTP8", "1xTP4PP2"]
        layouts += ["1xTP4DP2EP8", "1xTP8EP8"] if profile.shape.experts else ["1xTP2DP2"]
        found += [costs_of(profile, parse_layout(name)) for name in layouts]
    return found


FIT = FittedCosts(
    fixed_us=3600,
    sequence_us=115,
    kv_token_ns=41.7,
    prefill_token_us=12.3,
    batch_max=64,
    kv_max_tokens=65536,
    prefill_max_tokens=2048,
)
TABLE = TableCosts(
    batches=[1, 4, 16],
    contexts_tokens=[16, 512, 2048],
    step_us=[[3700, 3800, 4100], [4000, 4400, 5600], [5200, 6900, 11900]],
    prefills_tokens=[16, 512, 2048],
    prefill_us=[4000, 9000, 25000],
)
LOADS = st.tuples(st.integers(0, 600), st.integers(0, 300_000), st.integers(0, 20_000))


@given(costs=st.sampled_from([*rooflines(), FIT]), load=LOADS, more=LOADS)
def test_a_larger_load_never_costs_less(
    costs: StepCosts, load: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    larger = tuple(a + b for a, b in zip(load, more, strict=True))
    assert step_ns(costs, *load) <= step_ns(costs, *larger)


@given(
    st.integers(0, 40), st.integers(1, 4000), st.integers(0, 3000),
    st.integers(0, 40), st.integers(0, 4000), st.integers(0, 3000),
)  # fmt: skip
def test_a_measured_table_never_falls_with_batch_context_or_prefill(
    batch: int, context: int, prefill: int, batch2: int, context2: int, prefill2: int
) -> None:
    least = step_ns(TABLE, batch, batch * context, prefill)
    batch2, context2 = batch + batch2, context + context2
    assert least <= step_ns(TABLE, batch2, batch2 * context2, prefill + prefill2)


def test_a_table_gives_its_own_points_and_the_line_between_them() -> None:
    assert step_ns(TABLE, 4, 4 * 512) == 4_400_000
    assert step_ns(TABLE, 4, 4 * 1280) == 5_000_000
    assert step_ns(TABLE, 10, 10 * 512) == 5_650_000
    assert step_ns(TABLE, 0, 0, 1280) == 17_000_000
    assert step_ns(TABLE, 4, 4 * 512, 512) == 4_400_000 + 9_000_000 - 3_700_000


def test_a_result_says_when_it_is_extrapolated_and_how() -> None:
    assert step_time(TABLE, 4, 4 * 512, 512).beyond == frozenset()
    assert step_time(TABLE, 32, 32 * 512).beyond == {"batch above 16"}
    assert step_time(TABLE, 4, 4).beyond == {"context below 16 tokens"}
    assert step_time(TABLE, 4, 4 * 3000, 8).beyond == {
        "context above 2048 tokens",
        "prefill tokens below 16",
    }
    assert step_time(FIT, 65, 70_000, 4096).beyond == {
        "batch above 64",
        "KV tokens above 65536",
        "prefill tokens above 2048",
    }
    assert step_time(rooflines()[0], 513, 1).beyond == {"batch above 512"}
    assert step_ns(TABLE, 16, 16 * 3584) == 16_900_000, "the last slope goes on"


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_sums_of_floors_are_exact(count: int, unit: int, slope: int, first: int) -> None:
    assert floor_sum(count, unit, slope, first) == sum(
        (first + slope * i) // unit for i in range(count)
    )


@given(
    costs=st.sampled_from([*rooflines(), FIT, TABLE]),
    batch=st.integers(1, 40),
    context=st.integers(1, 3000),
    steps=st.integers(1, 60),
)
def test_many_steps_take_what_they_take_one_by_one(
    costs: StepCosts, batch: int, context: int, steps: int
) -> None:
    kv_tokens, left, total_ns = batch * context, steps, 0
    while left:
        line = costs.line(batch, kv_tokens, 0, 0)
        room = left if line.kv_until is None else (line.kv_until - kv_tokens) // batch + 1
        assert room >= 1
        times = min(left, room)
        total_ns += line.steps_ns(kv_tokens, batch, times)
        left, kv_tokens = left - times, kv_tokens + times * batch
    one_by_one = (step_ns(costs, batch, batch * context + i * batch) for i in range(steps))
    assert total_ns == sum(one_by_one)


def test_a_rank_takes_in_its_shard_over_its_own_link() -> None:
    profile = load_profile(PROFILES / "qwen2.5-14b-h800.toml")
    gpu = msgspec.structs.replace(profile.gpu, host_gb_per_s=Figure(50, "pcie"))
    fast = msgspec.structs.replace(profile, gpu=gpu)
    assert load_ns(fast, Layout()) / 1e9 == pytest.approx(29.54 / 50, rel=1e-3)
    assert load_ns(fast, Layout(tp=2)) == pytest.approx(load_ns(fast, Layout()) / 2, rel=1e-3)
    assert load_ns(fast, Layout(8, tp=2)) == load_ns(fast, Layout(tp=2)), "side by side"
    assert load_ns(fast, Layout(), 20.0) == pytest.approx(load_ns(fast, Layout()) / 20, abs=1)
    unstated = msgspec.structs.replace(gpu, host_gb_per_s=None)
    assert load_ns(msgspec.structs.replace(profile, gpu=unstated), Layout()) == 0


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_gpu_takes_in_no_more_than_its_slot_can_carry(path: Path) -> None:
    rate = load_profile(path).gpu.host_gb_per_s
    assert rate is not None
    assert rate.value < 32 * 16 * (128 / 130) / 8  # PCIe 5.0: GT/s, lanes, bits that are data


def test_a_layout_without_figures_is_refused_and_the_known_ones_named() -> None:
    profile = load_profile(PROFILES / "qwen3-235b-a22b-h800.toml")
    with pytest.raises(UsageError, match=r"all_to_all_us for a group of 16 GPUs; there is 4, 8"):
        costs_of(profile, parse_layout("1xTP8DP2EP16"))
    with pytest.raises(UsageError, match=r"all_reduce_us for a group of 16 GPUs"):
        costs_of(profile, parse_layout("1xTP16"))
    bare = msgspec.structs.replace(profile, roofline=None)
    with pytest.raises(UsageError, match=r"no figures for 4xTP2; it has none: add"):
        costs_of(bare, parse_layout("4xTP2"))


MEASURED = """
[[tables]]
batch = [1, 8]
context_tokens = [16, 1024]
step_us = [[3700, 3800], [4000, 4400]]
prefill_tokens = [16, 512]
prefill_us = [4000, 9000]
source = "h800"
tp = 2

[[coefficients]]
fixed_us = 3600
sequence_us = 115
kv_token_ns = 41.7
prefill_token_us = 12.3
batch_max = 64
kv_max_tokens = 65536
prefill_max_tokens = 2048
source = "h800"
tp = 4
"""


def with_measurements(folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    text = (PROFILES / "qwen2.5-14b-h800.toml").read_text() + MEASURED
    assert change[0] in text
    path = folder / "profile.toml"
    path.write_text(text.replace(*change, 1))
    return path


def test_measurements_go_before_the_roofline(tmp_path: Path) -> None:
    profile = load_profile(with_measurements(tmp_path))
    basis = {tp: costs_of(profile, Layout(1, tp)).basis for tp in (1, 2, 4)}
    assert basis == {1: "roofline", 2: "table", 4: "fit"}
    assert step_ns(costs_of(profile, Layout(1, 2)), 8, 8 * 1024) == 4_400_000
    assert step_ns(costs_of(profile, Layout(1, 4)), 0, 0, 1000) == 15_900_000


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("kv_share = {", "kv_shar = {", "roofline.kv_shar: unknown key; did you mean 'kv_share'?"),
        ('name = "H800"', "", "gpu.name: missing; expected text in quotes"),
        ("weights_share = { value = 0.766", "weights_share = { value = 1.2",
         "roofline.weights_share.value: a share lies above 0 and up to 1"),
        ('date = "2025-02"', 'date = "last year"', 'expected "YYYY", "YYYY-MM" or "YYYY-MM-DD"'),
        ('value = 3350, source = "h800"', 'value = 3350, source = "h80"',
         "gpu.bandwidth_gb_per_s.source: no source 'h80'; did you mean 'h800'?"),
        ("value = 3350", "value = 0", "gpu.bandwidth_gb_per_s.value: expected more than 0"),
        ("value = 51", "value = 0", "gpu.host_gb_per_s.value: expected more than 0"),
        ("layers = 48", "layers = 0", "shape.layers: expected at least 1"),
        ("2 = { value = 8.5", "two = { value = 8.5", "roofline.all_reduce_us.two: name the number"),
        ("[[3700, 3800]", "[[3900, 3800]", "tables[0].step_us: falls as the load grows"),
        ("[4000, 4400]]", "[4000]]", "tables[0].step_us: expected rows of 2, one for each context"),
        ("batch = [1, 8]", "batch = [8, 1]", "tables[0].batch: expected whole numbers from 1 up"),
        ("prefill_us = [4000, 9000]", "prefill_us = [4000]", "tables[0].prefill_us: expected 2"),
        ("kv_token_ns = 41.7", "kv_token_ns = -1", "coefficients[0].kv_token_ns: expected 0"),
        ("tp = 4", "tp = 0", "coefficients[0].tp: degrees are at least 1"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_refused_with_its_key(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    with pytest.raises(BadFile) as found:
        load_profile(with_measurements(tmp_path, (old, new)))
    assert any(problem in each for each in found.value.problems), found.value.problems


def test_all_problems_of_a_profile_are_told_at_once(tmp_path: Path) -> None:
    path = with_measurements(tmp_path, ("layers = 48", "layers = 0"))
    path.write_text(path.read_text().replace("value = 3350", "value = -1"))
    with pytest.raises(BadFile) as found:
        load_profile(path)
    assert len(found.value.problems) == 2


def test_a_profile_may_hold_measurements_alone(tmp_path: Path) -> None:
    table = tomllib.loads(with_measurements(tmp_path).read_text())
    text = (tmp_path / "profile.toml").read_text()
    start, end = text.index("\n[roofline]"), text.index("\n[[tables]]")
    path = tmp_path / "bare.toml"
    path.write_text(text[:start] + text[end:])
    profile = load_profile(path)
    assert profile.roofline is None
    assert table["tables"][0]["tp"] == profile.tables[0].tp
    with pytest.raises(UsageError, match=r"it has 1xTP2, 1xTP4: add"):
        costs_of(profile, Layout(1, 8))
    path.write_text(text[:start])
    with pytest.raises(BadFile, match="roofline: missing"):
        load_profile(path)
