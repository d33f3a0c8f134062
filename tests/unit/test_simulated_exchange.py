"""Collectives as flows over a simulated bench; what is alike is worked out once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labour_world import Wires, calibration, virtually
from msgspec.structs import replace

from harness.bench.simulated.exchange import Exchanges, interconnect_of
from harness.bench.simulated.world import Flow, World
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Links, Node, Tor
from harness.model.scenario import Op
from harness.model.simulation import Backend, Figure
from harness.rlsim.collectives import stages
from harness.virtual import VirtualClock

GPUS = 4
OPS: tuple[Op, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv",
)  # fmt: skip


def railed(nodes: int, backend: Backend = "nccl") -> World:
    """Nodes of four GPUs, each two of which share a NIC, on a ToR of its own."""
    bench = Bench(
        name="railed", world="simulated", tors={"t0": Tor(), "t1": Tor()},
        nodes={f"n{i}": Node(rails=("t0", "t1"), gpus=GPUS) for i in range(nodes)},
        links=Links(link_mbit_per_s=8000.0),
    )  # fmt: skip
    clock = VirtualClock()
    figures = calibration(backend, collectives={"step_us": 10, "copy_ns_per_kb": 5})
    return World(bench, topology_of(bench), clock, figures, Wires(clock))


def exchanges(world: World) -> Exchanges:
    places = [(node, gpu) for node in world.bench.nodes for gpu in range(GPUS)]
    return Exchanges(world, interconnect_of(world, "H800"), places)


@settings(max_examples=150, deadline=None)
@given(
    op=st.sampled_from(OPS),
    backend=st.sampled_from(["gloo", "nccl"]),
    ranks=st.lists(st.integers(0, 3 * GPUS - 1), min_size=2, max_size=9, unique=True),
    size=st.sampled_from([1_000, 64_000, 50_000_000]),
    times=st.integers(1, 4),
)
def test_groups_do_what_their_own_places_say(
    op: Op, backend: Backend, ranks: list[int], size: int, times: int
) -> None:
    world = railed(3, backend)
    found = exchanges(world)
    found.of(op, (tuple(range(len(ranks))),), size)  # another group before it, alike or not
    places = [(f"n{rank // GPUS}", rank % GPUS) for rank in ranks]
    planned = stages(op, size, places, interconnect_of(world, "H800"))
    exchange = found.of(op, (tuple(ranks),), size, times=times)
    assert len(exchange.stages) == len(planned.stages)
    for got, wanted in zip(exchange.stages, planned.stages, strict=True):
        assert (got.latency_ns, got.local_ns) == (
            wanted.latency_ns * times, wanted.local_ns * times,
        )  # fmt: skip
        sent: dict[tuple[str, str, int | None], float] = {}
        for sender, receiver, hop_bytes in wanted.flows:
            rail = None if backend == "gloo" else places[receiver][1] // 2
            way = places[sender][0], places[receiver][0], rail
            sent[way] = sent.get(way, 0.0) + hop_bytes * times
        assert {flow[:2] + flow[3:]: flow.bytes for flow in got.flows} == pytest.approx(sent)
    assert exchange.is_local == (len({node for node, _ in places}) == 1)


def test_rings_of_gpus_go_over_the_rails_beside_them() -> None:
    world = railed(2)
    groups = tuple((gpu, GPUS + gpu) for gpu in range(GPUS))
    (stage,) = exchanges(world).of("all_gather", groups, 10**8).stages
    ways = {(flow.source, flow.target, flow.nic) for flow in stage.flows}
    assert ways == {(a, b, nic) for a, b in (("n0", "n1"), ("n1", "n0")) for nic in (0, 1)}
    # half of each ring's bytes passes each way; two GPUs share a rail
    assert [flow.bytes for flow in stage.flows] == pytest.approx([10**8] * 4, rel=0.1)


def test_latency_is_charged_once_where_that_of_nccl_has_the_networks() -> None:
    def latencies_ns(group: tuple[int, ...], latency_us: float, backend: Backend) -> int:
        world = railed(2, backend)
        network = replace(world.figures.network, latency_us=Figure(value=latency_us))
        world.figures = replace(world.figures, network=network)
        (stage, *_) = exchanges(world).of("all_reduce", (group,), 1000).stages
        return stage.latency_ns

    across, within = (0, 4), (0, 1)
    assert latencies_ns(across, 0, "nccl") - latencies_ns(across, 5, "nccl") == 5_000
    assert latencies_ns(across, 1e6, "nccl") == 0
    assert latencies_ns(within, 5, "nccl") == latencies_ns(within, 0, "nccl")
    assert latencies_ns(across, 5, "gloo") == latencies_ns(across, 0, "gloo")


@pytest.mark.parametrize("op", OPS)
def test_so_many_times_on_end_take_as_long_as_one_by_one(op: Op) -> None:
    async def took_ns(each: int, count: int) -> int:
        world = railed(2, "gloo")
        exchange = exchanges(world).of(op, ((0, 1, 4, 5),), 10**6, times=each)
        over_ns = 0
        for _ in range(count):
            over_ns = await exchange.done(world, over_ns)
            await world.clock.sleep_ns(over_ns - world.clock.now_ns())
        return world.clock.now_ns()

    assert virtually(took_ns(12, 1)) == pytest.approx(virtually(took_ns(1, 12)), rel=1e-6)


def test_what_nodes_do_within_goes_on_beside_the_flows() -> None:
    async def test() -> None:
        world = railed(2, "gloo")
        assert isinstance(world.network, Wires)
        exchange = exchanges(world).of("send_recv", ((0, 4),), 10**6, one_way=True)
        assert exchange.stages[0].flows == (Flow("n0", "n1", 10**6),)
        # one step; then a million bytes at 1 GB/s, or copying them at 5 ns a thousand
        assert await exchange.done(world, 0) == 10_000 + 10**6
        world.network.gb_per_s = 1e9
        now_ns = world.clock.now_ns()
        assert await exchange.done(world, now_ns) == now_ns + 10_000 + 5_000

    virtually(test())
