"""Matrices and pictures of circuits: what they show, and that they can be read by machines, too."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fabric.drawing import LIT, draw, matrix_lines
from harness.fabric.planner import lay, plan_demand
from harness.fabric.topology import Topology, topology_of
from harness.model.generated import REFERENCE, Numbers, bench_of
from tests.unit.two_tier_milp import random_demand, random_fabric

SVG = "{http://www.w3.org/2000/svg}"


def fabric(**given: object) -> Topology:
    numbers = Numbers(
        roles=("train", "generate"), tors_per_pod=2, nodes_per_tor=2, uplinks_per_tor=2,
        aggregation_planes=2, core_planes=1, trunks_per_pod=4,
    )  # fmt: skip
    return topology_of(bench_of(replace(numbers, **given)))  # type: ignore[arg-type]


def texts(svg: str, tag: str = "text") -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(SVG + tag)]


def test_the_matrix_counts_circuits_and_marks_those_over_a_core() -> None:
    topology = fabric()
    links = lay(topology, [("tor0", "tor1"), ("tor0", "tor2"), ("tor1", "tor3")]).links
    assert matrix_lines(topology, links) == [
        "     tor0 tor1 tor2 tor3",
        "tor0    -    1   1+    .",
        "tor1    1    -    .   1+",
        "tor2   1+    .    -    .",
        "tor3    .   1+    .    -",
        "core0: 4 of 8 trunks in use",
    ]


def test_the_matrix_of_one_way_links_is_not_symmetric() -> None:
    topology = fabric(duplex=False)
    lines = matrix_lines(topology, lay(topology, [("tor0", "tor1"), ("tor0", "tor1")]).links)
    assert lines[1:3] == ["tor0    -    2    .    .", "tor1    .    -    .    ."]


def test_many_tors_are_numbered_in_the_matrix() -> None:
    topology = fabric(tors_per_pod=16, core_planes=0, trunks_per_pod=0)
    lines = matrix_lines(topology, lay(topology, [("tor0", "tor31")]).links)
    assert len(lines) == 33
    assert lines[1].split() == ["0", "tor0", "-", *["."] * 30, "1"]
    assert max(map(len, lines)) <= 110


def test_a_panel_for_each_phase_with_what_is_lit_in_its_own_colour() -> None:
    topology = fabric()
    train, sync = lay(topology, [("tor0", "tor1")]).links, lay(topology, [("tor0", "tor2")]).links
    svg = draw(topology, {"train": train, "sync": sync, "rest": frozenset()})
    told = texts(svg)
    for name in [*topology.tors, *topology.nodes, *topology.switches, *topology.pods]:
        assert told.count(name) == 3, name
    assert {"train: 1 link", "sync: 1 link", "rest: 0 links"} <= set(told)
    assert told.count("electrical path, 4:1, always on") == 3
    strokes = [element.get("stroke") for element in ET.fromstring(svg).iter(SVG + "path")]
    assert strokes.count(LIT[0]) == 2 + 1  # two cables, and a cross-connect in one switch
    assert strokes.count(LIT[1]) == 4 + 3  # two uplinks and two trunks, three switches
    assert strokes.count(LIT[2]) == 0


def test_parallel_circuits_are_one_wider_stroke() -> None:
    topology = fabric(uplinks_per_tor=4)

    def widths(pairs: int) -> set[float]:
        svg = draw(topology, {"": lay(topology, [("tor0", "tor1")] * pairs).links})
        paths = ET.fromstring(svg).iter(SVG + "path")
        return {float(p.get("stroke-width", "0")) for p in paths if p.get("stroke") == LIT[0]}

    assert max(widths(4)) > max(widths(1))


def test_it_says_in_words_what_it_shows() -> None:
    topology = fabric()
    svg = draw(topology, {"sync": lay(topology, [("tor0", "tor2")]).links})
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root[0].tag == SVG + "title"
    assert root[1].text == (
        "pod0 with 2 ToRs, pod1 with 2 ToRs; 5 optical switches. "
        "sync: 1 link, 1 of them over a core."
    )


def test_nothing_is_fetched_from_elsewhere() -> None:
    svg = draw(fabric(), {"x": frozenset()})
    assert not [e for e in ET.fromstring(svg).iter() if {"href", "src"} & set(e.keys())]
    assert "<script" not in svg


@settings(max_examples=50)
@given(st.text())
def test_any_name_of_a_phase_is_well_formed(name: str) -> None:
    ET.fromstring(draw(fabric(), {name: frozenset()}))


def test_names_that_look_like_markup_are_text() -> None:
    [first, *_] = texts(draw(fabric(), {'<b a="1">&amp;': frozenset()}))
    assert first == '<b a="1">&amp;: 0 links'


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_cabling_everything_stands_inside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_fabric(rng, two_tier=bool(seed % 2))
    links = plan_demand(topology, random_demand(rng, len(topology.tors))).links
    root = ET.fromstring(draw(topology, {"x": links}))
    wide = float(root.get("width", "0"))
    for box in list(root.iter(SVG + "rect"))[1:]:
        left = float(box.get("x", "0"))
        assert 0 <= left <= left + float(box.get("width", "0")) <= wide


def test_a_large_fabric_is_still_one_page() -> None:
    reference = topology_of(bench_of(REFERENCE))
    links = lay(reference, [("tor0", "tor8")] * 32).links
    svg = draw(reference, {"sync": links})
    assert len(svg) < 40_000
    assert "32 aggregation planes, agg0 to agg31" in texts(svg)
    assert "32 nodes" in texts(svg)
    many = fabric(tors_per_pod=32, core_planes=0, trunks_per_pod=0)
    assert float(ET.fromstring(draw(many, {})).get("width", "0")) < 2000


def test_a_bench_without_switches_is_drawn_too() -> None:
    bench = bench_of(
        Numbers(
            roles=("train",),
            tors_per_pod=2,
            nodes_per_tor=1,
            uplinks_per_tor=1,
            aggregation_planes=1,
        )
    )
    bare = replace(topology_of(bench), uplinks=(), ours={}, planes={})
    assert texts(draw(bare, {"all": frozenset()}))[0] == "all: 0 links"
    assert matrix_lines(bare, [])[1] == "tor0    -    ."
