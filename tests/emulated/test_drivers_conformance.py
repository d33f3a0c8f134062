"""Every driver over every line against emulated firmware, and every transport against a peer."""

from __future__ import annotations

import asyncio
import os
import pty
import queue
import select
import socket
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import asyncssh
import pytest
from driver_bench import maker

from drivers.address import Credentials, SerialAddress, SshAddress, TcpAddress
from drivers.base import Transport
from drivers.conformance import Peer, check_ocs, check_transport
from drivers.transports.serial_port import SerialTransport
from drivers.transports.ssh import SshTransport
from drivers.transports.tcp import TcpTransport
from drivers.transports.transcript import Transcript

LIMIT_S = 20.0
NS_PER_S = 1_000_000_000


def soon() -> int:
    return time.monotonic_ns() + int(LIMIT_S) * NS_PER_S


@pytest.mark.parametrize(
    ("protocol", "server"),
    [("scpi", "serial"), ("scpi", "tcp"), ("tl1", "ssh"), ("tl1", "tcp"), ("tl1", "serial")],
)
def test_a_polatis_driver_keeps_the_contract(tmp_path: Path, protocol: str, server: str) -> None:
    check_ocs(maker(tmp_path, protocol, server))


class FdPeer:
    """The device's end, as a descriptor."""

    def __init__(self, fd: int, hang_up: Callable[[], None]) -> None:
        self._fd, self.hang_up = fd, hang_up

    def send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            ready, _, _ = select.select([self._fd], [], [], LIMIT_S)
            assert ready, f"only {len(data)} of {count} bytes came"
            data += os.read(self._fd, count - len(data))
        return data


@contextmanager
def tcp_line() -> Iterator[tuple[Transport, Peer]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        line = TcpTransport(TcpAddress(*server.getsockname()), soon())
        device, _ = server.accept()
        with device, closing(line):
            yield line, FdPeer(device.fileno(), device.close)


@contextmanager
def serial_line() -> Iterator[tuple[Transport, Peer]]:
    master, slave = pty.openpty()
    tty.setraw(slave)
    ends = [master]
    try:
        line = SerialTransport(SerialAddress(os.ttyname(slave), 115200), soon())
        os.close(slave)
        with closing(line):
            yield line, FdPeer(master, lambda: os.close(ends.pop()))
    finally:
        for fd in ends:
            os.close(fd)


@contextmanager
def written_down_line(path: Path) -> Iterator[tuple[Transport, Peer]]:
    with tcp_line() as (line, peer), closing(Transcript(line, path)) as transcript:
        yield transcript, peer


@pytest.mark.parametrize("line", [tcp_line, serial_line])
def test_a_transport_keeps_the_contract(line: Callable[[], object]) -> None:
    check_transport(line)


def test_a_transcript_changes_nothing(tmp_path: Path) -> None:
    check_transport(lambda: written_down_line(tmp_path / "t"))


class SshPeer:
    """A shell of an asyncssh server that runs in a thread; reads only when asked to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: asyncssh.SSHServerProcess) -> None:
        self._loop, self._process = loop, process

    def _run(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def send(self, data: bytes) -> None:
        async def write() -> None:
            self._process.stdout.write(data)

        self._run(write())

    def receive(self, count: int) -> bytes:
        return self._run(self._process.stdin.readexactly(count))

    def hang_up(self) -> None:
        async def close() -> None:
            self._process.close()

        self._run(close())


class Door(asyncssh.SSHServer):
    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == ("admin", "right")


@contextmanager
def ssh_server() -> Iterator[tuple[asyncio.AbstractEventLoop, int, str, queue.Queue]]:
    """Yield the loop, the port, the known_hosts line and the queue of shells."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    shells: queue.Queue = queue.Queue()
    key = asyncssh.generate_private_key("ssh-ed25519")

    async def shell(process: asyncssh.SSHServerProcess) -> None:
        shells.put(process)
        await process.wait_closed()

    async def start() -> asyncssh.SSHAcceptor:
        return await asyncssh.create_server(
            Door,
            "127.0.0.1",
            0,
            server_host_keys=[key],
            process_factory=shell,
            encoding=None,
            line_editor=False,
        )

    async def stop(server: asyncssh.SSHAcceptor) -> None:
        server.close()
        await server.wait_closed()
        mine = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not mine]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(LIMIT_S)
        try:
            port = server.get_port()
            public = key.export_public_key().decode().split()[:2]
            yield loop, port, f"[127.0.0.1]:{port} {' '.join(public)}\n", shells
        finally:
            asyncio.run_coroutine_threadsafe(stop(server), loop).result(LIMIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


def test_the_ssh_transport_keeps_the_contract(tmp_path: Path) -> None:
    known_hosts = tmp_path / "known_hosts"
    with ssh_server() as (loop, port, line, shells):
        known_hosts.write_text(line)

        @contextmanager
        def ssh_line() -> Iterator[tuple[Transport, Peer]]:
            address = SshAddress("admin", "127.0.0.1", port)
            credentials = Credentials(password="right", known_hosts=known_hosts)
            with closing(SshTransport(address, credentials, soon())) as transport:
                yield transport, SshPeer(loop, shells.get(timeout=LIMIT_S))

        check_transport(ssh_line)
