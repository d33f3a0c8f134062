"""Weights on their way from node to node in virtual time: chains, trees, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labour_world import ask, virtually, world

from harness.bench.simulated.porter import PORT, NotOpen, Porter
from harness.bench.simulated.world import World
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.intake import Refused
from harness.run.rl.edges import Edge, children_of, edges_of
from harness.wire.messages import Failure
from harness.wire.weights import (
    ClosePorter,
    ExpectWeights,
    ForgetWeights,
    OpenPorter,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)

MB = 10**6
CHECKSUM = 4711
SOURCE = "trained/7.safetensors"


class Line:
    """Porters on all nodes; ``n0`` has the weights of version 7."""

    def __init__(self, nodes: int, size_bytes: int = 100 * MB, **sync: float) -> None:
        self.world: World = world(nodes, sync={"carry_gb_per_s": 1e12, **sync})
        self.size_bytes = size_bytes
        self.porters = {name: Porter(self.world, name) for name in self.world.bench.nodes}
        self.world.shared["weights", "n0", SOURCE] = (7, size_bytes, CHECKSUM)

    async def open(self) -> Line:
        for name, porter in self.porters.items():
            await ask(porter, OpenPorter(address=name))
        return self

    @staticmethod
    def listen(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{name}:{PORT}" for name in names)

    def expect(self, node: str, edges: Sequence[Edge], **changes: Any) -> asyncio.Task[Any]:
        body = ExpectWeights(
            transfer=changes.get("transfer", "t"), version=changes.get("version", 7),
            children=self.listen(children_of(node, edges)),
        )  # fmt: skip
        return asyncio.create_task(ask(self.porters[node], body))

    def send(self, edges: Sequence[Edge], bucket_bytes: int = 10 * MB) -> asyncio.Task[Any]:
        body = SendWeights(
            transfer="t", version=7, path=SOURCE, bucket_bytes=bucket_bytes,
            children=self.listen(children_of("n0", edges)), stall_ns=NS_PER_S,
        )  # fmt: skip
        return asyncio.create_task(ask(self.porters["n0"], body))

    def file(self, node: str, version: int = 7) -> tuple[int, int, int] | None:
        found: tuple[int, int, int] | None = self.world.shared.get(
            ("weights", node, f"weights/{version}.safetensors")
        )
        return found

    @property
    def now_ns(self) -> int:
        return self.world.clock.now_ns()


def carried_ns(
    nodes: int, edges: Sequence[Edge], bucket_bytes: int = 10 * MB, **given: Any
) -> tuple[int, WeightsSent, dict[str, WeightsArrived]]:
    """Carry the weights along edges; return how long that took, and the answers."""

    async def test() -> tuple[int, WeightsSent, dict[str, WeightsArrived]]:
        line = await Line(nodes, **given).open()
        expects = {name: line.expect(name, edges) for _, name in edges}
        sent = await line.send(edges, bucket_bytes)
        arrived = {name: await expect for name, expect in expects.items()}
        assert all(line.file(name) == (7, line.size_bytes, CHECKSUM) for name in expects)
        return line.now_ns, sent, arrived

    return virtually(test())


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(1, count + 1)]


# -- how long it takes ----------------------------------------------------------------------------


@pytest.mark.parametrize("receivers", [1, 2, 7, 40])
def test_each_hop_of_a_chain_adds_one_bucket(receivers: int) -> None:
    edges = edges_of(["n0"], names(receivers), "chain")
    took_ns, sent, arrived = carried_ns(receivers + 1, edges)
    # 100 MB at 1 GB/s, in buckets of 10 MB
    assert took_ns == 100 * NS_PER_MS + (receivers - 1) * 10 * NS_PER_MS
    assert (sent.buckets, sent.moved_bytes, sent.checksum) == (10, 100 * MB, CHECKSUM)
    assert [span.stage for span in sent.spans] == ["send"]
    assert sent.spans[0].end_ns == 100 * NS_PER_MS, "it hears of its child and nobody else"
    for hop, name in enumerate(names(receivers)):
        receive = arrived[name].spans[0]
        assert receive.stage == "receive"
        assert receive.end_ns == (100 + 10 * hop) * NS_PER_MS


def test_a_tree_is_as_deep_as_its_branches() -> None:
    edges = edges_of(["n0"], names(7), "tree")
    took_ns, _, arrived = carried_ns(8, edges)
    # the fake network has a node's hops not see each other: three levels
    assert took_ns == (100 + 2 * 10) * NS_PER_MS
    stages = [[span.stage for span in arrived[name].spans] for name in ("n1", "n7")]
    assert stages == [["receive", "verify", "forward"], ["receive", "verify"]]


def test_a_slow_host_sets_the_pace_and_verifies_each_bucket_before_it_goes_on() -> None:
    edges = edges_of(["n0"], names(3), "chain")
    took_ns, _, arrived = carried_ns(4, edges, carry_gb_per_s=0.5, bucket_us=1000)
    # a bucket takes the network 10 ms and the host 21; the last one is verified by each hop
    pace_ns, hop_ns = 21 * NS_PER_MS, (21 + 10) * NS_PER_MS
    assert took_ns == pytest.approx(9 * pace_ns + 3 * hop_ns, abs=10)
    first = arrived["n1"].spans[1]
    assert first.stage == "verify"
    assert first.end_ns - first.begin_ns == pytest.approx(21 * NS_PER_MS, abs=2)


def test_connecting_takes_its_time_and_the_next_hop_connects_meanwhile() -> None:
    edges = edges_of(["n0"], names(2), "chain")
    assert carried_ns(3, edges, carry_fixed_s=0.008)[0] == (8 + 100 + 10) * NS_PER_MS
    assert carried_ns(3, edges, carry_fixed_s=0.030)[0] == (2 * 30 + 100) * NS_PER_MS


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 3 * MB),
    bucket=st.integers(1000, 2 * MB),
    receivers=st.integers(1, 5),
    host=st.sampled_from([0.3, 1.0, 50.0]),
)
def test_a_chain_takes_what_buckets_one_by_one_take(
    size: int, bucket: int, receivers: int, host: float
) -> None:
    edges = edges_of(["n0"], names(receivers), "chain")
    took_ns, _, _ = carried_ns(
        receivers + 1, edges, bucket, size_bytes=size, carry_gb_per_s=host, bucket_us=40
    )
    buckets = [min(bucket, size - begin) for begin in range(0, size, bucket)]
    there = [0.0] * len(buckets)  # when each bucket is verified at the node before
    for _ in range(receivers):
        wire = verified = 0.0
        for number, length in enumerate(buckets):
            wire = max(wire, there[number]) + length
            verified = max(verified, wire) + length / host + 40_000
            there[number] = verified
    shorter = bucket - min(buckets[-1], bucket)
    slack = receivers * shorter / host  # hosts verify as if all buckets were alike
    assert took_ns == pytest.approx(there[-1], abs=slack + 20 * receivers)


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_child_that_does_not_listen_is_named_and_others_get_all() -> None:
    async def test() -> None:
        line = await Line(3).open()
        edges = [("n0", "n1"), ("n0", "n2")]
        arriving = line.expect("n1", edges)
        await ask(line.porters["n2"], ClosePorter())
        sent = await line.send(edges)
        assert isinstance(sent, Failure)
        assert sent.error == "ChildLost"
        assert sent.text.startswith(f"n2:{PORT}: [Errno 111] Connection refused; it had 0 of 10")
        assert isinstance(await arriving, WeightsArrived)

    virtually(test())


def test_a_child_that_nothing_reaches_is_given_up_after_a_while() -> None:
    async def test() -> None:
        line = await Line(2).open()
        network: Any = line.world.network
        network.carry = lambda _flows: asyncio.Event().wait()
        network.stands_still = lambda _from, _to, for_ns: line.world.clock.sleep_ns(for_ns)
        edges = edges_of(["n0"], ["n1"], "chain")
        expect, sent = line.expect("n1", edges), await line.send(edges)
        assert line.now_ns == NS_PER_S
        assert sent.text == f"n1:{PORT}: stood still for 1 s; it had 0 of 10 buckets"
        assert (await expect).error == "ParentLost"

    virtually(test())


def test_a_node_that_expects_nothing_sends_the_sender_away_after_a_while() -> None:
    async def test() -> None:
        line = await Line(2).open()
        sent = await line.send([("n0", "n1")])
        assert "this node does not expect that transfer" in sent.text
        assert line.now_ns == 5 * NS_PER_S
        sending = line.send([("n0", "n1")])
        await line.world.clock.sleep_ns(4 * NS_PER_S)
        arriving = line.expect("n1", [])
        assert isinstance(await sending, WeightsSent)
        assert isinstance(await arriving, WeightsArrived)

    virtually(test())


def test_another_version_than_the_expected_one_is_refused() -> None:
    async def test() -> None:
        line = await Line(2).open()
        arriving = line.expect("n1", [], version=8)
        assert "version 7 was sent; 8 is expected" in (await line.send([("n0", "n1")])).text
        assert (await arriving).error == "WrongVersion"

    virtually(test())


def test_what_is_superseded_on_its_way_breaks_off_above_and_below() -> None:
    async def test() -> None:
        line = await Line(4).open()
        edges = edges_of(["n0"], names(3), "chain")
        first, second, third = (line.expect(name, edges) for name in names(3))
        sending = line.send(edges)
        await line.world.clock.sleep_ns(55 * NS_PER_MS)
        again = line.expect("n2", edges, transfer="u")
        assert (await second).error == "Superseded"
        assert (await first).error == "ChildLost"
        assert (await third).error == "ParentLost"
        assert isinstance(await sending, WeightsSent), "its own child has all"
        assert line.file("n1") is not None
        assert line.file("n2") is line.file("n3") is None
        await ask(line.porters["n2"], ClosePorter())
        assert (await again).error == "Closed"

    virtually(test())


def test_a_sender_that_is_closed_loses_all_below() -> None:
    async def test() -> None:
        line = await Line(3).open()
        edges = edges_of(["n0"], names(2), "chain")
        first, second = (line.expect(name, edges) for name in names(2))
        sending = line.send(edges)
        await line.world.clock.sleep_ns(35 * NS_PER_MS)
        await ask(line.porters["n0"], ClosePorter())
        assert [(await answer).error for answer in (sending, first, second)] == [
            "Closed", "ParentLost", "ParentLost",
        ]  # fmt: skip
        assert line.now_ns == 35 * NS_PER_MS

    virtually(test())


def test_files_stay_until_nobody_needs_them() -> None:
    async def test() -> None:
        line = await Line(2).open()
        arriving = line.expect("n1", [])
        await line.send([("n0", "n1")])
        assert (await arriving).path == "weights/7.safetensors"
        await ask(line.porters["n1"], ForgetWeights(keep_from=7))
        assert line.file("n1")
        await ask(line.porters["n1"], ForgetWeights(keep_from=8))
        assert line.file("n1") is None
        body = SendWeights(
            transfer="t", version=7, path="gone", children=(), bucket_bytes=1, stall_ns=1
        )
        assert (await ask(line.porters["n0"], body)).error == "NoFile"

    virtually(test())


def test_a_porter_is_opened_once_and_asked_only_then() -> None:
    async def test() -> None:
        line = Line(2)
        with pytest.raises(NotOpen):
            await line.expect("n1", [])
        await line.open()
        assert (await ask(line.porters["n1"], OpenPorter(address="n1"))).listen == f"n1:{PORT}"
        with pytest.raises(Refused, match="close it first"):
            await ask(line.porters["n1"], OpenPorter(address="n9"))

    virtually(test())
