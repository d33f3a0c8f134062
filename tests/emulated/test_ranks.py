"""Ranks on loopback, ordered about through `agents.ranks` without a wire in between."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agents.process import group_members
from agents.ranks import PROGRAM, Ranks
from harness.clock import NS_PER_S
from harness.model.busbw import counts
from harness.model.scenario import Op
from harness.processes import start_ticks
from harness.wire.messages import (
    DestroyGroups,
    Done,
    EndTraffic,
    Failure,
    Groups,
    Held,
    Hold,
    MakeGroups,
    Message,
    Note,
    Quiesced,
    RanksReady,
    Resume,
    Resumed,
    RunCollective,
    Samples,
    StartRanks,
    StartTraffic,
    StopAt,
    StopRanks,
    TrafficSoFar,
    TrafficTimes,
)

pytestmark = pytest.mark.emulated

ODD = (sys.executable, str(Path(__file__).with_name("odd_rank.py")))
LIMIT_NS = 10 * NS_PER_S
START_NS = 60 * NS_PER_S
"""For ranks to start: each imports torch, which takes its time on a machine that is busy."""


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    torch_distributed = pytest.importorskip("torch.distributed")
    served = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{served.port}"
    del served


class Bench:
    """A node's ranks and what a coordinator would say to them."""

    generation = 0

    def __init__(self, store: str, logs: Path, program: tuple[str, ...]) -> None:
        self.notes: list[Note] = []
        self.noted = asyncio.Event()
        self.ranks = Ranks(self.note, program=program, logs=logs)
        self.store = store
        self.pids: dict[int, int] = {}

    def note(self, note: Note) -> None:
        self.notes.append(note)
        self.noted.set()

    async def say(self, message: Message, limit_ns: int = LIMIT_NS) -> Message:
        handler = self.ranks.commands()[type(message)]
        async with asyncio.timeout(limit_ns / NS_PER_S + 1):
            return await handler(message, time.monotonic_ns() + limit_ns)

    def groups(self, world: int, *subgroups: tuple[int, ...]) -> Groups:
        Bench.generation += 1  # prefixes in the store are used once, by whichever test
        return Groups(
            generation=Bench.generation,
            world_size=world,
            store=self.store,
            interface="lo",
            subgroups=subgroups,
            timeout_ns=START_NS,
        )

    async def start(self, world: int, *subgroups: tuple[int, ...]) -> RanksReady:
        groups = self.groups(world, *subgroups)
        asked = StartRanks(ranks=tuple(range(world)), groups=groups)
        ready = await self.say(asked, START_NS)
        assert isinstance(ready, RanksReady), ready
        self.pids = ready.pids
        return ready


@asynccontextmanager
async def opened(
    store: str, tmp_path: Path, program: tuple[str, ...] = PROGRAM
) -> AsyncIterator[Bench]:
    bench = Bench(store, tmp_path, program)
    try:
        yield bench
    finally:
        await bench.ranks.close()
        for pid in bench.pids.values():
            assert group_members(pid) == []
            assert start_ticks(pid) is None


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await test

    asyncio.run(bounded())


def collective(op: Op, size: int, **more: Any) -> RunCollective:
    fields = {"dtype": "float32", "iterations": 3, "warmup": 1, "verify": True, **more}
    return RunCollective(op=op, size_bytes=size, timeout_ns=LIMIT_NS, **fields)


OPS: tuple[Op, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)


