"""Ranks of generation that die, hang or break, and an agent that is killed: nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from generation_node import Node, layout, node, run, scripted, until

from agents.generation.orders import FRAMES
from agents.seat import Seat
from harness.clock import NS_PER_S
from harness.processes import start_ticks
from harness.wire.generation import (
    Build,
    CloseGeneration,
    OpenGeneration,
    Submit,
    TearDown,
    UpdateWeights,
    Withdraw,
)
from harness.wire.messages import Done

pytestmark = pytest.mark.emulated

FLAVOURS = pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
SOON_NS = NS_PER_S


def pid_of(n: Node, gpu: int) -> int:
    (pid,) = (seat.child.pid for seat in n.seats() if seat.number == gpu)
    return int(pid)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@FLAVOURS
@pytest.mark.parametrize("gpu", [0, 1], ids=["leader", "follower"])
def test_a_rank_killed_while_it_generates_takes_its_instance_with_it(
    tmp_path: Path, lockstep: bool, gpu: int
) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(lockstep=lockstep), gpus=3)
            pair, other = layout("1xTP2", 2)[0], layout("3xTP1", 3)[2]
            await n.build([pair, other])
            await n.submit(pair, "a", tokens=50_000)
            while len(n.positions("a")) < 5:
                await n.watch()
            os.kill(pid_of(n, gpu), signal.SIGKILL)
            reason = await n.death_of(pair)
            assert f"rank of GPU {gpu} (pid " in reason
            assert "killed by SIGKILL" in reason
            positions = n.positions("a")
            assert positions == list(range(len(positions))), "what was told stays told, once"
            for asked in (
                Submit(instance=pair.name, works=()),
                Withdraw(instances=(pair.name,)),
                UpdateWeights(instances=(pair.name,), version=1),
            ):
                failure = await n.fails(asked)
                assert failure.error == "InstanceDead"
                assert "killed by SIGKILL" in failure.text
            assert any("killed by SIGKILL" in note.text for note in n.notes)
            await n.submit(other, "b")
            while "finished" not in {output.ended for output in n.outputs if output.id == "b"}:
                await n.watch()
            await n.tear_down([pair], force=True)
            built = await n.build([pair])
            assert "processes" in {span.stage for span in built.spans}
            await n.submit(pair, "c")
            n.dead = {}
            await n.finished("c")

    run(test())


def test_a_dead_instance_may_be_built_upon(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=2)
            (pair,), ones = layout("1xTP2", 2), layout("2xTP1", 2)
            await n.build([pair])
            os.kill(pid_of(n, 1), signal.SIGKILL)
            await n.death_of(pair)
            await n.build(ones)
            await n.watch(0)
            assert n.dead == {}
            assert len(n.living()) == 2

    run(test())


def test_an_idle_rank_that_died_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=2)
            os.kill(n.pids[1], signal.SIGKILL)
            await until(lambda: bool(n.notes))
            built = await n.build(layout("1xTP2", 2))
            assert built.spans[0].stage == "processes"
            assert n.pids[0] in n.living()
            assert n.pids[1] not in n.living()

    run(test())


def test_a_rank_killed_in_the_middle_of_a_build_fails_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(odd={"1": "hangs in build"}), gpus=3)
            pair, other = layout("1xTP2", 2)[0], layout("3xTP1", 3)[2]
            asked = Build(instances=(pair, other), strategy="rebuild")
            building = asyncio.create_task(n.say(asked))
            await until(lambda: any(seat._pending for seat in n.seats()))
            assert (await n.fails(UpdateWeights(instances=(), version=1))).error == "Busy"
            os.kill(pid_of(n, 1), signal.SIGKILL)
            failure = await building
            assert getattr(failure, "error", "") == "InstanceDead", failure
            assert "rank of GPU 1" in str(failure)
            assert "killed by SIGKILL" in str(failure)
            assert n.labour._open is not None
            assert not n.labour._open.up, "none of the instances is left"
            assert n.living() == {n.pids[2]}
            assert (await n.build([other])).spans

    run(test())


@pytest.mark.parametrize(
    ("odd", "error", "text"),
    [
        ("refuses to build", "Refused", "rank of GPU 0: no room for KV"),
        ("raises in build", "InstanceDead", "RuntimeError: out of memory"),
        ("hangs in build", "InstanceDead", "build was not done in time"),
    ],
)
def test_a_build_that_fails_says_why(tmp_path: Path, odd: str, error: str, text: str) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(odd={"0": odd}), gpus=2)
            one = layout("2xTP1", 2)[0]
            failure = await n.fails(Build(instances=(one,), strategy="rebuild"), SOON_NS)
            assert failure.error == error
            assert text in failure.text
            if odd.startswith("hangs"):
                assert "rank of GPU 0 is in build for " in failure.text
                assert "hangs in build" not in failure.text
                assert "in build\n" in (tmp_path / "gpu0.log").read_text(), "stacks"
            assert (n.pids[0] in n.living()) == (odd == "refuses to build"), "no need to kill it"

    run(test())


@FLAVOURS
def test_a_failed_step_is_told_with_its_error(tmp_path: Path, lockstep: bool) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(lockstep=lockstep, odd={"0": "raises in step"}), gpus=1)
            (one,) = layout("1xTP1", 1)
            await n.build([one])
            await n.submit(one, "a")
            reason = await n.death_of(one)
            assert "RuntimeError: the device fell off the bus" in reason
            assert "Traceback" in (tmp_path / "gpu0.log").read_text()

    run(test())


def test_ranks_out_of_step_are_no_instance(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(lockstep=True, odd={"1": "runs ahead"}), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair])
            await n.submit(pair, "a", tokens=50_000)
            assert "out of step" in await n.death_of(pair)

    run(test())


@pytest.mark.parametrize("how", ["hangs in submit", "frozen"])
def test_a_rank_that_does_not_answer_in_time_is_named(tmp_path: Path, how: str) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(odd={"1": how}), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair])
            if how == "frozen":
                freeze(n.pids[1])
            failure = await n.fails(Submit(instance=pair.name, works=()), SOON_NS)
            assert "submit was not done in time" in failure.text
            where = "does not answer" if how == "frozen" else "is in submit for "
            assert f"rank of GPU 1 {where}" in failure.text
            assert "rank of GPU 0" not in failure.text
            assert "not done in time" in await n.death_of(pair)

    run(test())


def test_force_does_not_wait_for_what_hangs(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(odd={"0": "hangs in teardown"}), gpus=1)
            (one,) = layout("1xTP1", 1)
            await n.build([one])
            asked = TearDown(instances=(one.name,), strategy="rebuild")
            leaving = asyncio.create_task(n.say(asked))
            await until(lambda: any(seat._pending for seat in n.seats()))
            torn = await n.tear_down([one], force=True)
            assert [span.stage for span in torn.spans] == ["teardown"]
            assert getattr(await leaving, "error", "") == "InstanceDead"
            assert not n.living()
            await n.tear_down([one], force=True)  # what is gone may be torn down again
            await n.build([one])

    run(test())


def test_closing_ends_everything_whatever_is_under_way(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(odd={"1": "hangs in build"}), gpus=2)
            asked = Build(instances=layout("1xTP2", 2), strategy="rebuild")
            building = asyncio.create_task(n.say(asked))
            await until(lambda: any(seat._pending for seat in n.seats()))
            await n.ask(CloseGeneration(), Done, 7 * NS_PER_S)
            assert getattr(await building, "error", "") == "InstanceDead"
            assert [pid for pid in n.pids.values() if start_ticks(pid) is not None] == []
            await n.ask(CloseGeneration(), Done)
            n.upto = 0
            await n.open(scripted(), gpus=1)
            await n.build(layout("1xTP1", 1))

    run(test())


@pytest.mark.parametrize("how", ["kill_now", "close"])
def test_both_ways_out_leave_nothing(tmp_path: Path, how: str) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(odd={"0": "hangs in teardown"}), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair])
            await n.submit(pair, "a", tokens=50_000)
            pids = n.living()
            if how == "kill_now":
                n.labour.kill_now()
                n.labour.kill_now()
                await n.death_of(pair)
            else:
                await n.labour.close()
                assert not any(start_ticks(pid) for pid in pids)

    run(test())


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        program = (sys.executable, "-c", "raise SystemExit('no such engine')")
        async with node(tmp_path, program) as n:
            asked = OpenGeneration(spec=scripted(), gpus=2, address="127.0.0.1")
            failure = await n.fails(asked)
            assert "no such engine" in failure.text
            assert not n.living()

    run(test())


def test_a_start_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    honest, counted = Seat.started, itertools.count()

    async def second_fails(*args: Any, **more: Any) -> Seat:
        if next(counted) == 1:
            raise OSError("no more processes")
        return await honest(*args, **more)

    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair])
            await n.tear_down([pair], "restart")
            monkeypatch.setattr(Seat, "started", second_fails)
            with pytest.raises(OSError, match="no more processes"):
                await n.build([pair])
            assert not n.living()
            await n.build([pair])

    run(test())


def test_a_process_that_starts_while_generation_is_closed_is_ended(
    tmp_path: Path, monkeypatch
) -> None:
    honest, begun, closed = Seat.started, asyncio.Event(), asyncio.Event()
    pids: list[int] = []

    async def slow(*args: Any, **more: Any) -> Seat:
        seat = await honest(*args, **more)
        pids.append(seat.child.pid)
        begun.set()
        await closed.wait()
        return seat

    async def test() -> None:
        async with node(tmp_path) as n:
            monkeypatch.setattr(Seat, "started", slow)
            asked = OpenGeneration(spec=scripted(), gpus=1, address="127.0.0.1")
            opening = asyncio.create_task(n.say(asked))
            await begun.wait()
            await n.ask(CloseGeneration(), Done)
            closed.set()
            assert "closed meanwhile" in getattr(await opening, "text", "")
            assert start_ticks(pids[0]) is None

    run(test())


def test_a_line_that_makes_no_sense_ends_the_rank(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=1)
            (seat,) = n.seats()
            seat._transport.write(b"\0\0\0\1\xc1")
            await until(lambda: not n.living())

    run(test())


def test_what_is_gone_is_killed_without_touching_others(tmp_path: Path) -> None:
    async def test() -> None:
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        seat = await Seat.started(
            "it", 0, sleeper, env=os.environ, log=None, decoder=FRAMES, news=lambda *_: None
        )
        seat.kill()
        await seat.end()
        read, write = os.pipe()
        other = os.dup2(read, seat.child.pidfd)
        heard = asyncio.Event()
        asyncio.get_running_loop().add_reader(other, heard.set)
        seat.kill()
        os.write(write, b"x")
        await heard.wait()
        asyncio.get_running_loop().remove_reader(other)
        for handle in (read, write, other):
            os.close(handle)

    run(test())


def test_nothing_grows_over_many_rebuilds(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def of(pid: int) -> tuple[int, int]:
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=2)
            shapes = [layout("1xTP2", 2), layout("2xTP1", 2)]
            found = []
            for cycle in range(50):
                instances = shapes[cycle % 2]
                await n.build(instances)
                await n.submit(instances[0], f"{cycle}", tokens=3)
                await n.finished(f"{cycle}")
                await n.tear_down(instances)
                if cycle in (3, 49):
                    found.append((counts(), sorted(map(of, n.living()))))
            assert found[0] == found[1]
            assert n.living() == set(n.pids.values())

    run(test())


AGENT = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from generation_node import Node, SCRIPTED, layout, scripted

async def main():
    n = Node(SCRIPTED, Path({logs!r}))
    ones = layout("2xTP1", 2)
    await n.open(scripted(), gpus=2, prebuild=[ones])
    (pair,) = layout("1xTP2", 2)
    await n.build([pair])
    await n.submit(pair, "a", tokens=50_000)
    await n.watch()
    print(*n.living(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_rank_outlives_a_killed_agent(tmp_path: Path) -> None:
    code = AGENT.format(tests=str(Path(__file__).parent), logs=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None
            pids = [int(word) for word in agent.stdout.readline().split()]
            assert len(pids) == 4
        finally:
            agent.kill()
    until_s = time.monotonic() + 30
    while any(start_ticks(pid) is not None for pid in pids):
        assert time.monotonic() < until_s
        time.sleep(0.05)
