"""From which NIC to which a simulated bench sends, where nodes have more of them or fewer."""

from __future__ import annotations

import pytest

from harness.bench.simulated.ways import Ways
from harness.bench.simulated.world import Flow
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Node, Tor


@pytest.mark.parametrize(
    ("flow", "nics"),
    [
        (Flow("wide", "one", 1.0, 0), [("wide/0", "one")]),
        (Flow("one", "wide", 1.0, 3), [("one", "wide/3")]),
        (Flow("two", "wide", 1.0, 3), [("two/1", "wide/3")]),
        (Flow("wide", "two", 1.0, 1), [("wide/2", "two/1")]),
        (Flow("two", "wide", 1.0), [("two/0", "wide/0"), ("two/1", "wide/2")]),
        (Flow("two", "other", 1.0), [("two/0", "other/0"), ("two/1", "other/1")]),
    ],
    ids=str,
)
def test_a_rail_is_the_targets_and_the_sources_nic_is_the_one_beside_it(
    flow: Flow, nics: list[tuple[str, str]]
) -> None:
    rails = ("t0", "t1", "t2", "t3")
    bench = Bench(
        name="mixed", world="simulated", tors={tor: Tor() for tor in rails},
        nodes={
            "one": Node(tor="t0"), "two": Node(rails=rails[:2]), "other": Node(rails=rails[:2]),
            "wide": Node(rails=rails),
        },
    )  # fmt: skip
    found = Ways(topology_of(bench)).parts(flow)
    assert [(a.name.replace(":", "/"), b.name.replace(":", "/")) for a, b in found] == nics
