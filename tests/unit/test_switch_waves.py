"""What a switch of layouts changes: nothing that may stay, all nodes together or one by one."""

from __future__ import annotations

from harness.model.layout import parse_layout
from harness.model.placement import place
from harness.scheduling.waves import Placed, waves

GPUS = {"g0": 2, "g1": 2}


def placed(layout: str) -> Placed:
    return place(parse_layout(layout), GPUS)


def test_at_once_all_nodes_change_in_one_wave() -> None:
    (wave,) = waves(placed("4xTP1"), placed("2xTP2"), "at_once")
    assert wave.gone_names == ("g0:0", "g0:1", "g1:0", "g1:1")
    assert wave.fresh_names == ("g0:0-1", "g1:0-1")
    assert wave.nodes == ("g0", "g1")


def test_rolling_goes_node_by_node() -> None:
    first, second = waves(placed("4xTP1"), placed("2xTP2"), "rolling")
    assert (first.nodes, first.gone_names, first.fresh_names) == (
        ("g0",),
        ("g0:0", "g0:1"),
        ("g0:0-1",),
    )
    assert second.nodes == ("g1",)


def test_what_both_layouts_have_is_left_alone() -> None:
    (wave,) = waves(placed("4xTP1"), placed("3xTP1"), "at_once")
    assert (wave.gone_names, wave.fresh_names) == (("g1:1",), ())
    assert waves(placed("2xTP2"), placed("2xTP2"), "rolling") == ()


def test_the_dead_are_built_anew() -> None:
    (wave,) = waves(placed("2xTP2"), placed("2xTP2"), "at_once", dead=("g1:0-1",))
    assert (wave.gone_names, wave.fresh_names) == (("g1:0-1",), ("g1:0-1",))


def test_a_node_may_be_left_empty_or_come_in() -> None:
    (away,) = waves(placed("2xTP2"), placed("1xTP2"), "at_once")
    assert (away.gone_names, away.fresh_names) == (("g1:0-1",), ())
    (back,) = waves(placed("1xTP2"), placed("2xTP2"), "at_once")
    assert (back.gone_names, back.fresh_names) == ((), ("g1:0-1",))
