"""How new weights get everywhere: who sends to whom, and what a sync in pairs survives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_bench import CARRY_NS, RlBench, replay, rl_session

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError, StepFailed
from harness.model.scenario import Rl
from harness.run.rl.edges import children_of, edges_of, sources_of
from harness.run.rl.loop import rl
from harness.tasks import beside
from harness.virtual import run_virtually
from harness.wire.messages import Failure
from harness.wire.training import PublishWeights, WeightsPublished
from harness.wire.weights import SendWeights

PATHS = st.sampled_from(("chain", "tree", "pairs"))
PAIRS = Rl(steps=2, policies=("static:4xTP1",), sync="pairs")
DEAD = Failure(error="PorterDied", text="porter (pid 7) was killed by SIGKILL")

# -- who sends to whom -----------------------------------------------------------------------------


def named(kind: str, count: int) -> list[str]:
    return [f"{kind}{ordinal}" for ordinal in range(count)]


@given(st.integers(1, 5), st.integers(0, 9), PATHS)
def test_every_receiver_gets_the_file_once_and_all_sources_serve(
    trainers: int, count: int, path: Literal["chain", "tree", "pairs"]
) -> None:
    receivers = named("g", count)
    sources = sources_of(named("t", trainers), receivers, path)
    edges = edges_of(sources, receivers, path)
    assert sorted(to for _, to in edges) == sorted(receivers)
    assert {sender for sender, _ in edges} - set(receivers) == set(sources if receivers else ())
    have = set(sources)
    for sender, to in edges:  # nobody passes on what has no way to come
        assert sender in have
        have.add(to)


@given(st.integers(1, 5), st.integers(1, 9))
def test_shares_of_sources_differ_by_one_at_most_and_are_chains(trainers: int, count: int) -> None:
    receivers = named("g", count)
    sources = sources_of(named("t", trainers), receivers, "pairs")
    edges = edges_of(sources, receivers, "pairs")
    assert max(Counter(sender for sender, _ in edges).values()) == 1
    shares = [share(source, edges) for source in sources]
    assert max(shares) - min(shares) <= 1


def share(source: str, edges: Sequence[tuple[str, str]]) -> int:
    below = children_of(source, edges)
    return len(below) + sum(share(node, edges) for node in below)


def test_equal_numbers_are_pairs_of_the_same_ordinal() -> None:
    edges = edges_of(("t0", "t1", "t2"), ("g0", "g1", "g2"), "pairs")
    assert edges == (("t0", "g0"), ("t1", "g1"), ("t2", "g2"))


def test_a_tree_and_a_chain_begin_at_one_source() -> None:
    five = named("g", 5)
    assert sources_of(("t0", "t1"), five, "tree") == ("t0",)
    tree = edges_of(("t0",), five, "tree")
    assert tree == (("t0", "g0"), ("g0", "g1"), ("g0", "g2"), ("g1", "g3"), ("g1", "g4"))
    chain = edges_of(("t0",), five[:3], "chain")
    assert chain == (("t0", "g0"), ("g0", "g1"), ("g1", "g2"))


# -- a sync ----------------------------------------------------------------------------------------


async def nothing(_: RlBench) -> None:
    """Let all go well."""


def synced(
    tmp_path: Path,
    fault: Callable[[RlBench], Coroutine[Any, Any, None]] = nothing,
    *,
    step: Rl = PAIRS,
    nodes: int = 2,
    trainers: int = 2,
) -> tuple[RlBench, list[dict[str, Any]], str]:
    """Run a loop of syncs; return its bench, the rows of its syncs, and how it ended."""

    async def main() -> Any:
        bench, ended = RlBench(nodes, 4 // nodes, trainers=trainers), ""
        session = rl_session(bench, tmp_path, step, replay())
        try:
            async with session.closing, beside(fault(bench)):
                await rl(session, step, 0)
        except (StepFailed, InfrastructureError) as error:
            ended = str(error)
        return bench, session.record.of("sync"), ended

    found: tuple[RlBench, list[dict[str, Any]], str] = run_virtually(main())
    return found


def sends(bench: RlBench) -> list[tuple[str, tuple[str, ...]]]:
    return [(node, body.children) for node, body in bench.asked if isinstance(body, SendWeights)]


def test_every_node_that_trains_serves_the_one_of_its_ordinal(tmp_path: Path) -> None:
    bench, rows, ended = synced(tmp_path)
    assert ended == ""
    assert [(row["path"], row["sources"], row["receivers"]) for row in rows] == [
        ("pairs", 2, 2)
    ] * 2
    assert sends(bench) == [("t0", ("n0:1",)), ("t1", ("n1:1",))] * 2
    published = [body.writers for _, body in bench.asked if isinstance(body, PublishWeights)]
    assert published == [(0, 1)] * 4  # two nodes are asked, twice
    assert {bench.nodes[name].files[f"{name}/2"] for name in ("n0", "n1")} == {2}


def test_no_more_nodes_publish_than_serve(tmp_path: Path) -> None:
    bench, rows, ended = synced(tmp_path, nodes=2, trainers=3)
    assert ended == ""
    assert [row["sources"] for row in rows] == [2, 2]
    assert {node for node, _ in sends(bench)} == {"t0", "t1"}


def test_receivers_beyond_the_sources_get_theirs_from_the_one_before(tmp_path: Path) -> None:
    bench, rows, ended = synced(tmp_path, nodes=4, trainers=2)
    assert ended == ""
    assert [row["outcome"] for row in rows] == ["synced"] * 2
    assert all(bench.nodes[f"n{i}"].files[f"n{i}/2"] == 2 for i in range(4))


def test_wire_time_is_from_the_first_begin_to_the_last_end(tmp_path: Path) -> None:
    """Nodes have clocks of their own, thousands of seconds apart."""

    async def slow(bench: RlBench) -> None:
        bench.nodes["t1"].carry_ns = 4 * CARRY_NS

    _, rows, _ = synced(tmp_path, slow)
    assert all(row["wire_s"] == pytest.approx(4 * CARRY_NS / NS_PER_S, abs=1e-3) for row in rows)
    assert all(row["rpc_s"] >= 0 for row in rows)


def test_a_source_that_dies_is_replaced_by_those_that_are_left(tmp_path: Path) -> None:
    async def dies(bench: RlBench) -> None:
        bench.fail("t1", SendWeights, DEAD)

    bench, rows, ended = synced(tmp_path, dies)
    assert ended == ""
    told = [(row["version"], row["attempt"], row["outcome"], row["sources"]) for row in rows]
    assert told == [(1, 0, "failed", 2), (1, 1, "synced", 1), (2, 0, "synced", 2)]
    assert "t1: send_weights failed: PorterDied: porter (pid 7) was killed" in rows[0]["error"]
    assert sends(bench)[2:] == [("t0", ("n0:1",)), ("t0", ("n0:1",)), ("t1", ("n1:1",))]


def test_a_node_that_is_lost_while_it_sends_costs_no_version(tmp_path: Path) -> None:
    """The weights are out; that a rank is gone is for the next step to find."""

    async def lost(bench: RlBench) -> None:
        while not any(isinstance(body, SendWeights) for _, body in bench.asked):
            await bench.clock.sleep_ns(NS_PER_MS)
        bench.lose("t1")

    bench, rows, ended = synced(tmp_path, lost)
    assert [(row["version"], row["outcome"], row["sources"]) for row in rows] == [
        (1, "failed", 2),
        (1, "synced", 1),
    ]
    assert rows[0]["error"] == "t1: no beat for 3 s"
    assert {bench.nodes[name].files[f"{name}/1"] for name in ("n0", "n1")} == {1}
    assert ended == "t1: no beat for 3 s"


def test_a_child_that_fails_is_not_its_sources_fault(tmp_path: Path) -> None:
    async def fails(bench: RlBench) -> None:
        bench.fail("t1", SendWeights, Failure(error="ChildLost", text="n1:1 stood still"))

    _, rows, ended = synced(tmp_path, fails)
    assert ended == ""
    assert [(row["outcome"], row["sources"]) for row in rows] == [
        ("failed", 2),
        ("synced", 2),
        ("synced", 2),
    ]


def test_when_all_sources_died_they_are_tried_again(tmp_path: Path) -> None:
    async def die(bench: RlBench) -> None:
        for node in ("t0", "t1"):
            bench.fail(node, SendWeights, DEAD)

    _, rows, ended = synced(tmp_path, die)
    assert ended == ""
    assert [row["outcome"] for row in rows][-2:] == ["synced"] * 2


def test_a_receiver_that_is_lost_leaves_its_source_idle(tmp_path: Path) -> None:
    async def lost(bench: RlBench) -> None:
        while not bench.kept:
            await bench.clock.sleep_ns(NS_PER_MS)
        bench.lose("n1")

    bench, rows, ended = synced(
        tmp_path, lost, step=Rl(steps=3, policies=("static:2xTP1",), sync="pairs")
    )
    assert ended == ""
    assert (rows[-1]["outcome"], rows[-1]["sources"], rows[-1]["receivers"]) == ("synced", 1, 1)
    assert sends(bench)[-1] == ("t0", ("n0:1",))


def test_files_that_differ_are_not_sent(tmp_path: Path) -> None:
    async def differ(bench: RlBench) -> None:
        node, publish = bench.nodes["t1"], bench.nodes["t1"].publish

        async def another(message: PublishWeights) -> Any:
            answer = await publish(message)
            assert isinstance(answer, WeightsPublished)
            return WeightsPublished(
                version=answer.version, path=answer.path, bytes=answer.bytes, checksum=7, spans=()
            )

        node.publish = another

    bench, rows, ended = synced(tmp_path, differ)
    assert rows == []
    assert sends(bench) == []
    assert ended == "t1: weights 1 are not those of t0: their files have other checksums"
