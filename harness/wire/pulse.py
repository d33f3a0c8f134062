"""The coordinator's second socket: heartbeats and clock probes, in a thread work cannot block.

A probe is a heartbeat: the agent sees that the coordinator lives, its echo shows that the agent
lives and carries the stamps of a clock sample. Bursts (ping-pong, one probe in flight a peer) are
taken at the start, every few seconds, and at the end; single probes every beat in between.

The thread reports to the event loop through its callbacks and owns all of its state; the loop
speaks to it through a queue that is read on every turn.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import msgspec
import zmq

from harness.clock import NS_PER_MS, NS_PER_S
from harness.wire.codec import BEAT, WireError, parse_echo, probe
from harness.wire.timesync import ClockError, ClockFit, Sample, fit, same_clock, thin

FIRST_BURST = 200
SMALL_BURST = 20
SMALL_BURST_EVERY_NS = 5 * NS_PER_S
BURSTS_AT_ONCE = 4


def clock_identity() -> str:
    """Name this process's monotonic clock: kernel boot and time namespace; "" where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


class Silence:
    """How long a peer has been silent, not counting time in which we ourselves stood still."""

    def __init__(self, turn_ns: int, now_ns: int) -> None:
        self._turn_ns = turn_ns
        self._heard_ns = self._looked_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """Note a sign of life."""
        self._heard_ns = now_ns

    def at(self, now_ns: int) -> int:
        """Return the silence so far. To be called at least once a turn; longer gaps are ours."""
        gap = now_ns - self._looked_ns
        self._looked_ns = now_ns
        if gap > 2 * self._turn_ns:
            self._heard_ns = min(now_ns, self._heard_ns + gap - self._turn_ns)
        return now_ns - self._heard_ns


class Told(msgspec.Struct, frozen=True):
    """Whom the thread tells; every callback runs on the event loop."""

    lost: Callable[[str, int], None]
    """An agent was silent for so many nanoseconds; it is no longer watched."""
    clock: Callable[[str, ClockFit | ClockError], None]
    broken: Callable[[Exception], None]
    """The thread itself failed and has ended: a bug of ours."""


@dataclass
class _Peer:
    name: str
    route: bytes
    shares_clock: bool
    silence: Silence
    present: bool = False
    samples: list[Sample] = field(default_factory=list)
    taken: int = 0
    burst_left: int = 0
    last_echo_ns: int = 0
    next_burst_ns: int = 0


class Pulse:
    """Watches the agents it is told to. `socket` must be bound; the thread owns it from `start`."""

    def __init__(
        self, socket: zmq.Socket[bytes], *, beat_ns: int, lost_ns: int, told: Told
    ) -> None:
        self._socket = socket
        self._beat_ns = beat_ns
        self._lost_ns = lost_ns
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._peers: dict[bytes, _Peer] = {}
        self._waiting: deque[tuple[_Peer, int]] = deque()
        self._bursting: list[_Peer] = []
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    # -- called on the event loop ----------------------------------------------------------

    def start(self) -> None:
        """Begin; the thread ends when the socket's context is terminated."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread (at most one turn after the context's end)."""
        self._thread.join(timeout=5)

    def watch(self, name: str, route: bytes, *, shares_clock: bool) -> None:
        """Expect signs of life from `name`, whose socket's identity is `route`, from now on."""
        silence = Silence(self._beat_ns, time.monotonic_ns())
        peer = _Peer(name, route, shares_clock, silence)
        self._orders.put(lambda: self._add(peer))

    def forget(self, name: str) -> None:
        """Expect nothing more from `name`: it was told to end."""
        self._orders.put(lambda: self._drop(name))

    def burst(self, name: str, probes: int) -> None:
        """Measure the clock of `name` now; its fit is reported when done."""
        self._orders.put(
            lambda: self._waiting.extend(
                (peer, probes) for peer in self._peers.values() if peer.name == name
            )
        )

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat_ns = 0
        try:
            while True:
                now = time.monotonic_ns()
                self._socket.poll(max(0, min(next_beat_ns - now, self._beat_ns)) // NS_PER_MS + 1)
                self._obey()
                self._receive_all()
                self._start_bursts()
                now = time.monotonic_ns()
                if now >= next_beat_ns:
                    next_beat_ns = now + self._beat_ns
                    self._beat(now)
        except zmq.ContextTerminated:
            pass  # the orderly end: the link closed
        except Exception as error:  # a bug of ours must reach whoever waits on the link
            self._tell(self._told.broken, error)
        finally:
            self._socket.close(0)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _obey(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            order()

    def _add(self, peer: _Peer) -> None:
        self._drop(peer.name)
        self._peers[peer.route] = peer

    def _drop(self, name: str) -> None:
        self._peers = {r: peer for r, peer in self._peers.items() if peer.name != name}
        self._waiting = deque(item for item in self._waiting if item[0].name != name)
        self._bursting = [peer for peer in self._bursting if peer.name != name]

    def _receive_all(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            t4 = time.monotonic_ns()
            peer = self._peers.get(frames[0].bytes)
            if peer is None or len(frames) != 2 or frames[1].get("User-Id") != peer.name:
                continue  # a process that the link did not welcome; it ends by our silence
            self._received(peer, frames[1].bytes, t4)

    def _received(self, peer: _Peer, data: bytes, t4: int) -> None:
        peer.silence.heard(t4)
        if not peer.present:
            peer.present = True
            peer.next_burst_ns = t4 + SMALL_BURST_EVERY_NS
            self._waiting.append((peer, FIRST_BURST))
        if data == BEAT:
            return
        try:
            t1, t2, t3 = parse_echo(data)
        except WireError:
            return  # alive, though it talks nonsense: the link's own socket will complain
        peer.samples.append(Sample(t1, t2, t3, t4))
        peer.taken += 1
        peer.last_echo_ns = t4
        if peer.burst_left:
            peer.burst_left -= 1
            if peer.burst_left:
                self._probe(peer)
            else:
                self._bursting.remove(peer)
                self._fit(peer)

    def _start_bursts(self) -> None:
        while self._waiting and len(self._bursting) < BURSTS_AT_ONCE:
            peer, probes = self._waiting.popleft()
            if peer.burst_left:
                continue  # one is under way: its result will do
            peer.burst_left = probes
            peer.last_echo_ns = time.monotonic_ns()
            self._bursting.append(peer)
            self._probe(peer)

    def _beat(self, now: int) -> None:
        for peer in list(self._peers.values()):
            silence = peer.silence.at(now)
            if silence > self._lost_ns:
                self._drop(peer.name)
                self._tell(self._told.lost, peer.name, silence)
            elif peer.present:
                # In a burst probes follow each other; only a lost one needs a new start.
                if not peer.burst_left or now - peer.last_echo_ns > self._beat_ns:
                    self._probe(peer)
                if now >= peer.next_burst_ns:
                    peer.next_burst_ns = now + SMALL_BURST_EVERY_NS
                    self._waiting.append((peer, SMALL_BURST))

    def _probe(self, peer: _Peer) -> None:
        try:
            self._socket.send_multipart([peer.route, probe(time.monotonic_ns())], zmq.NOBLOCK)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:
            return  # unreachable just now: its silence decides

    def _fit(self, peer: _Peer) -> None:
        peer.samples = thin(peer.samples, peer.samples[-1].at)
        try:
            result = fit(peer.name, peer.samples, peer.taken)
            if peer.shares_clock:
                result = same_clock(result)
        except ClockError as error:
            peer.samples = []
            self._tell(self._told.clock, peer.name, error)
            return
        self._tell(self._told.clock, peer.name, result)
