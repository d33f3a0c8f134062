"""Which ranks there are, and which of them a collective measures."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import InfrastructureError, UsageError
from harness.fabric.circuits import plan_shape
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Node, Switch, Tor
from harness.model.scenario import Collectives, Scenario, Shape
from harness.run.session import Session
from harness.run.steps import rounds
from harness.wire.messages import Hello

SWITCH = Switch(driver="polatis-scpi", url="tcp://10.0.0.5:5025", ports="1-8,17-24")


def laid_out(tors: int, *, world: Any = "live", gpus: int = 0) -> Topology:
    """One node on each ToR, two uplinks of each on one switch."""
    names = range(tors)
    bench = Bench(
        name="rack",
        world=world,
        nodes={f"n{i}": Node(tor=f"t{i}", gpus=gpus) for i in names},
        tors={f"t{i}": Tor(uplinks=2) for i in names},
        switches={"agg0": SWITCH},
        cables={
            f"t{i}:u{up}": f"agg0:{2 * i + up}/{16 + 2 * i + up}" for i in names for up in (1, 2)
        },
    )
    return topology_of(bench)


class Rack:
    """A bench of which only the plan and the agents' hellos are of interest."""

    store = "127.0.0.1:1"

    def __init__(self, topology: Topology, found_gpus: int) -> None:
        self.topology = topology
        self.hellos = {
            node: Hello(
                version=(1, 0), host=node, pid=1, gpus=found_gpus, interfaces=(), facts={}
            )
            for node in topology.nodes
        }  # fmt: skip


def session(topology: Topology, found_gpus: int = 0) -> Session:
    bench: Any = Rack(topology, found_gpus)
    scenario = Scenario(question="?", steps=(Collectives(),))
    return Session(bench=bench, scenario=scenario, record=None, plans={})  # type: ignore[arg-type]


def groups(of: Session, group: Any) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    return list(rounds(of, Collectives(group=group)))


def test_every_gpu_of_a_node_is_a_rank_and_pairs_join_whole_nodes() -> None:
    pairs = session(laid_out(3), found_gpus=2)
    assert groups(pairs, "pairs") == [("electrical", ((2, 3, 4, 5),))]
    assert pairs.ranks_of == {"n0": (0, 1), "n1": (2, 3), "n2": (4, 5)}


def test_the_bench_file_may_ask_for_fewer_gpus_than_there_are_and_not_for_more() -> None:
    fewer = session(laid_out(2, gpus=1), found_gpus=8)
    fewer.lay_out_ranks()
    assert fewer.world_size == 2
    with pytest.raises(InfrastructureError, match=r"n0: the bench file says 8 GPUs.*found 4"):
        session(laid_out(2, gpus=8), found_gpus=4).lay_out_ranks()


def test_emulated_nodes_share_one_machine_so_their_ranks_leave_its_gpus_alone() -> None:
    emulated = session(laid_out(2, world="emulated", gpus=8), found_gpus=8)
    emulated.lay_out_ranks()
    assert emulated.world_size == 2
    assert emulated._groups("n0").backend == "gloo"
    live = session(laid_out(2), found_gpus=8)
    live.lay_out_ranks()
    assert live._groups("n0").backend == "auto"


def test_groups_that_have_no_member_are_refused_not_measured_as_all() -> None:
    with pytest.raises(UsageError, match="two nodes"):
        groups(session(laid_out(1), found_gpus=2), "pairs")
    with pytest.raises(UsageError, match="no circuit"):
        groups(session(laid_out(2)), "circuits")


def test_groups_of_circuits_are_disjoint_and_in_rank_order() -> None:
    topology = laid_out(3)
    shape = Shape(circuits=("t2-t1@agg0", "t0-t1@agg0"))
    lit = session(topology)
    lit.lit, lit.shape = plan_shape(topology, "both", shape).links, "both"
    assert groups(lit, "circuits") == [("both@agg0", ((0, 1),))]


def test_a_circuit_to_a_tor_without_nodes_does_not_use_up_its_other_end() -> None:
    topology = laid_out(3)
    bare = Topology(
        tors=topology.tors,
        nodes={name: place for name, place in topology.nodes.items() if name != "n1"},
        uplinks=topology.uplinks,
        ours=topology.ours,
    )
    lit = session(bare)
    lit.lit = plan_shape(bare, "both", Shape(circuits=("t0-t1@agg0", "t0-t2@agg0"))).links
    assert groups(lit, "circuits") == [("electrical@agg0", ((0, 1),))]