def test_every_operation_verifies_in_every_type_and_group(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            ready = await bench.start(3, (0, 1), (1, 2))
            assert ready.backend == "gloo"
            assert ready.effective_env["GLOO_SOCKET_IFNAME"] == "lo"
            for op in OPS:
                for dtype in ("float32", "float16", "bfloat16", "int32"):
                    found = await bench.say(collective(op, 10_000, dtype=dtype))
                    assert isinstance(found, Samples), found
                    assert [row.rank for row in found.ranks] == [0, 1, 2]
                    for row in found.ranks:
                        assert row.wrong == 0, (op, dtype)
                        assert len(row.times_ns) == 3
                        assert row.size_bytes == counts(op, 10_000, 3, dtype).size_bytes
                found = await bench.say(collective(op, 4096, use_subgroups=True))
                assert isinstance(found, Samples), found
                places = sorted((row.group, row.rank) for row in found.ranks)
                assert places == [((0, 1), 0), ((0, 1), 1), ((1, 2), 1), ((1, 2), 2)]
                assert all(row.wrong == 0 for row in found.ranks)
            small = await bench.say(collective("all_gather", 40))
            assert isinstance(small, Samples)
            assert {(row.size_bytes, row.times_ns, row.wrong) for row in small.ranks} == {
                (0, (), None)
            }
            assert "size 0" in bench.notes[-1].text

    run(test())


def test_one_spoilt_element_is_counted_by_whoever_gets_it(
    store: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("ODD_RANK", "0:spoils")
    wrong = {
        "all_reduce": [1, 1],
        "all_gather": [1, 1],
        "broadcast": [1, 1],
        "reduce_scatter": [1, 0],
        "all_to_all": [1, 0],
        "send_recv": [0, 1],
    }

    async def test() -> None:
        async with opened(store, tmp_path, ODD) as bench:
            await bench.start(2)
            for op in OPS:
                found = await bench.say(collective(op, 4096))
                assert isinstance(found, Samples), found
                assert [row.wrong for row in found.ranks] == wrong[op], op

    run(test())


async def _hold_and_stop(bench: Bench) -> tuple[Held, Quiesced]:
    held = await bench.say(Hold())
    assert isinstance(held, Held), held
    furthest = max(held.entered.values())
    assert furthest - min(held.entered.values()) <= 1
    stood = await bench.say(StopAt(iteration=furthest))
    assert isinstance(stood, Quiesced), stood
    return held, stood


def _traffic(size: int = 4096) -> StartTraffic:
    return StartTraffic(op="all_reduce", size_bytes=size, dtype="float32", timeout_ns=LIMIT_NS)


def test_traffic_is_held_and_resumed_hundreds_of_times(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            assert isinstance(await bench.say(_traffic()), Done)
            for _ in range(300):
                _, stood = await _hold_and_stop(bench)
                still = await bench.say(Hold())
                assert isinstance(still, Held)
                assert len(set(still.entered.values())) == 1, "all stand after the same iteration"
                assert isinstance(await bench.say(StopAt(iteration=still.entered[0])), Quiesced)
                resumed = await bench.say(Resume(reference_ns=NS_PER_S, within_pct=10.0))
                assert isinstance(resumed, Resumed), resumed
                for rank in (0, 1):
                    assert stood.last_good_ns[rank] < resumed.released_ns[rank]
                    assert resumed.released_ns[rank] < resumed.first_good_ns[rank]
                    assert resumed.first_good_ns[rank] == resumed.steady_ns[rank]
                    assert resumed.longest_ns[rank] > 0
            times = await bench.say(TrafficSoFar(last=20))
            assert isinstance(times, TrafficTimes)
            assert {rank: len(took) for rank, took in times.times_ns.items()} == {0: 20, 1: 20}
            busy = await bench.say(EndTraffic())
            assert isinstance(busy, Failure)
            assert busy.error == "Busy"
            await _hold_and_stop(bench)
            assert isinstance(await bench.say(EndTraffic()), Done)

    run(test())


def test_a_held_rank_beyond_the_agreed_iteration_says_so(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            await bench.say(_traffic())
            held, _ = await _hold_and_stop(bench)
            beyond = await bench.say(StopAt(iteration=min(held.entered.values()) - 1))
            assert isinstance(beyond, Failure)
            assert (beyond.error, beyond.ranks) == ("Beyond", (0, 1))

    run(test())


def test_resume_answers_at_its_deadline_when_the_traffic_is_slow(store: str, tmp_path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            await bench.say(_traffic())
            watched = await bench.say(
                Resume(reference_ns=1, within_pct=10.0, watch_only=True), NS_PER_S // 3
            )
            assert isinstance(watched, Resumed), watched
            assert watched.steady_ns == {0: 0, 1: 0}
            assert all(watched.first_good_ns.values())

    run(test())


def test_a_rank_whose_answer_is_slow_to_come_is_not_killed_for_it(
    store: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("ODD_RANK", "1:tardy")

    async def test() -> None:
        async with opened(store, tmp_path, ODD) as bench:
            await bench.start(2)
            await bench.say(_traffic())
            asked = Resume(reference_ns=1, within_pct=10.0, watch_only=True)
            assert isinstance(await bench.say(asked, NS_PER_S // 3), Resumed)
            await _hold_and_stop(bench)
            assert bench.notes == []

    run(test())


def test_groups_are_made_anew_in_the_same_processes(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(3, (0, 2))
            await bench.say(_traffic())
            for generation in range(12):
                await _hold_and_stop(bench)
                destroyed = await bench.say(DestroyGroups())
                assert isinstance(destroyed, Done), destroyed
                pair = (generation % 3, (generation + 1) % 3)
                ready = await bench.say(MakeGroups(groups=bench.groups(3, pair)))
                assert isinstance(ready, RanksReady), ready
                assert ready.pids == bench.pids
                assert ready.ready_ns > destroyed.t_ns
                pairs = await bench.say(collective("all_reduce", 4096, use_subgroups=True))
                assert isinstance(pairs, Samples), pairs
                assert {row.rank for row in pairs.ranks} == set(pair)
                resumed = await bench.say(Resume(reference_ns=NS_PER_S, within_pct=10.0))
                assert isinstance(resumed, Resumed), resumed
            stale = await bench.say(DestroyGroups())
            assert isinstance(stale, Failure)
            assert stale.error == "Busy"

    run(test())


def test_groups_are_refused_while_others_stand_or_when_stale(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            standing = await bench.say(MakeGroups(groups=bench.groups(2)))
            assert isinstance(standing, Failure)
            assert "still stand" in standing.text
            await bench.say(DestroyGroups())
            none = await bench.say(collective("all_reduce", 4096))
            assert isinstance(none, Failure)
            assert "there are no groups" in none.text
            assert isinstance(await bench.say(MakeGroups(groups=bench.groups(2))), RanksReady)

    run(test())


# -- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("late", "CollectiveExpired", "rank 1 is outside, having entered collective 0"),
        ("stops", "CollectiveExpired", "rank 1 does not answer"),
        ("dies", "RankDied", "about to fall over"),
    ],
)
def test_the_rank_at_fault_is_named(
    store: str, tmp_path: Path, monkeypatch, fault: str, error: str, words: str
) -> None:
    monkeypatch.setenv("ODD_RANK", f"1:{fault}")

    async def test() -> None:
        async with opened(store, tmp_path, ODD) as bench:
            await bench.start(3)
            asked = collective("all_reduce", 4096, warmup=0)
            begin_ns = time.monotonic_ns()
            failed = await bench.say(asked, NS_PER_S)
            assert isinstance(failed, Failure), failed
            assert (failed.error, failed.ranks) == (error, (1,))
            assert words in failed.text
            assert time.monotonic_ns() - begin_ns < 3 * NS_PER_S
            if fault == "dies":
                assert f"rank 1 (pid {bench.pids[1]}) killed by SIGKILL" in failed.text
                assert [note.ranks for note in bench.notes] == [(1,)]
            else:
                assert "in timed" in (tmp_path / "rank0.log").read_text(), "stacks are in the log"
            monkeypatch.setenv("ODD_RANK", "9:late")
            await bench.say(StopRanks())
            old = bench.pids
            await bench.start(2)
            assert not set(old.values()) & set(bench.pids.values())
            assert isinstance(await bench.say(asked), Samples), "fresh children work"

    run(test())


def test_a_rank_that_dies_under_traffic_ends_what_was_asked(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            await bench.say(_traffic())
            watch = asyncio.create_task(
                bench.say(Resume(reference_ns=1, within_pct=1.0, watch_only=True))
            )
            await bench.say(TrafficSoFar())
            os.kill(bench.pids[1], signal.SIGKILL)
            failed = await watch
            assert isinstance(failed, Failure), failed
            assert (failed.error, failed.ranks) == ("RankDied", (1,))
            later = await bench.say(Hold())
            assert isinstance(later, Failure)
            assert later.ranks == (1,)
            assert isinstance(await bench.say(StopRanks()), Done)

    run(test())


def test_a_rank_stopped_under_traffic_is_named_by_hold(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            await bench.say(_traffic())
            freeze(bench.pids[0])
            failed = await bench.say(Hold(), NS_PER_S // 2)
            assert isinstance(failed, Failure), failed
            assert (failed.error, failed.ranks) == ("CollectiveExpired", (0,))

    run(test())


def test_traffic_that_stalls_is_told_without_being_asked(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            await bench.start(2)
            await bench.say(
                StartTraffic(op="all_reduce", size_bytes=4096, dtype="float32", timeout_ns=NS_PER_S)
            )
            freeze(bench.pids[0])
            async with asyncio.timeout(10):
                await bench.noted.wait()
            assert "has not come back for 1 s" in bench.notes[0].text

    run(test())


def test_a_missing_peer_ends_the_start_and_leaves_no_process(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            groups = bench.groups(3)
            short = Groups(
                generation=groups.generation,
                world_size=3,
                store=store,
                interface="lo",
                timeout_ns=NS_PER_S,
            )
            failed = await bench.say(StartRanks(ranks=(0, 1), groups=short), START_NS)
            assert isinstance(failed, Failure), failed
            assert failed.error == "GroupsFailed"
            again = await bench.say(Hold())
            assert isinstance(again, Failure)
            assert again.error == "NoRanks"
            await bench.start(2)

    run(test())


def test_ranks_stopped_while_they_start_are_all_stopped(store: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            asked = StartRanks(ranks=(0, 1, 2), groups=bench.groups(3))
            started, again, stopped = await asyncio.gather(
                bench.say(asked, START_NS), bench.say(asked, START_NS), bench.say(StopRanks())
            )
            assert isinstance(stopped, Done)
            assert getattr(started, "error", "") == "RankDied"
            assert getattr(again, "error", "") == "Busy"
            assert getattr(await bench.say(Hold()), "error", "") == "NoRanks"

    run(test())


def test_what_nccl_does_not_record_is_refused_or_dropped(
    store: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("NCCL_SECRET_KNOB", "7")

    async def test() -> None:
        async with opened(store, tmp_path) as bench:
            groups = bench.groups(1)
            refused = await bench.say(
                StartRanks(ranks=(0,), groups=groups, nccl_env={"NCCL_SECRET_KNOB": "1"})
            )
            assert isinstance(refused, Failure)
            assert "NCCL_SECRET_KNOB" in refused.text
            asked = StartRanks(ranks=(0,), groups=groups, nccl_env={"NCCL_IB_TIMEOUT": "22"})
            ready = await bench.say(asked, START_NS)
            assert isinstance(ready, RanksReady), ready
            bench.pids = ready.pids
            assert ready.effective_env["NCCL_IB_TIMEOUT"] == "22"
            assert "NCCL_SECRET_KNOB" in bench.notes[0].text
            assert b"NCCL_SECRET_KNOB" not in environment(ready.pids[0])

    run(test())


def test_ranks_die_with_their_agent(store: str, tmp_path: Path) -> None:
    program = f"""
import asyncio, sys, time
from agents.ranks import Ranks
from harness.wire.messages import Groups, StartRanks
async def main():
    ranks = Ranks(print)
    groups = Groups(generation={Bench.generation + 1000}, world_size=2, store="{store}",
                    interface="lo", timeout_ns={START_NS})
    start = ranks.commands()[StartRanks]
    due_ns = time.monotonic_ns() + {START_NS}
    ready = await start(StartRanks(ranks=(0, 1), groups=groups), due_ns)
    print(*ready.pids.values(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        assert len(pids) == 2
        agent.kill()
        agent.wait(5)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its agent"
        time.sleep(0.01)
