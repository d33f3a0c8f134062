"""Files of weights over real porters: chains and trees, and whatever may break on the way."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agents import buckets
from agents.process import group_members
from agents.weights import Weights
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import HarnessError
from harness.wire.messages import Done, Failure, Message, Note
from harness.wire.weights import (
    ClosePorter,
    ExpectWeights,
    ForgetWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)

pytestmark = pytest.mark.emulated

M = TypeVar("M", bound=Message)
BUCKET = 64 << 10
LIMIT_NS = 30 * NS_PER_S
STALL_NS = NS_PER_S


class Node:
    """A node's labour of weights, and its porter."""

    def __init__(self, memory: Path) -> None:
        self.notes: list[Note] = []
        self.labour = Weights(self.notes.append, memory=memory, logs=memory)
        self.memory = memory
        self.listen, self.pid = "", 0

    async def say(self, message: Message, limit_ns: int = LIMIT_NS) -> Message:
        handler = self.labour.commands()[type(message)]
        async with asyncio.timeout(limit_ns / NS_PER_S + 15):
            try:
                return await handler(message, time.monotonic_ns() + limit_ns)
            except HarnessError as error:
                return Failure(error=type(error).__name__, text=str(error))

    async def ask(self, message: Message, kind: type[M], limit_ns: int = LIMIT_NS) -> M:
        answer = await self.say(message, limit_ns)
        assert isinstance(answer, kind), answer
        return answer

    async def open(self) -> None:
        opened = await self.ask(OpenPorter(address="127.0.0.1"), PorterOpen)
        self.listen, self.pid = opened.listen, opened.pid

    def files(self) -> set[str]:
        found = self.memory.glob("harness-weights-*/*")
        return {path.name for path in found} - {"lock"}


@asynccontextmanager
async def nodes(tmp_path: Path, count: int) -> AsyncIterator[list[Node]]:
    """Nodes with open porters; nothing of them is left afterwards."""
    made = []
    for number in range(count):
        memory = tmp_path / f"node{number}"
        memory.mkdir(exist_ok=True)
        made.append(Node(memory))
    try:
        await asyncio.gather(*(node.open() for node in made))
        yield made
    finally:
        for node in made:
            await node.labour.close()
            assert group_members(node.pid) == []
            assert not list(node.memory.glob("harness-weights-*"))


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(110):
            await test

    asyncio.run(bounded())


def file_of(folder: Path, size: int, seed: int = 1) -> Path:
    path = folder / f"made-{seed}.safetensors"
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


def sending(path: Path, *children: str, transfer: str = "t", version: int = 1) -> SendWeights:
    return SendWeights(
        transfer=transfer,
        version=version,
        path=str(path),
        children=children,
        bucket_bytes=BUCKET,
        stall_ns=STALL_NS,
    )


def expecting(*children: str, transfer: str = "t", version: int = 1) -> ExpectWeights:
    return ExpectWeights(transfer=transfer, version=version, children=children)


def intact(answer: Message, path: Path) -> None:
    """The answer of a receiver that has just this file."""
    assert isinstance(answer, WeightsArrived), answer
    data = path.read_bytes()
    assert Path(answer.path).read_bytes() == data
    assert (answer.moved_bytes, answer.checksum) == (len(data), zlib.crc32(data))
    assert {"receive", "verify"} <= {span.stage for span in answer.spans}
    assert all(span.begin_ns <= span.end_ns for span in answer.spans)


