"""Orders that are not done in time: what a simulated bench answers then, and that it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from generation_world import SPEC
from labour_world import calibration, virtually
from test_simulated_training import spec, train_step

from harness.bench.simulated import bench as simulated
from harness.bench.simulated.bench import SimulatedBench, open_simulated
from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Links, Node, Tor
from harness.model.layout import parse_layout
from harness.model.placement import place
from harness.virtual import VirtualClock
from harness.wire.asks import CommandFailed
from harness.wire.generation import (
    Build,
    Built,
    GenerationOpen,
    Happened,
    OpenGeneration,
    UpdateWeights,
    Watch,
    WeightsUpdated,
)
from harness.wire.messages import Done, Failure, Hold, Message
from harness.wire.training import CloseTraining, OpenTraining, Trained, TrainingOpen
from harness.wire.weights import (
    ExpectWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)

MB = 1_000_000
LIMIT_NS = 2 * NS_PER_S
SOURCE = "trained/7.safetensors"


def on_bench(test: Callable[[SimulatedBench], Awaitable[None]], **tables: dict[str, float]) -> None:
    """Have it on two nodes at 1 Gbit/s that one ToR joins; messages take no time."""
    bench = Bench(
        name="two", world="simulated", tors={"t0": Tor()}, links=Links(link_mbit_per_s=1000.0),
        nodes={f"n{i}": Node(tor="t0", emulated_gpus=1) for i in range(2)},
    )  # fmt: skip

    async def main() -> None:
        figures = calibration(**{"network": {"link_share": 1.0}, **tables})
        opened = open_simulated(bench, topology_of(bench), figures, VirtualClock(), 1)
        async with opened as running:
            await test(running)

    virtually(main())


async def failed(work: Awaitable[Any]) -> dict[str, Failure]:
    """Return what agents answered."""
    with pytest.raises(CommandFailed) as caught:
        await work
    return caught.value.failures


# -- weights ---------------------------------------------------------------------------------------


async def porters(bench: SimulatedBench, size_bytes: int) -> tuple[str, ...]:
    bench.world.shared["weights", "n0", SOURCE] = (7, size_bytes, 4711)
    for node in ("n0", "n1"):
        opened = await bench.ask(node, OpenPorter(address=node), PorterOpen, LIMIT_NS)
    return (opened.listen,)


def sending(children: tuple[str, ...], transfer: str = "t") -> SendWeights:
    return SendWeights(
        transfer=transfer, version=7, path=SOURCE, bucket_bytes=10 * MB, children=children,
        stall_ns=NS_PER_S,
    )  # fmt: skip


def expecting(transfer: str = "t") -> ExpectWeights:
    return ExpectWeights(transfer=transfer, version=7, children=())


def test_weights_that_nobody_sends_are_late_and_can_come_later() -> None:
    async def test(bench: SimulatedBench) -> None:
        children = await porters(bench, 100 * MB)
        late = await failed(bench.ask("n1", expecting(), WeightsArrived, LIMIT_NS))
        text = "nobody sent anything by the deadline"
        assert late == {"n1": Failure(error="Late", text=text)}
        assert bench.clock.now_ns() == LIMIT_NS
        sent, arrived = await asyncio.gather(
            bench.ask("n0", sending(children, "again"), WeightsSent, LIMIT_NS),
            bench.ask("n1", expecting("again"), WeightsArrived, LIMIT_NS),
        )
        assert (sent.checksum, arrived.checksum) == (4711, 4711)

    on_bench(test, sync={"carry_gb_per_s": 1e12})


def test_weights_under_way_at_the_deadline_are_given_up_at_both_ends() -> None:
    async def test(bench: SimulatedBench) -> None:
        children = await porters(bench, 1000 * MB)  # takes 8 s
        at_sender, at_receiver = await asyncio.gather(
            failed(bench.ask("n0", sending(children), WeightsSent, LIMIT_NS)),
            failed(bench.ask("n1", expecting(), WeightsArrived, LIMIT_NS)),
        )
        assert bench.clock.now_ns() == LIMIT_NS
        assert at_sender["n0"].error == "ChildLost"
        assert at_sender["n0"].text.startswith(f"{children[0]}: ")
        assert "by the deadline" in at_sender["n0"].text
        assert at_receiver["n1"].error in ("Late", "ParentLost")
        begin_ns = bench.clock.now_ns()
        bench.world.shared["weights", "n0", SOURCE] = (7, 100 * MB, 4711)
        await asyncio.gather(
            bench.ask("n0", sending(children, "again"), WeightsSent, LIMIT_NS),
            bench.ask("n1", expecting("again"), WeightsArrived, LIMIT_NS),
        )
        took_ns = bench.clock.now_ns() - begin_ns  # nothing of the first is on the network
        assert took_ns == pytest.approx(800 * NS_PER_MS, rel=1e-4)

    on_bench(test, sync={"carry_gb_per_s": 1e12})


# -- training --------------------------------------------------------------------------------------


def test_a_step_that_others_never_take_ends_the_ranks_which_can_be_opened_anew() -> None:
    async def test(bench: SimulatedBench) -> None:
        async def open_(attempt: int) -> None:
            bodies = {
                f"n{rank}": OpenTraining(
                    spec=spec("DP2"), ranks=(rank,), world_size=2, store="s:1", address="s",
                    interface="e", attempt=attempt, timeout_ns=LIMIT_NS,
                )
                for rank in range(2)
            }  # fmt: skip
            await bench.ask_all(bodies, TrainingOpen, LIMIT_NS)

        await open_(0)
        begin_ns = bench.clock.now_ns()
        late = await failed(bench.ask("n1", train_step(), Trained, LIMIT_NS))
        assert bench.clock.now_ns() - begin_ns == LIMIT_NS
        assert (late["n1"].error, late["n1"].ranks) == ("OrderExpired", (1,))
        assert late["n1"].text.startswith("train_step was not done in time: n1 waits")
        await bench.ask_all(dict.fromkeys(("n0", "n1"), CloseTraining()), Done, LIMIT_NS)
        await open_(1)
        both = dict.fromkeys(("n0", "n1"), train_step())
        assert len(await bench.ask_all(both, Trained, 3600 * NS_PER_S)) == 2
        assert not bench.world._meetings

    on_bench(test)


# -- generation ------------------------------------------------------------------------------------


async def instances(bench: SimulatedBench) -> Any:
    opening = OpenGeneration(spec=SPEC, gpus=1, address="n0")
    await bench.ask("n0", opening, GenerationOpen, 3600 * NS_PER_S)
    return place(parse_layout("1xTP1"), {"n0": 1})["n0"]


def test_a_build_that_is_late_leaves_nothing_and_can_be_asked_for_again() -> None:
    async def test(bench: SimulatedBench) -> None:
        build = Build(instances=await instances(bench), strategy="rebuild", version=0)
        late = await failed(bench.ask("n0", build, Built, LIMIT_NS))
        assert late["n0"] == Failure(
            error="OrderExpired", text="build_engines was not done in time"
        )
        assert (await bench.ask("n0", Watch(after=0, wait_ns=0), Happened, LIMIT_NS)).dead == {}
        await bench.ask("n0", build, Built, 10 * NS_PER_S)

    on_bench(test, generation={"weights_fixed_s": 5.0})


def test_an_engine_that_is_late_with_its_weights_is_dead() -> None:
    async def test(bench: SimulatedBench) -> None:
        (one,) = await instances(bench)
        build = Build(instances=(one,), strategy="rebuild", version=0)
        await bench.ask("n0", build, Built, LIMIT_NS)
        update = UpdateWeights(instances=(one.name,), version=1)
        late = await failed(bench.ask("n0", update, WeightsUpdated, LIMIT_NS))
        assert late["n0"].error == "OrderExpired"
        happened = await bench.ask("n0", Watch(after=0, wait_ns=0), Happened, LIMIT_NS)
        assert happened.dead == {one.name: "an order was not done in time"}

    on_bench(test, sync={"load_fixed_s": 5.0})


# -- all others ------------------------------------------------------------------------------------


class Hanging:
    """A labour that never answers."""

    def __init__(self, *_: object) -> None:
        pass

    def verbs(self) -> Any:
        return {Hold: self.hang}

    async def hang(self, _asked: Message) -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    def close(self) -> None:
        pass


def test_who_minds_no_deadline_is_cut_off_a_second_later(monkeypatch: Any) -> None:
    async def test(bench: SimulatedBench) -> None:
        late = await failed(bench.ask("n0", Hold(), Done, LIMIT_NS))
        text = "hold was not done at its deadline"
        assert late == {"n0": Failure(error="Expired", text=text)}
        assert bench.clock.now_ns() == LIMIT_NS + NS_PER_S

    monkeypatch.setattr(simulated, "LABOURS", (Hanging,))
    on_bench(test)
