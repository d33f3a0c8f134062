"""A TCP connection between two namespaces, in a process of its own, that can be told to pause.

``python -m tests.benchmarks.flow FROM TO ADDRESS`` sends as fast as it may from namespace FROM to
ADDRESS in namespace TO. Each line on its standard input is answered by one: ``count`` by the bytes
received so far, the stamp of that (monotonic ns) and the packets sent again; ``pause`` by a stamp,
when all that was sent has been acknowledged; ``go`` by a stamp. It works until its input ends.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import threading
import time

from drivers.netlink import socket_in

CHUNK = bytes(1 << 16)
TCP_INFO_BYTES, TOTAL_RETRANSMITTED_AT = 104, 100
LOOK_S = 0.0005


class Flow:
    """Both ends, each with a thread."""

    def __init__(self, sender: str, receiver: str, address: str) -> None:
        with socket_in(receiver, socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind((address, 0))
            server.listen(1)
            self._out = socket_in(sender, socket.AF_INET, socket.SOCK_STREAM)
            self._out.connect(server.getsockname())
            self._into, _ = server.accept()
        self._received = 0
        self._going, self._idle = threading.Event(), threading.Event()
        self._going.set()
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def answer(self, command: str) -> str:
        match command:
            case "count":
                info = self._out.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                again = struct.unpack_from("=I", info, TOTAL_RETRANSMITTED_AT)[0]
                return f"{self._received} {time.monotonic_ns()} {again}"
            case "pause":
                self._idle.clear()
                self._going.clear()
                self._idle.wait()
                while self._unacknowledged():
                    time.sleep(LOOK_S)
            case "go":
                self._going.set()
        return str(time.monotonic_ns())

    def _unacknowledged(self) -> int:
        held: int = struct.unpack("=i", fcntl.ioctl(self._out, termios.TIOCOUTQ, bytes(4)))[0]
        return held

    def _send(self) -> None:
        while True:
            if not self._going.is_set():
                self._idle.set()
                self._going.wait()
            self._out.sendall(CHUNK)

    def _receive(self) -> None:
        buffer = bytearray(1 << 18)
        while count := self._into.recv_into(buffer):
            self._received += count


def main() -> None:
    flow = Flow(*sys.argv[1:4])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(flow.answer(line.strip()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