@pytest.mark.parametrize("size", [1, BUCKET, 5 * BUCKET + 17])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_all_of_a_chain_or_a_tree_get_the_file(tmp_path: Path, shape: str, size: int) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 4) as (source, one, two, three):
            path = file_of(tmp_path, size)
            below = {
                "chain": [(one.listen,), (two.listen,), (three.listen,), ()],
                "tree": [(one.listen, two.listen), (three.listen,), (), ()],
            }[shape]
            sent, *arrived = await asyncio.gather(
                source.ask(sending(path, *below[0]), WeightsSent),
                one.say(expecting(*below[1])),
                two.say(expecting(*below[2])),
                three.say(expecting(*below[3])),
            )
            for answer in arrived:
                intact(answer, path)
            assert sent.checksum == zlib.crc32(path.read_bytes())
            assert sent.moved_bytes == size * len(below[0])
            assert sent.buckets == -(-size // BUCKET)
            assert [span.stage for span in sent.spans] == ["send"]
            stages = {span.stage for span in arrived[0].spans}  # type: ignore[attr-defined]
            assert "forward" in stages

    run(test())


def test_a_chain_is_a_pipeline(tmp_path: Path) -> None:
    """A node passes on its first buckets while the last are not even sent."""

    async def test() -> None:
        async with nodes(tmp_path, 1) as (middle,):
            data = file_of(tmp_path, 8 * BUCKET).read_bytes()
            with socket.create_server(("127.0.0.1", 0)) as last:
                waits = asyncio.create_task(middle.say(expecting(peer_of(last))))
                with await offered(middle, data) as line:
                    crc = put(line, data, 0)
                    put(line, data, 1, crc)
                    below, _ = await asyncio.to_thread(last.accept)
                    with below:
                        below.settimeout(20)
                        assert buckets.hear_offer(below).buckets == 8
                        got = bytearray(BUCKET)
                        for bucket in (0, 1):
                            place = memoryview(got)
                            await asyncio.to_thread(
                                buckets.receive_bucket, below, bucket, place, lambda: False
                            )
                            assert got == data[bucket * BUCKET :][:BUCKET]
            failed = await waits
            assert isinstance(failed, Failure)
            assert failed.error == "ParentLost"
            assert "2 of 8 buckets had come" in failed.text
            assert middle.files() == set()

    run(test())


async def offered(node: Node, data: bytes, transfer: str = "t", version: int = 1) -> socket.socket:
    """A line to a node, over which a transfer was offered."""
    line = await asyncio.to_thread(connect, node.listen)
    offer = buckets.Offer(buckets.MAGIC, transfer, version, len(data), BUCKET, STALL_NS)
    buckets.say(line, offer)
    return line


def connect(listen: str) -> socket.socket:
    host, port = listen.split(":")
    line = socket.create_connection((host, int(port)))
    line.settimeout(20)
    return line


def put(line: socket.socket, data: bytes, bucket: int, crc: int = 0) -> int:
    """Send a bucket; return the CRC to go on with."""
    block = data[bucket * BUCKET :][:BUCKET]
    crc = zlib.crc32(block, crc)
    buckets.send_head(line, bucket, len(block), crc)
    line.sendall(block)
    return crc


def peer_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_what_is_corrupted_on_the_way_is_told_by_bucket_and_not_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 3) as (source, one, two):
            path = file_of(tmp_path, 6 * BUCKET)
            with meddler(one.listen, corrupt_at=3 * BUCKET + 500) as between:
                sent, broken, whole = await asyncio.gather(
                    source.say(sending(path, between, two.listen)),
                    one.say(expecting()),
                    two.say(expecting()),
                )
            assert isinstance(broken, Failure)
            assert (broken.error, broken.text) == (
                "Corrupt",
                "porter: bucket 3 is corrupt on arrival",
            )
            assert isinstance(sent, Failure)
            assert sent.error == "ChildLost"
            assert sent.text == (
                f"porter: {between}: bucket 3 is corrupt on arrival; it had 3 of 6 buckets"
            )
            intact(whole, path)
            assert one.files() == set()
            await one_more(source, one, path)

    run(test())


