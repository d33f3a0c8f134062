"""Bulk bytes over real sockets: whole or not at all, and nothing is kept for ever."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from zlib import crc32

import msgspec
import pytest

from agents.generation.transfer import Landing, Piece, send
from harness.clock import NS_PER_S

pytestmark = pytest.mark.emulated


def piece(request: str, data: bytes, crc: int | None = None) -> tuple[Piece, memoryview]:
    found = crc32(data) if crc is None else crc
    return Piece("t1", request, 5, (0, 1), (0, 1), len(data), found), memoryview(data)


@pytest.fixture
def landing() -> Iterator[Landing]:
    found = Landing("127.0.0.1", 1 << 20)
    yield found
    found.close()


def seen(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def test_pieces_arrive_whole_and_are_claimed_once(landing: Landing) -> None:
    tried = send(landing.peer, [piece("a", b"x" * 300_000), piece("a", b"y"), piece("b", b"")])
    assert [problem for _, problem in tried] == ["", "", ""]
    assert [data for _, data in landing.claim("t1", "a")] == [b"x" * 300_000, b"y"]
    assert landing.claim("t1", "a") == []
    assert landing.claim("t2", "b") == []
    assert landing.held_bytes == 0


def test_a_corrupt_piece_is_dropped_and_told_and_the_next_arrives(landing: Landing) -> None:
    tried = send(landing.peer, [piece("a", b"abc", crc=1), piece("b", b"abc")])
    assert [bool(problem) for _, problem in tried] == [True, False]
    assert "a: corrupt" in tried[0][1]
    assert landing.claim("t1", "a") == []
    assert landing.held_bytes == 3


def test_what_there_is_no_room_for_is_refused_with_figures(landing: Landing) -> None:
    big = bytes(700_000)
    tried = send(landing.peer, [piece("a", big), piece("b", big), piece("c", b"small")])
    assert tried[1][1] == "no room for 700000 bytes: 348576 of 1048576 are free"
    assert [bool(problem) for _, problem in tried] == [False, True, False]


def test_what_there_is_no_room_for_takes_no_memory() -> None:
    landing = Landing("127.0.0.1", 64 << 20)
    big = [piece(name, bytes(40 << 20)) for name in "ab"]
    try:
        send(landing.peer, big[:1])
        tracemalloc.start()
        assert "no room" in send(landing.peer, big[1:])[0][1]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        landing.close()


def test_a_piece_cut_short_leaves_nothing(landing: Landing) -> None:
    host, port = landing.peer.split(":")
    header = msgspec.msgpack.encode(piece("a", bytes(1000))[0])
    with socket.create_connection((host, int(port))) as line:
        line.sendall(struct.pack("!I", len(header)) + header + bytes(400))
        assert seen(lambda: landing.held_bytes == 1000)
    assert seen(lambda: landing.held_bytes == 0)
    assert landing.claim("t1", "a") == []


def test_a_stranger_on_the_line_is_cut_off(landing: Landing) -> None:
    host, port = landing.peer.split(":")
    with socket.create_connection((host, int(port))) as line:
        line.settimeout(30)
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(100) == b""
    assert [p for _, p in send(landing.peer, [piece("a", b"x")])] == [""]


def test_what_nobody_claims_is_dropped_after_a_while() -> None:
    now_ns = [0]
    landing = Landing("127.0.0.1", 1 << 20, now_ns=lambda: now_ns[0])
    try:
        send(landing.peer, [piece("a", b"abc")])
        landing.sweep()
        assert landing.held_bytes == 3
        now_ns[0] += 61 * NS_PER_S
        assert seen(lambda: bool(send(landing.peer, [piece("b", b"")])) and not landing.held_bytes)
    finally:
        landing.close()


def test_a_receiver_that_is_gone_or_silent_is_told_in_time() -> None:
    landing = Landing("127.0.0.1", 1 << 20)
    landing.close()
    tried = send(landing.peer, [piece("a", b"x"), piece("b", b"x")])
    assert len(tried) == 1
    assert landing.peer in tried[0][1]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        peer = f"127.0.0.1:{mute.getsockname()[1]}"
        tried = send(peer, [piece("a", b"x")], limit_ns=NS_PER_S // 5)
        assert "timed out" in tried[0][1]


@pytest.mark.parametrize("word", [b"HTTP/1.1 400 Bad Request\r\n", bytes(4), b"\0\0\0\1\x07"])
def test_a_peer_that_is_no_rank_is_told(word: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            line, _ = stranger.accept()
            with line:
                line.sendall(word)
                line.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        peer = f"127.0.0.1:{stranger.getsockname()[1]}"
        assert [problem.partition(": ")[0] for _, problem in send(peer, [piece("a", b"x")])] == [
            peer
        ]
        thread.join()


def test_closing_cuts_lines_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    landing = Landing("127.0.0.1", 1 << 20)
    host, port = landing.peer.split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"\0\0")
        assert seen(lambda: len(set(threading.enumerate()) - before) == 2)
        landing.close()
    assert set(threading.enumerate()) <= before
