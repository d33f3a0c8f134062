"""How a request is moved: what was measured rules, estimates stand in, and a person may insist."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.model.layout import Layout
from harness.model.load import load_profile
from harness.scheduling.migration import Choice, Costs, choose, estimates_of, key_of

TP1, TP2 = Layout(1), Layout(1, 2)
PROFILE = Path(__file__).parents[2] / "scenarios/profiles/qwen2.5-14b-h800.toml"


def costs(kv_ms: float | None, recompute_ms: float | None) -> Costs:
    return Costs({"kv": lambda *_: kv_ms, "recompute": lambda *_: recompute_ms})


def chosen(of: Costs, *, kv_possible: bool = True, wanted: str = "auto") -> Choice:
    return choose(of, TP1, TP2, 1000, kv_possible=kv_possible, wanted=wanted)  # type: ignore[arg-type]


def test_the_faster_way_is_taken_and_both_expectations_are_told() -> None:
    assert chosen(costs(3, 40)) == ("kv", {"kv": 3, "recompute": 40})
    assert chosen(costs(50, 40)).by == "recompute"


def test_a_person_may_insist_but_cannot_send_what_cannot_be_sent() -> None:
    assert chosen(costs(50, 40), wanted="kv").by == "kv"
    assert chosen(costs(3, 40), wanted="recompute").by == "recompute"
    nowhere = chosen(costs(3, 40), kv_possible=False, wanted="kv")
    assert nowhere == ("recompute", {"kv": None, "recompute": 40})


def test_of_two_unknown_ways_kv_is_tried() -> None:
    assert chosen(costs(None, None)).by == "kv"
    assert chosen(costs(None, 40)).by == "kv"


def test_measurements_replace_the_estimate_for_their_layouts_and_length_only() -> None:
    table = costs(3, 40)
    table.measured(TP1, TP2, 900, "kv", 100)
    assert chosen(table) == ("recompute", {"kv": 100, "recompute": 40})
    assert choose(table, TP1, TP2, 2000, kv_possible=True).by == "kv"
    assert choose(table, TP2, TP1, 1000, kv_possible=True).by == "kv"
    table.measured(TP1, TP2, 600, "kv", 50)
    assert table.expected_ms(TP1, TP2, 1000, "kv") == 75


def test_the_table_follows_a_bench_that_changes() -> None:
    table = costs(None, None)
    for _ in range(100):
        table.measured(TP1, TP1, 10, "recompute", 10)
    for _ in range(20):
        table.measured(TP1, TP1, 10, "recompute", 20)
    assert table.expected_ms(TP1, TP1, 10, "recompute") == pytest.approx(20, abs=0.2)


def test_lengths_share_a_row_up_to_the_next_power_of_two() -> None:
    rows = {tokens: key_of(TP1, TP2, tokens).bucket for tokens in (1, 511, 512, 1023, 1024)}
    assert rows == {1: 1, 511: 9, 512: 10, 1023: 10, 1024: 11}


def test_first_estimates_come_from_the_profile_and_the_link() -> None:
    profile = load_profile(PROFILE)
    estimates = estimates_of(profile, 1e-3, 125e6)
    kv_ms, recompute_ms = (estimates[by](TP1, TP2, 4096) for by in ("kv", "recompute"))
    assert kv_ms is not None
    assert recompute_ms is not None
    sent_ms = 4096 * profile.shape.kv_bytes_per_token * 1e-3 / 125e6 * 1e3
    assert sent_ms < kv_ms < sent_ms + 100  # and one decode step
    assert recompute_ms > 10
    assert estimates["recompute"](TP1, TP1, 4096) > recompute_ms  # one GPU prefills slower than two


def test_without_a_profile_nothing_is_known() -> None:
    assert estimates_of(None, 1e-3, 1.0)["kv"](TP1, TP2, 100) is None