@contextmanager
def meddler(listen: str, *, corrupt_at: int = -1, stop_at: int = 1 << 40) -> Iterator[str]:
    """Stand between two porters: turn one byte of what goes forth, let only so much of it pass."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def back(beyond: socket.socket, line: socket.socket) -> None:
            while data := quietly(beyond.recv, 1 << 16):
                quietly(line.sendall, data)
            quietly(line.shutdown, socket.SHUT_RDWR)

        def forth(line: socket.socket, beyond: socket.socket) -> None:
            done = 0
            while data := bytearray(quietly(line.recv, min(1 << 16, stop_at - done)) or b""):
                if done <= corrupt_at < done + len(data):
                    data[corrupt_at - done] ^= 1
                done += len(data)
                quietly(beyond.sendall, data)
            if done < stop_at:
                quietly(beyond.shutdown, socket.SHUT_WR)

        def meddle() -> None:
            line, _ = server.accept()
            with line, connect(listen) as beyond:
                answers = threading.Thread(target=back, args=(beyond, line), daemon=True)
                answers.start()
                forth(line, beyond)
                answers.join()

        thread = threading.Thread(target=meddle, daemon=True)
        thread.start()
        yield peer_of(server)
        thread.join(20)
        assert not thread.is_alive()


def quietly(what: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return what(argument)
    except OSError:
        return None


async def one_more(source: Node, receiver: Node, path: Path, version: int = 1) -> None:
    """A new transfer of the same file works at once."""
    sent, arrived = await asyncio.gather(
        source.say(sending(path, receiver.listen, transfer="again", version=version)),
        receiver.say(expecting(transfer="again", version=version)),
    )
    assert isinstance(sent, WeightsSent), sent
    intact(arrived, path)


def test_a_receiver_killed_in_the_middle_is_named_and_the_others_get_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 4) as (source, killed, other, below):
            path = file_of(tmp_path, 9 * BUCKET)
            waits = asyncio.create_task(killed.say(expecting(below.listen)))
            others = asyncio.create_task(other.say(expecting()))
            belows = asyncio.create_task(below.say(expecting()))
            with meddler(killed.listen, stop_at=5 * BUCKET + 5000) as between:
                sends = asyncio.create_task(source.say(sending(path, between, other.listen)))
                while not any(name.endswith(".part") for name in below.files()):
                    assert not belows.done()
                    await asyncio.sleep(0.005)
                os.kill(killed.pid, signal.SIGKILL)
                sent = await sends
            assert isinstance(sent, Failure)
            assert sent.error == "ChildLost"
            assert f"{between}: " in sent.text
            assert other.listen not in sent.text
            assert re.search(r"it had [0-5] of 9 buckets", sent.text)
            intact(await others, path)
            died = await waits
            assert isinstance(died, Failure)
            assert died.error == "PorterDied"
            assert "killed by SIGKILL" in died.text
            lost = await belows
            assert isinstance(lost, Failure)
            assert lost.error == "ParentLost"
            assert [note.level for note in killed.notes] == ["error"]

            gone = await killed.say(expecting(transfer="x"))
            assert isinstance(gone, Failure)
            assert gone.error == "PorterDied"
            await killed.open()
            assert killed.files() == set()
            await one_more(source, killed, path)

    run(test())


def test_a_receiver_that_stands_still_is_named_within_the_stall(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 3) as (source, frozen, other):
            path = file_of(tmp_path, 300 * BUCKET)
            os.kill(frozen.pid, signal.SIGSTOP)
            try:
                waits = asyncio.create_task(frozen.say(expecting(), 4 * NS_PER_S))
                sent, arrived = await asyncio.gather(
                    source.say(sending(path, frozen.listen, other.listen)),
                    other.say(expecting()),
                )
                assert isinstance(sent, Failure)
                assert sent.error == "ChildLost"
                assert sent.text == (
                    f"porter: {frozen.listen}: stood still for 1 s; it had 0 of 300 buckets"
                )
                intact(arrived, path)
                silent = await waits
                assert isinstance(silent, Failure)
                assert silent.error == "PorterSilent"
            finally:
                with suppress(ProcessLookupError):
                    os.kill(frozen.pid, signal.SIGCONT)
            stuck = frozen.pid
            await frozen.open()  # as who makes the transfer again does
            assert frozen.pid != stuck
            await one_more(source, frozen, path)

    run(test())


def test_a_slow_receiver_is_waited_for_as_long_as_it_moves(tmp_path: Path) -> None:
    """It takes over twice the stall in all, and in its last buckets alone, but never stands."""

    async def test() -> None:
        async with nodes(tmp_path, 1) as (source,):
            path = file_of(tmp_path, 24 * BUCKET)
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
                reads = asyncio.create_task(asyncio.to_thread(sip, server))
                sent = await source.say(sending(path, peer_of(server)))
                assert isinstance(sent, WeightsSent), sent
                assert await reads == zlib.crc32(path.read_bytes())
                (span,) = sent.spans
                assert span.end_ns - span.begin_ns > 2 * STALL_NS

    run(test())


def sip(server: socket.socket) -> int:
    """Receive a transfer slowly, and say how far it is only at its end; return the file's CRC."""
    line, _ = server.accept()
    with line:
        offer, crc = buckets.hear_offer(line), 0
        for bucket in range(offer.buckets):
            place = memoryview(bytearray(offer.span(bucket)[1]))
            crc = buckets.receive_bucket(line, bucket, place, lambda: False)
            time.sleep(3 * STALL_NS / NS_PER_S / offer.buckets)
        buckets.say(line, buckets.Word(offer.buckets, ends=True))
    return crc


def test_who_hears_nothing_or_not_all_says_so_at_its_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 1) as (one,):
            late = await one.say(expecting(), 300 * NS_PER_MS)
            assert isinstance(late, Failure)
            assert (late.error, late.text) == (
                "Late",
                "porter: nobody sent anything by the deadline",
            )

            data = file_of(tmp_path, 3 * BUCKET).read_bytes()
            waits = asyncio.create_task(one.say(expecting(transfer="u"), 2 * NS_PER_S))
            with await offered(one, data, transfer="u") as line:
                put(line, data, 0)
                late = await waits
                assert isinstance(late, Failure)
                assert late.error == "Late"
                assert late.text == "porter: 1 of 3 buckets had come by the deadline"
                assert buckets.hear_word(line) == buckets.Word(1)
                assert buckets.hear_word(line) == buckets.Word(1, ends=True, problem=late.text[8:])
            assert one.files() == set()

    run(test())


