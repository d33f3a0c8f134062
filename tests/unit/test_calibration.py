"""Calibration: what is measured, what is written of it, and that a profile reads back the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile, UsageError
from harness.model.calibration import (
    Grid,
    Point,
    Room,
    fitting,
    point_of,
    rising,
    table_of,
    with_tables,
)
from harness.model.layout import Layout
from harness.model.load import load_profile
from harness.model.profile import Profile, Source, costs_of
from harness.model.profile_text import profile_text
from harness.model.steptime import step_ns

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
GRID = Grid((1, 4, 16), (128, 512), (128, 512))
ROOM = Room(
    sequences_max=256, step_max_tokens=2048, length_max_tokens=4096, blocks=10_000, block_tokens=16
)


def known(name: str = "qwen2.5-14b-h800") -> Profile:
    return load_profile(PROFILES / f"{name}.toml")


def measured(layout: Layout, profile: Profile, grid: Grid = GRID) -> dict[str, dict]:
    """What a perfect accelerator of this profile would be measured at."""
    costs = costs_of(profile, layout)
    decode = {
        (b, c): Point(step_ns(costs, b, b * c) / 1000, 0.0)
        for b in grid.batch
        for c in grid.context_tokens
    }
    pairs = {n: n * (n + 1) // 2 for n in grid.prefill_tokens}
    prefill = {n: Point(step_ns(costs, 0, 0, n, pairs[n]) / 1000, 0.0) for n in pairs}
    return {"decode": decode, "prefill": prefill}


def test_all_points_are_measured_where_there_is_room() -> None:
    assert fitting(GRID, ROOM, 20) == (GRID, [])


@pytest.mark.parametrize(
    ("room", "kept", "reason"),
    [
        ({"sequences_max": 8}, ((1, 4), (128, 512)), "batch 16: an instance runs 8 sequences"),
        ({"length_max_tokens": 540}, ((1, 4, 16), (128,)), "context 512, 20 steps: a sequence has"),
        ({"blocks": 176}, ((1, 4), (128, 512)), "batch 16 at 512 tokens: needs 560 KV blocks"),
        ({"blocks": 130}, ((1, 4), (128,)), "batch 4 at 512 tokens: needs 140 KV blocks"),
    ],
)
def test_what_does_not_fit_is_left_out_with_its_reason(
    room: dict[str, int], kept: tuple[tuple[int, ...], ...], reason: str
) -> None:
    grid, left = fitting(GRID, Room(**(vars(ROOM) | room)), 20)
    assert (grid.batch, grid.context_tokens) == kept
    assert any(text.startswith(reason) for text in left), left


def test_a_point_that_fits_but_leaves_a_hole_in_the_grid_is_named_too() -> None:
    _, left = fitting(GRID, Room(**(vars(ROOM) | {"blocks": 176})), 20)
    assert any(text.startswith("batch 16 at 128 tokens: a table is a full grid") for text in left)


def test_a_prompt_longer_than_a_step_is_not_prefilled() -> None:
    grid, left = fitting(GRID, Room(**(vars(ROOM) | {"step_max_tokens": 256})), 20)
    assert grid.prefill_tokens == (128,)
    assert left == ["prefill 512: a step computes 256 tokens at most"]


def test_where_nothing_fits_one_message_says_why() -> None:
    with pytest.raises(UsageError, match="no point fits: context 128, 20 steps: a sequence has"):
        fitting(GRID, Room(**(vars(ROOM) | {"length_max_tokens": 100})), 20)


def test_one_odd_step_moves_no_point() -> None:
    point = point_of([1_000_000] * 9 + [90_000_000])
    assert point == Point(1000.0, 0.0)


def test_an_unsteady_point_and_a_large_correction_are_told() -> None:
    decode = {(1, 128): Point(1000.0, 40.0), (4, 128): Point(800.0, 1.0)}
    grid = Grid((1, 4), (128,), (128,))
    table, doubts = table_of(Layout(), grid, decode, {128: Point(2000.0, 0.0)}, "here")
    assert table.step_us == ((900.0,), (900.0,))
    assert "batch 1 at 128 tokens: unsteady, its quartiles lie 40 % apart" in doubts
    assert any(text.startswith("batch 4 at 128 tokens: measured 800.0 us") for text in doubts)


@given(
    st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(st.floats(1, 1e6), min_size=width, max_size=width), min_size=1, max_size=5
        )
    )
)
def test_what_is_written_never_falls_and_stays_within_what_was_measured(
    rows: list[list[float]],
) -> None:
    found = rising(rows)
    for line in [*found, *zip(*found, strict=True)]:
        assert all(low <= high for low, high in pairwise(line))
    flat = [us for row in rows for us in row]
    assert min(flat) - 0.1 <= min(us for row in found for us in row)
    assert max(us for row in found for us in row) <= max(flat) + 0.1


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6))
def test_times_that_rise_are_written_as_they_were_measured(times: list[int]) -> None:
    row = [float(us) for us in sorted(times)]
    assert rising([row]) == [row]


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_profile_that_was_written_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    profile = load_profile(path)
    (tmp_path / "written.toml").write_text(profile_text(profile, ["Heading", "", "and more"]))
    assert load_profile(tmp_path / "written.toml") == profile


def test_texts_from_a_node_cannot_break_the_file(tmp_path: Path) -> None:
    odd = Source(what='a "quoted" \\ device\x7f\n[tables]\t€ 🖥', date="2026")
    profile = msgspec.structs.replace(known(), sources={**known().sources, "odd name": odd})
    (tmp_path / "written.toml").write_text(profile_text(profile, ["a reason\nin lines = ["]))
    what = load_profile(tmp_path / "written.toml").sources["odd name"].what
    assert what == 'a "quoted" \\ device  [tables] € 🖥'


def test_measured_tables_come_before_what_was_known_and_replace_their_own_layout() -> None:
    profile = known()
    for _ in range(2):
        table, _ = table_of(Layout(tp=2), GRID, **measured(Layout(tp=2), profile), source="")
        profile = with_tables(profile, [table], Source(what="a bench", date="2026-11-29"))
    assert [table.source for table in profile.tables] == ["measured-2"]
    assert costs_of(profile, Layout(tp=2)).basis == "table"
    assert costs_of(profile, Layout(tp=4)).basis == "roofline"


def test_between_its_points_a_table_repeats_the_profile_it_was_measured_on() -> None:
    grid = Grid((1, 4, 16, 64, 256), (128, 1024, 8192), (128, 1024, 4096))
    layout = Layout(tp=2)
    table, doubts = table_of(layout, grid, **measured(layout, known(), grid), source="h800")
    assert not doubts
    again = costs_of(msgspec.structs.replace(known(), tables=(table,)), layout)
    for batch, context in ((2, 300), (8, 700), (40, 5000), (200, 128)):
        expected = step_ns(costs_of(known(), layout), batch, batch * context)
        assert step_ns(again, batch, batch * context) == pytest.approx(expected, rel=0.03)


def test_peaks_are_missing_only_where_a_roofline_needs_them(tmp_path: Path) -> None:
    table, _ = table_of(Layout(), GRID, **measured(Layout(), known()), source="h800")
    gpu = msgspec.structs.replace(known().gpu, bandwidth_gb_per_s=None)
    profile = msgspec.structs.replace(known(), gpu=gpu, tables=(table,))
    path = tmp_path / "written.toml"
    path.write_text(profile_text(profile))
    with pytest.raises(BadFile, match=r"gpu.bandwidth_gb_per_s: missing; a roofline needs it"):
        load_profile(path)
    path.write_text(profile_text(msgspec.structs.replace(profile, roofline=None)))
    assert load_profile(path).tables == (table,)
