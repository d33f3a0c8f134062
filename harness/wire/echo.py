"""The agent's side of the pulse: heartbeat and clock echo, in a thread work cannot block.

It answers each probe with two stamps, beats when no probe comes, and counts the coordinator's
silence. After ``lost_ns`` of it, it calls `lost` with the silence, once, and ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from harness.clock import NS_PER_MS
from harness.wire.codec import BEAT, WireError, echo, parse_probe
from harness.wire.meeting import Met
from harness.wire.pulse import Silence
from harness.wire.sockets import client_socket


class Echo(threading.Thread):
    """Runs until the coordinator is lost or `met` is closed.

    `lost` is called in this thread and may take its time: nothing else is left to do here.
    `broken` gets what should not have happened.
    """

    def __init__(
        self, met: Met, *, lost: Callable[[int], None], broken: Callable[[Exception], None]
    ) -> None:
        super().__init__(name="echo", daemon=True)
        self._welcome, self._lost, self._broken = met.welcome, lost, broken
        whom = met.coordinator
        self._socket = client_socket(met.context, whom.pair, whom.key, met.identity)
        self._address = f"tcp://{whom.host}:{met.welcome.pulse_port}"

    def run(self) -> None:
        """Beat, echo and watch."""
        try:
            self._socket.connect(self._address)
            silence_ns = self._until_lost()
        except zmq.ContextTerminated:
            return  # the orderly end
        except Exception as error:  # without a heartbeat the agent must not go on
            self._broken(error)
            return
        finally:
            self._socket.close(0)
        self._lost(silence_ns)

    def _until_lost(self) -> int:
        beat_ns = self._welcome.beat_ns
        now = time.monotonic_ns()
        silence, said_ns = Silence(beat_ns, now), 0
        while True:
            if now - said_ns >= beat_ns:
                self._send(BEAT)
                said_ns = now
            if self._socket.poll(beat_ns // NS_PER_MS + 1):
                said_ns = self._echo_all(silence) or said_ns
            now = time.monotonic_ns()
            if (silent_ns := silence.at(now)) > self._welcome.lost_ns:
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
