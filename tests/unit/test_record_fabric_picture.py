"""The picture of a run: its journal names circuits, and the bench says where they lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from fabric_bench import bench
from hypothesis import given, settings
from hypothesis import strategies as st
from test_record_fabric import ARM, began, changed, crossed, step

from harness.clock import RealClock
from harness.fabric.planner import plan_demand
from harness.fabric.refusals import refusal
from harness.fabric.topology import Topology, topology_of
from harness.model.documents import SCHEMA, Start
from harness.model.load import load_bench
from harness.model.streams import STREAMS
from harness.record.journal import Journal
from harness.record.picture import links_named, lit_by_phase, picture_of
from harness.record.store import RunFolder
from harness.record.summary import PICTURE, conclude

TWO_TIER = Path(__file__).parents[2] / "scenarios" / "benches" / "two-tier.toml"
ACROSS = ("gen0-train0@agg2+core0+agg0", "gen0-train0@agg3+core0+agg1")
WITHIN = ("train0-train1@agg0", "train0-train1@agg1")


def two_tier() -> Topology:
    return topology_of(load_bench(TWO_TIER))


@given(st.integers(0, 10**6), st.sampled_from(["two tiers", "duplex", "simplex"]))
@settings(deadline=None, max_examples=40)
def test_names_of_circuits_become_links_that_can_be_made_together(seed: int, kind: str) -> None:
    topology = two_tier() if kind == "two tiers" else bench(5, planes=2, duplex=kind == "duplex")
    n = len(topology.tors)
    chance = np.random.default_rng(seed)
    sent = chance.integers(0, 10**9, (n, n)) * (chance.random((n, n)) < 0.5)
    np.fill_diagonal(sent, 0)
    names = sorted(map(str, plan_demand(topology, sent.astype(np.float64)).links))
    found = list(links_named(topology, names))
    assert sorted(map(str, found)) == names
    assert refusal(topology, frozenset(found)) == ""


def test_names_that_the_bench_cannot_have_are_left_out() -> None:
    names = ("train0-gen0@agg0", "train0-train1@agg9", *WITHIN, WITHIN[0])
    assert sorted(map(str, links_named(two_tier(), names))) == [*WITHIN]


def test_a_phase_has_the_circuits_that_were_lit_when_its_traffic_ended() -> None:
    events = [
        crossed(0.5, "train"),  # over nothing yet
        changed(1.0, "train", lit=[*WITHIN]),
        crossed(2.0, "train"),
        crossed(3.0, "gather"),
        changed(4.0, "sync", lit=[*ACROSS]),
        crossed(5.0, "sync"),
        changed(6.0, "end", lit=[]),
    ]
    assert list(lit_by_phase(events)) == [
        (f"{ARM}, train, gather", WITHIN),
        (f"{ARM}, sync", ACROSS),
    ]
    words = "".join(ET.fromstring(picture_of(two_tier(), events)).itertext())
    assert f"{ARM}, sync: 2 links" in words
    assert picture_of(two_tier(), events[:1]) == ""


@pytest.mark.parametrize("there", [True, False])
def test_a_run_leaves_its_picture_unless_its_bench_cannot_be_read(
    tmp_path: Path, *, there: bool
) -> None:
    folder, clock = RunFolder(tmp_path), RealClock()
    if there:
        shutil.copy(TWO_TIER, folder.bench)
    start = Start(
        schema=SCHEMA, run="r", t_ns=0, wall="", world="emulated", scenario="s", bench="b",
        seed=0, versions={},
    )  # fmt: skip
    with Journal.create(folder.journal, clock) as journal:
        journal.start(start)
        for stream, fields in STREAMS.items():
            journal.describe(stream, fields)
        rows = (changed(1.0, "train", lit=[*WITHIN]), crossed(2.0, "train"), step(ARM, 3.0, 0))
        for one in (began(), *rows):
            journal.event(one.stream, one.data)
        assert conclude(journal, folder).exit_code == 0
    assert (tmp_path / PICTURE).exists() == there
