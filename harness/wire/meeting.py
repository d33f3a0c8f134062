"""The agent's side of the first contact: hello, and welcome or a refusal.

Plain blocking code, before there is an event loop or any work to stop. Raises
`InfrastructureError` with the one line that a person needs: nobody there, wrong key on either
side, or refused (version, name taken) with the coordinator's reason.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError
from harness.wire import codec
from harness.wire.keys import Pair
from harness.wire.messages import Envelope, Hello, Refusal, Welcome
from harness.wire.sockets import Context, client_socket, new_context

_HELLO_AGAIN_NS = NS_PER_S
_FAILED_HANDSHAKES = 5
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@dataclass(frozen=True)
class Coordinator:
    """Whom to meet: address, the public key it must prove to hold, and our own pair."""

    host: str
    port: int
    key: str
    pair: Pair


@dataclass(frozen=True)
class Met:
    """The outcome: an open socket on which we are known, the terms, and whom we know."""

    coordinator: Coordinator
    context: Context
    socket: zmq.Socket[bytes]
    identity: bytes
    welcome: Welcome
    run: str
    epoch: int

    def close(self) -> None:
        """End the connection: waits for what its closed sockets still send, within their linger."""
        self.context.term()


def meet(coordinator: Coordinator, hello: Hello, max_wait_ns: int) -> Met:
    """Say hello until welcomed. The identity is fresh for each process, the name is the key's."""
    context = new_context()
    name = coordinator.pair.name
    identity = f"{name}/{os.getpid()}-{os.urandom(4).hex()}".encode()
    work = client_socket(context, coordinator.pair, coordinator.key, identity)
    monitor = work.get_monitor_socket(_HANDSHAKES)
    try:
        work.connect(f"tcp://{coordinator.host}:{coordinator.port}")
        deadline_ns = time.monotonic_ns() + max_wait_ns
        welcome, envelope = _talk(work, monitor, coordinator, hello, deadline_ns)
        work.disable_monitor()
        monitor.close()
    except BaseException as error:
        context.destroy(0)
        if isinstance(error, zmq.ZMQError):
            where = f"{coordinator.host}:{coordinator.port}"
            raise InfrastructureError(f"cannot connect to {where}: {error.strerror}") from error
        raise
    return Met(coordinator, context, work, identity, welcome, envelope.run, envelope.epoch)


def _talk(
    work: zmq.Socket[bytes],
    monitor: zmq.Socket[bytes],
    coordinator: Coordinator,
    hello: Hello,
    deadline_ns: int,
) -> tuple[Welcome, Envelope]:
    failed = say_at = 0
    where = f"{coordinator.host}:{coordinator.port}"
    poller = zmq.Poller()
    poller.register(work, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while (now := time.monotonic_ns()) < deadline_ns:
        if now >= say_at:
            say_at = now + _HELLO_AGAIN_NS
            _say(work, coordinator.pair.name, hello)
        ready = dict(poller.poll(min(deadline_ns, say_at) // NS_PER_MS - now // NS_PER_MS + 1))
        if work in ready:
            envelope = codec.decode(work.recv())
            body = codec.decode_body(envelope)
            if isinstance(body, Refusal):
                raise InfrastructureError(f"refused by the coordinator: {body.reason}")
            if isinstance(body, Welcome):
                return body, envelope
        if monitor in ready:
            failed += 1
            _judge(recv_monitor_message(monitor)["event"], failed, coordinator, where)
    raise InfrastructureError(
        f"no coordinator answered at {where} in time: is it running, and can this node reach it?"
    )


def _say(work: zmq.Socket[bytes], name: str, hello: Hello) -> None:
    data = codec.encode(hello, run="", node=name, epoch=0, seq=0, t_mono_ns=time.monotonic_ns())
    try:
        work.send(data, zmq.NOBLOCK)
    except zmq.Again:
        return  # hellos already wait for a connection


def _judge(event: int, failed: int, coordinator: Coordinator, where: str) -> None:
    name = coordinator.pair.name
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        raise InfrastructureError(
            f"the coordinator at {where} does not know this key: copy {name}.pub of this node to "
            "the coordinator's key folder"
        )
    if failed >= _FAILED_HANDSHAKES:
        raise InfrastructureError(
            f"the peer at {where} does not hold the coordinator's key: copy its coordinator.pub "
            "to this node's key folder (or is another program listening there?)"
        )