def test_a_transfer_that_is_superseded_ends_and_the_new_one_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 2) as (source, one):
            path = file_of(tmp_path, 3 * BUCKET)
            unsent = asyncio.create_task(one.say(expecting(transfer="first")))
            await asyncio.sleep(0)
            under_way = asyncio.create_task(one.say(expecting(transfer="second")))
            first = await unsent
            assert isinstance(first, Failure)
            assert first.error == "Superseded"
            data = path.read_bytes()
            with await offered(one, data, transfer="second") as line:
                put(line, data, 0)
                assert await asyncio.to_thread(buckets.hear_word, line) == buckets.Word(1)
                await one_more(source, one, path, version=2)
                second = await under_way
                assert isinstance(second, Failure)
                assert second.error == "Superseded"
                assert "transfer again of version 2" in second.text
            assert one.files() == {"weights-2.safetensors"}

            with socket.create_server(("127.0.0.1", 0)) as mute:
                stuck = asyncio.create_task(source.say(sending(path, peer_of(mute))))
                line, _ = await asyncio.to_thread(mute.accept)
                with line:
                    await one_more(source, one, path, version=3)
                    told = await stuck
            assert isinstance(told, Failure)
            assert told.error == "Superseded"

    run(test())


def test_a_version_that_is_not_the_expected_one_is_refused_by_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 2) as (source, one):
            path = file_of(tmp_path, 3 * BUCKET)
            sent, refused = await asyncio.gather(
                source.say(sending(path, one.listen, version=4)), one.say(expecting(version=5))
            )
            assert isinstance(refused, Failure)
            assert (refused.error, refused.text) == (
                "WrongVersion",
                "porter: version 4 was sent; 5 is expected",
            )
            assert isinstance(sent, Failure)
            assert "version 4 was sent; 5 is expected; it had 0 of 3 buckets" in sent.text
            assert one.files() == set()

    run(test())


def test_what_nobody_expects_is_not_taken(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 1) as (one,):
            with await offered(one, b"x", transfer="guessed") as line:
                word = await asyncio.to_thread(buckets.hear_word, line)
                assert word.ends
                assert "does not expect" in word.problem
            with await asyncio.to_thread(connect, one.listen) as line:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert not await asyncio.to_thread(quietly, line.recv, 1)
            assert one.files() == set()

    run(test())


def test_a_file_that_is_not_there_or_too_big_is_named(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 1) as (one,):
            missing = await one.say(sending(tmp_path / "nowhere", one.listen))
            assert isinstance(missing, Failure)
            assert missing.error == "NoFile"
            assert f"{tmp_path}/nowhere: No such file" in missing.text
            waits = asyncio.create_task(one.say(expecting()))
            line = await asyncio.to_thread(connect, one.listen)
            with line:
                buckets.say(line, buckets.Offer(buckets.MAGIC, "t", 1, 1 << 60, BUCKET, STALL_NS))
                full = await waits
            assert isinstance(full, Failure)
            assert full.error == "NoRoom"
            assert f"no room for {1 << 60} bytes of weights" in full.text
            assert one.files() == set()

    run(test())


def test_all_versions_are_kept_until_they_may_be_forgotten(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes(tmp_path, 2) as (source, one):
            path = file_of(tmp_path, 100)
            for version in (8, 9, 10):
                await one_more(source, one, path, version=version)
            assert one.files() == {f"weights-{version}.safetensors" for version in (8, 9, 10)}
            await one.ask(ForgetWeights(keep_from=9), Done)
            assert one.files() == {"weights-9.safetensors", "weights-10.safetensors"}
            await one.ask(ForgetWeights(keep_from=10), Done)
            assert one.files() == {"weights-10.safetensors"}
            again = await one.ask(OpenPorter(address="127.0.0.1"), PorterOpen)
            assert (again.listen, again.pid) == (one.listen, one.pid)
            await one.ask(ClosePorter(), Done)
            assert not list(one.memory.glob("harness-weights-*"))
            closed = await one.say(expecting())
            assert isinstance(closed, Failure)
            assert closed.error == "NotOpen"

    run(test())


AGENT = """
import asyncio, sys, time
from pathlib import Path
from agents.weights import Weights
from harness.wire.weights import OpenPorter
async def main():
    labour = Weights(lambda note: None, memory=Path(sys.argv[1]))
    opened = await labour.commands()[OpenPorter](OpenPorter(address="127.0.0.1"), 0)
    print(opened.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_porter_dies_with_its_agent_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    memory = tmp_path / "node0"
    memory.mkdir()
    argv = [sys.executable, "-c", AGENT, str(memory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        assert group_members(pid) == [pid]
        (left,) = memory.glob("harness-weights-*")
        assert left.stat().st_mode & 0o777 == 0o700
        agent.kill()
    due = time.monotonic() + 20
    while group_members(pid) and time.monotonic() < due:
        time.sleep(0.01)
    assert group_members(pid) == []

    async def test() -> None:
        async with nodes(tmp_path, 1):
            assert not left.exists()

    run(test())
