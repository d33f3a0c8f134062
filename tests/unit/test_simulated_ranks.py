"""Ranks of collectives in virtual time: their groups, what they time, and traffic that is held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from labour_world import Wires, ask, ask_all, virtually, world
from msgspec import structs

from harness.bench.simulated.ranks import Ranks
from harness.bench.simulated.world import World
from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from harness.errors import UsageError
from harness.model.busbw import busbw_gb_per_s
from harness.model.scenario import Op
from harness.wire.messages import (
    DestroyGroups,
    Done,
    EndTraffic,
    Failure,
    Groups,
    Hold,
    MakeGroups,
    RankSamples,
    RanksReady,
    Resume,
    Resumed,
    RunCollective,
    StartRanks,
    StartTraffic,
    StopAt,
    StopRanks,
    TrafficSoFar,
)

LIMIT_NS = 60 * NS_PER_S
ALL_REDUCE = StartTraffic(op="all_reduce", size_bytes=4 * 10**6, dtype="int32", timeout_ns=LIMIT_NS)
ITERATION_NS = 6 * NS_PER_MS
"""2 x 3 / 4 of 4 MB at 1 GB/s."""


class Pool:
    """Nodes with as many ranks each."""

    def __init__(self, of: World, each: int = 1) -> None:
        self.world, self.each = of, each
        self.nodes = [Ranks(of, name) for name in of.bench.nodes]
        self.generation = 0

    def groups(self, *subgroups: tuple[int, ...]) -> Groups:
        self.generation += 1
        return Groups(
            generation=self.generation, world_size=len(self.nodes) * self.each, store="a:1",
            interface="eth0", subgroups=subgroups, timeout_ns=LIMIT_NS,
        )  # fmt: skip

    def start(self, node: int, groups: Groups, **env: str) -> StartRanks:
        ranks = tuple(range(node * self.each, (node + 1) * self.each))
        return StartRanks(ranks=ranks, groups=groups, nccl_env=env)

    async def open(self, *subgroups: tuple[int, ...], **env: str) -> list[Any]:
        groups = self.groups(*subgroups)
        bodies = enumerate(self.nodes)
        return list(
            await asyncio.gather(*(ask(n, self.start(i, groups, **env)) for i, n in bodies))
        )

    async def run(self, op: Op, size_bytes: int, **changes: Any) -> list[RankSamples]:
        body = RunCollective(
            op=op, size_bytes=size_bytes, dtype="float32",
            iterations=changes.get("iterations", 3), warmup=1, verify=changes.get("verify", True),
            use_subgroups=changes.get("use_subgroups", False), timeout_ns=LIMIT_NS,
        )  # fmt: skip
        return [row for answer in await ask_all(self.nodes, body) for row in answer.ranks]

    @property
    def now_ns(self) -> int:
        return self.world.clock.now_ns()

    @property
    def wires(self) -> Wires:
        assert isinstance(self.world.network, Wires)
        return self.world.network


# -- groups ----------------------------------------------------------------------------------------


def test_ranks_start_meet_and_part() -> None:
    async def test() -> None:
        pool = Pool(world(2, generation={"processes_s": 2.0, "groups_s": 0.5}), each=2)
        ready: list[RanksReady] = await pool.open(NCCL_DEBUG="WARN")
        assert [r.ready_ns for r in ready] == [2_500_000_000] * 2
        assert [list(r.pids) for r in ready] == [[0, 1], [2, 3]]
        assert (ready[0].backend, ready[0].effective_env) == ("gloo", {"NCCL_DEBUG": "WARN"})
        busy = await ask(pool.nodes[0], pool.start(0, pool.groups()))
        assert (busy.error, busy.text) == ("Busy", "ranks 0, 1 are here already: stop them first")
        still = await ask_all(pool.nodes, MakeGroups(groups=pool.groups()))
        assert "generation 1 still stand" in still[0].text
        assert [type(d) for d in await ask_all(pool.nodes, DestroyGroups())] == [Done] * 2
        old = MakeGroups(groups=Groups(
            generation=1, world_size=4, store="a:1", interface="eth0", timeout_ns=LIMIT_NS
        ))  # fmt: skip
        assert [a.error for a in await ask_all(pool.nodes, old)] == ["Refused"] * 2
        begin_ns = pool.now_ns
        made = await ask_all(pool.nodes, MakeGroups(groups=pool.groups()))
        assert made[1].ready_ns - begin_ns == 500 * NS_PER_MS
        await ask_all(pool.nodes, StopRanks())
        assert (await ask(pool.nodes[0], Hold())).error == "NoRanks"
        await pool.open()

    virtually(test())


def test_a_node_that_never_comes_is_not_waited_for_for_ever() -> None:
    async def test() -> None:
        pool = Pool(world(2))
        alone = await ask(pool.nodes[0], pool.start(0, pool.groups()))
        assert isinstance(alone, Failure)
        assert alone.error == "CollectiveExpired"
        assert pool.now_ns == LIMIT_NS
        assert isinstance((await pool.open())[0], RanksReady)

    virtually(test())


def test_ranks_that_never_met_leave_nothing_to_those_after_them() -> None:
    async def test() -> None:
        pool = Pool(world(2))
        await ask(pool.nodes[0], pool.start(0, pool.groups(), NCCL_DEBUG="WARN"))
        groups = structs.replace(pool.groups(), world_size=1)  # other ranks, with other variables
        ready = await ask(pool.nodes[0], pool.start(0, groups, NCCL_DEBUG="INFO"))
        assert isinstance(ready, RanksReady)
        assert ready.effective_env == {"NCCL_DEBUG": "INFO"}

    virtually(test())


# -- collectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "ms"),
    [
        ("all_reduce", 2 * 3 / 4 * 80),
        ("reduce_scatter", 2 * 3 / 4 * 80),
        ("all_gather", 3 / 4 * 80),
        ("all_to_all", 3 / 4 * 80),
        ("send_recv", 80),
    ],
)
def test_each_operation_takes_what_gloo_sends(op: Op, ms: float) -> None:
    async def test() -> None:
        pool = Pool(world(4, collectives={"step_us": 100}))
        await pool.open()
        rows = await pool.run(op, 80 * 10**6)
        steps = {"all_reduce": 6, "reduce_scatter": 6, "send_recv": 1}.get(op, 3)
        wanted_ns = ms * NS_PER_MS + steps * 100 * NS_PER_US
        assert [row.rank for row in rows] == [0, 1, 2, 3]
        assert all(row.group == (0, 1, 2, 3) and row.wrong == 0 for row in rows)
        times = [time_ns for row in rows for time_ns in row.times_ns]
        assert times == pytest.approx([wanted_ns] * 12, rel=1e-6)
        # warmup, three iterations, and one that is verified
        assert pool.now_ns == pytest.approx(5 * wanted_ns, rel=1e-6)

    virtually(test())


def test_a_ring_of_nodes_reaches_the_rate_of_their_links_as_nccl_tests_counts_it() -> None:
    async def test() -> None:
        pool = Pool(world(4), each=2)
        await pool.open()
        (row, *_) = await pool.run("all_reduce", 8 * 10**8)
        assert busbw_gb_per_s("all_reduce", row.size_bytes, 8, row.times_ns[0]) == pytest.approx(1)

    virtually(test())


def test_sizes_are_rounded_and_what_is_left_of_nothing_is_not_timed() -> None:
    async def test() -> None:
        pool = Pool(world(3))
        await pool.open()
        rows = await pool.run("all_gather", 1000, verify=False)
        assert {(row.size_bytes, len(row.times_ns), row.wrong) for row in rows} == {(960, 3, None)}
        rows = await pool.run("all_gather", 32)
        assert {(row.size_bytes, row.times_ns, row.wrong) for row in rows} == {(0, (), None)}
        told = [pool.world.notes.get_nowait() for _ in pool.nodes]
        assert {agent for agent, _ in told} == {"n0", "n1", "n2"}
        assert all(note.level == "warning" and "size 0" in note.text for _, note in told)

    virtually(test())


def test_groups_that_are_apart_work_side_by_side_and_those_that_share_ranks_in_turn() -> None:
    async def test() -> None:
        pool = Pool(world(4))
        await pool.open((0, 1), (2, 3), (1, 2))
        rows = await pool.run("send_recv", 10**6, use_subgroups=True, iterations=1, verify=False)
        assert [(row.rank, row.group) for row in rows] == [
            (0, (0, 1)), (1, (0, 1)), (1, (1, 2)), (2, (2, 3)), (2, (1, 2)), (3, (2, 3)),
        ]  # fmt: skip
        begins = [at_ns for at_ns, _ in pool.wires.carried]  # a warmup and an iteration each
        assert begins == [0, 0, *(i * NS_PER_MS for i in (1, 1, 2, 3))]

    virtually(test())


def test_what_cannot_be_is_refused_on_every_node() -> None:
    async def test() -> None:
        pool = Pool(world(2))
        assert (await ask(pool.nodes[0], DestroyGroups())).error == "NoRanks"
        refused = await ask(pool.nodes[0], pool.start(0, pool.groups(), PATH="x"))
        assert refused.text == "not on the list of NCCL variables: ['PATH']"
        await pool.open((0,), (1,))
        body = RunCollective(
            op="send_recv", size_bytes=8, dtype="int32", iterations=1, warmup=0, verify=False,
            use_subgroups=True, timeout_ns=LIMIT_NS,
        )  # fmt: skip
        answers = await ask_all(pool.nodes, body)
        assert [a.text for a in answers] == ["send_recv needs two ranks or more"] * 2
        await ask_all(pool.nodes, DestroyGroups())
        assert [a.text for a in await ask_all(pool.nodes, ALL_REDUCE)] == [
            "there are no groups"
        ] * 2

    virtually(test())


def test_nccl_asks_which_gpus_it_joins_and_refuses_those_nobody_measured() -> None:
    async def opened(**said: str) -> list[Any]:
        pool = Pool(world(1, backend="nccl"))
        figures = pool.world.figures
        joined = structs.replace(figures.collectives, **said)
        pool.world.figures = structs.replace(figures, collectives=joined)
        return await pool.open()

    async def test() -> None:
        with pytest.raises(UsageError, match=r'calibration test has NCCL.*gpu = "h100"'):
            await opened()
        with pytest.raises(UsageError, match="nobody measured collectives on 't4'"):
            await opened(gpu="t4")
        assert [ready.backend for ready in await opened(gpu="h800")] == ["nccl"]

    virtually(test())


# -- traffic ---------------------------------------------------------------------------------------


def test_traffic_is_held_at_one_iteration_and_goes_on() -> None:
    async def test() -> None:
        pool = Pool(world(4))
        await pool.open()
        begin_ns = pool.now_ns
        done = await ask_all(pool.nodes, ALL_REDUCE)
        assert [d.t_ns - begin_ns for d in done] == [ITERATION_NS] * 4
        await pool.world.clock.sleep_ns(10 * ITERATION_NS + NS_PER_MS)
        held = [await ask(pool.nodes[0], Hold())]
        await pool.world.clock.sleep_ns(3 * ITERATION_NS)  # three others wait inside the next one
        held += await ask_all(pool.nodes[1:], Hold())
        entered = [h.entered[rank] for rank, h in enumerate(held)]
        assert entered == [12, 13, 13, 13]
        quiet = await ask_all(pool.nodes, StopAt(iteration=13))
        assert {q.last_good_ns[rank] for rank, q in enumerate(quiet)} == {pool.now_ns}
        await pool.world.clock.sleep_ns(NS_PER_S)
        assert len(pool.wires.carried) == 13
        times = (await ask(pool.nodes[2], TrafficSoFar(last=2))).times_ns[2]
        assert times[0] == ITERATION_NS
        assert times[1] > 3 * ITERATION_NS, "it waited inside"
        released_ns = pool.now_ns
        resumed: list[Resumed] = await ask_all(
            pool.nodes, Resume(reference_ns=ITERATION_NS, within_pct=10)
        )
        assert {r.released_ns[i] for i, r in enumerate(resumed)} == {released_ns}
        assert {r.first_good_ns[i] - released_ns for i, r in enumerate(resumed)} == {ITERATION_NS}
        assert {r.steady_ns[i] - released_ns for i, r in enumerate(resumed)} == {ITERATION_NS}
        assert pool.now_ns == released_ns + 3 * ITERATION_NS

    virtually(test())


def test_an_iteration_that_a_slow_network_stretches_is_the_longest_that_is_felt() -> None:
    async def test() -> None:
        pool = Pool(world(4))
        await pool.open()
        await ask_all(pool.nodes, ALL_REDUCE)
        pool.wires.gb_per_s = 0.1
        watch = Resume(reference_ns=ITERATION_NS, within_pct=10, watch_only=True)
        watching = asyncio.create_task(ask_all(pool.nodes, watch))
        await pool.world.clock.sleep_ns(2 * ITERATION_NS)
        pool.wires.gb_per_s = 1.0
        resumed = await watching
        assert [r.longest_ns[i] for i, r in enumerate(resumed)] == [10 * ITERATION_NS] * 4
        steady = {r.steady_ns[i] - r.released_ns[i] for i, r in enumerate(resumed)}
        assert steady == {(1 + 10 + 1) * ITERATION_NS}

    virtually(test())


def test_traffic_that_never_becomes_steady_is_told_before_nobody_waits_any_longer() -> None:
    async def test() -> None:
        pool = Pool(world(4))
        await pool.open()
        await ask_all(pool.nodes, ALL_REDUCE)
        begin_ns = pool.now_ns
        resumed = await ask_all(pool.nodes, Resume(reference_ns=NS_PER_MS, within_pct=10))
        assert [r.steady_ns[i] for i, r in enumerate(resumed)] == [0] * 4
        assert 0 < begin_ns + LIMIT_NS - pool.now_ns <= NS_PER_MS

    virtually(test())


def test_groups_are_made_anew_under_traffic_that_stands() -> None:
    async def test() -> None:
        pool = Pool(world(2))
        await pool.open()
        await ask_all(pool.nodes, ALL_REDUCE)
        busy = await ask_all(pool.nodes, DestroyGroups())
        assert [a.text for a in busy] == ["traffic is running: hold and stop it first"] * 2
        beyond = await ask(pool.nodes[0], StopAt(iteration=0))
        assert beyond.error == "Beyond"
        running = await ask(pool.nodes[0], EndTraffic())
        assert running.error == "Busy"
        held = await ask_all(pool.nodes, Hold())
        last = max(entered for answer in held for entered in answer.entered.values())
        await ask_all(pool.nodes, StopAt(iteration=last))
        await ask_all(pool.nodes, DestroyGroups())
        await ask_all(pool.nodes, MakeGroups(groups=pool.groups()))
        resumed = await ask_all(pool.nodes, Resume(reference_ns=NS_PER_S, within_pct=10))
        assert all(resumed[i].steady_ns[i] for i in range(2))
        held = await ask_all(pool.nodes, Hold())
        last = max(entered for answer in held for entered in answer.entered.values())
        await ask_all(pool.nodes, StopAt(iteration=last))
        assert [type(d) for d in await ask_all(pool.nodes, EndTraffic())] == [Done, Done]
        assert (await ask(pool.nodes[0], Hold())).error == "NoTraffic"
        assert [type(d) for d in await ask_all(pool.nodes, ALL_REDUCE)] == [Done, Done]

    virtually(test())
