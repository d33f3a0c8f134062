"""ZeroMQ sockets as both sides use them: CURVE on, sizes bounded, served by the event loop.

`LoopSocket` puts a plain socket on the running event loop, with no thread hop and no future for
each operation as ``zmq.asyncio`` has. ZeroMQ's descriptor is edge-triggered, and sends consume its
edges too: it must be drained until empty on every wake and looked at again after every send.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from harness.errors import UsageError
from harness.processes import is_real_time
from harness.wire.codec import MAX_MESSAGE_BYTES
from harness.wire.keys import Pair

_DOMAIN = "harness"
_AT_ONCE = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
"""Plain integers: or-ing flags anew for every message cost more than encoding it."""
_BATCH = 256
"""Messages served before other tasks get their turn."""

Frame = zmq.Frame
Context = zmq.Context[zmq.Socket[bytes]]
Receive = Callable[[list[Frame]], None]


class LoopSocket:
    """Calls `receive` with the frames of each message. `receive` must not raise or block."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Receive) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.FD
        self._again = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._look_again()

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message, never waiting; False when the peer cannot take it just now."""
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE)
            self._socket.send(frames[-1], _AT_ONCE)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            return False
        finally:
            self._look_again()
        return True

    def close(self, linger_ms: int) -> None:
        """Stop serving and close the socket. `linger_ms` bounds what is still to be sent."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger_ms)

    def _look_again(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._again = False
        if self._socket.closed:
            return
        for _ in range(_BATCH):
            if not cast("int", self._socket.getsockopt(_EVENTS)) & _READABLE:
                return
            frames = [self._socket.recv(_AT_ONCE, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(_AT_ONCE, copy=False))
            self._receive(frames)
            if self._socket.closed:
                return
        self._look_again()


class Doorkeeper(ThreadAuthenticator):
    """Lets in the keys of an allow-list; messages then carry the *name* of their key as User-Id."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[str, str]) -> None:
        super().__init__(context)
        self._names = {key: name for name, key in allowed.items()}
        self.configure_curve_callback(_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell whether the (Z85) key may come in."""
        return key.decode("ascii") in self._names

    def curve_user_id(self, client_public_key: bytes) -> str:
        """Return the name that the key belongs to."""
        return self._names[super().curve_user_id(client_public_key)]


def new_context() -> Context:
    """Return a context whose own threads run in real time if the calling thread does.

    They carry every message; a real-time event loop that waits for an ordinary thread is none.
    """
    context: Context = zmq.Context()
    if is_real_time():
        context.set(zmq.THREAD_PRIORITY, 1)
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_FIFO)
    return context


def server_socket(context: Context, pair: Pair) -> zmq.Socket[bytes]:
    """Return an unbound ROUTER that speaks CURVE as `pair` and tells when a peer is unreachable."""
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_secretkey = pair.secret.encode("ascii")
    socket.zap_domain = _DOMAIN.encode("ascii")
    socket.router_mandatory = True
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _bound_and_watched(socket)
    return socket


def client_socket(context: Context, pair: Pair, server: str, identity: bytes) -> zmq.Socket[bytes]:
    """Return an unconnected DEALER that speaks CURVE as `pair` to the holder of key `server`."""
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = server.encode("ascii")
    socket.curve_publickey = pair.public.encode("ascii")
    socket.curve_secretkey = pair.secret.encode("ascii")
    socket.routing_id = identity
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 1000
    _bound_and_watched(socket)
    return socket


def _bound_and_watched(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.heartbeat_ivl = 2_000  # ms; closes half-open connections so that they are made anew
    socket.heartbeat_timeout = 6_000
    socket.heartbeat_ttl = 6_000


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"address {text!r}: write HOST:PORT, as in 10.0.0.1:7700")
    return host, int(port)
