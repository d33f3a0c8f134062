"""The agent's heartbeat, clock echo and watchdog: one thread that work cannot block.

It answers each probe with two stamps, and counts the coordinator's silence. After ``lost_ns`` it
asks the event loop to end the agent; if that has not come about `END_WITHIN_NS` later (the loop is
stuck), it kills the labour and the process itself. So an agent never outlives its coordinator by
more than ``lost_ns + END_WITHIN_NS`` plus one beat.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import zmq

from agents.meeting import Context, Coordinator, Met
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import ExitCode
from harness.wire.codec import BEAT, WireError, echo, parse_probe
from harness.wire.pulse import Silence
from harness.wire.sockets import client_socket

END_WITHIN_NS = 7 * NS_PER_S
"""The labour has 5 s to close, its last resort and the sockets the rest."""


class Pulse(threading.Thread):
    """Ends when `context` is terminated; `ended` tells it that the agent's work has stopped."""

    def __init__(
        self,
        context: Context,
        coordinator: Coordinator,
        met: Met,
        *,
        lost: Callable[[int], None],
        kill_now: Callable[[], None],
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._met = met
        self._lost = lost
        self._kill_now = kill_now
        self.ended = threading.Event()
        self._socket = client_socket(context, coordinator.pair, coordinator.key, met.identity)
        self._address = f"tcp://{coordinator.host}:{met.welcome.pulse_port}"

    def run(self) -> None:
        """Beat, echo and watch."""
        try:
            self._socket.connect(self._address)
            silence_ns = self._until_lost()
            self._watch_the_end(silence_ns)
        except zmq.ContextTerminated:
            pass  # the orderly end
        finally:
            self._socket.close(0)

    def _until_lost(self) -> int:
        beat_ns = self._met.welcome.beat_ns
        now = time.monotonic_ns()
        silence, said_ns = Silence(beat_ns, now), 0
        while True:
            if now - said_ns >= beat_ns:
                self._send(BEAT)
                said_ns = now
            if self._socket.poll(beat_ns // NS_PER_MS + 1):
                said_ns = self._echo_all(silence) or said_ns
            now = time.monotonic_ns()
            if (silent_ns := silence.at(now)) > self._met.welcome.lost_ns:
                return silent_ns

    def _echo_all(self, silence: Silence) -> int:
        t3 = 0
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return t3
            t2 = time.monotonic_ns()
            try:
                t1 = parse_probe(data)
            except WireError:
                continue  # it holds the coordinator's key, but speaks a newer minor version
            t3 = time.monotonic_ns()
            self._send(echo(t1, t2, t3))
            silence.heard(t2)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return  # not connected: there will be another beat

    def _watch_the_end(self, silence_ns: int) -> None:
        self._lost(silence_ns)
        if self.ended.wait(END_WITHIN_NS / NS_PER_S):
            return
        self._kill_now()
        sys.stderr.write("agent: the event loop is stuck; killed the labour and ended\n")
        sys.stderr.flush()
        os._exit(ExitCode.INFRASTRUCTURE)
