"""The labour of a ToR's agent on a simulated bench: who is heard on its uplinks, what crossed them.

Beacons are not sent: what was heard of them is worked out from the light there was when somebody
asks (`harness.bench.simulated.beacons`). So as long as nothing changes they cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from harness.bench.simulated.beacons import Record, Stream, report
from harness.bench.simulated.light import Light
from harness.bench.simulated.network import ELECTRICAL, Fabric
from harness.bench.simulated.world import Verb
from harness.clock import NS_PER_S, NS_PER_US, Clock
from harness.fabric.links import Uplink
from harness.fabric.prediction import PAYLOAD_SHARE
from harness.fabric.topology import Topology
from harness.model.advance import FOREVER_NS
from harness.wire.messages import (
    Beacons,
    Counters,
    Done,
    Failure,
    Heard,
    Message,
    ReadCounters,
    StartBeacons,
    StopBeacons,
)

INTERVAL_MIN_NS = 200 * NS_PER_US
"""As agents have it."""
NOBODY = Failure(error="NoBeacons", text="no beacons were started on this node")
STOPPED = Failure(error="NoBeacons", text="the beacons were stopped meanwhile")


class Air:
    """The beacons between all ToRs: who sends any, and who hears them by the light there is."""

    def __init__(self, topology: Topology, light: Light, clock: Clock) -> None:
        self._light, self._clock = light, clock
        self._streams: dict[Uplink, Stream] = {}
        self._ears: dict[Uplink, Listening] = {}
        self._heard_at: dict[Uplink, Uplink] = {}
        """Per sender, where its beacons arrive and are heard."""
        self._uplinks: dict[str, dict[str, Uplink]] = {tor: {} for tor in topology.tors}
        for up in topology.uplinks:
            self._uplinks[up.tor][up.device] = up
        light.listeners.append(self._turned)

    def now_ns(self) -> int:
        """Return the present moment."""
        return self._clock.now_ns()

    def devices(self, tor: str) -> Collection[str]:
        """Return the uplinks of a ToR."""
        return self._uplinks[tor].keys()

    def start(self, tor: str, ears: Listening) -> None:
        """Send beacons out of the uplinks of a ToR that somebody listens to, and let him hear."""
        now_ns = self.now_ns()
        ups = [self._uplinks[tor][device] for device in ears.records]
        for up in ups:
            self._streams[up], self._ears[up] = Stream(str(up), now_ns, ears.interval_ns), ears
        for up in ups:
            self._join(up)
            if (sender := self._light.near(up)) is not None:
                self._join(sender)

    def stop(self, tor: str, ears: Listening) -> None:
        """Send no more out of these, and hear nobody."""
        for device in ears.records:
            up = self._uplinks[tor][device]
            self._part(up)
            if (sender := self._light.near(up)) is not None:
                self._part(sender)
            del self._streams[up], self._ears[up]

    def _turned(self, senders: Sequence[Uplink]) -> None:
        for sender in senders:
            self._part(sender)
        for sender in senders:
            self._join(sender)

    def _join(self, sender: Uplink) -> None:
        far, stream = self._light.far(sender), self._streams.get(sender)
        if stream is None or far is None or far is sender or sender in self._heard_at:
            return
        if far in self._ears:
            self._heard_at[sender] = far
            self._ears[far].begin(far.device, stream, self.now_ns())

    def _part(self, sender: Uplink) -> None:
        if (far := self._heard_at.pop(sender, None)) is not None:
            self._ears[far].records[far.device].end(self.now_ns())


class Listening:
    """What a ToR has heard since it began to listen."""

    def __init__(self, asked: StartBeacons) -> None:
        self.interval_ns = asked.interval_ns
        self.records = {device: Record() for device in asked.devices}
        self.stopped = False
        self._news = asyncio.Event()

    def begin(self, device: str, stream: Stream, now_ns: int) -> None:
        """Hear a stream on a device from now on."""
        self.records[device].begin(stream, now_ns)
        self.stir()

    def stir(self) -> None:
        """Wake those who wait."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, asked: Heard, clock: Clock) -> None:
        """Return when the expected far ends were heard, or `wait_ns` is over, or nobody listens."""
        over_ns = clock.now_ns() + asked.wait_ns
        while not self.stopped and (now_ns := clock.now_ns()) < over_ns:
            due_ns = self._due_ns(asked, now_ns)
            if due_ns <= now_ns:
                return
            news, left_ns = self._news, min(due_ns, over_ns) - now_ns
            with suppress(TimeoutError):
                async with asyncio.timeout(left_ns / NS_PER_S):
                    await news.wait()

    def _due_ns(self, asked: Heard, now_ns: int) -> int:
        """Return when all expected ones are heard, if all stays as it is."""
        heard = (
            self.records[device].heard_ns(sender, asked.since_ns, now_ns)
            for device, sender in asked.expect.items()
        )
        return max(FOREVER_NS if at_ns is None else at_ns for at_ns in heard)


class Listener:
    """The labour: beacons and counters of one ToR."""

    def __init__(self, tor: str, air: Air, fabric: Fabric, clock: Clock) -> None:
        self._tor, self._air, self._fabric, self._clock = tor, air, fabric, clock
        self._listening: Listening | None = None

    def verbs(self) -> Mapping[type[Message], Verb]:
        """Return who answers what."""
        return {
            StartBeacons: self._start,
            Heard: self._heard,
            StopBeacons: self._stop,
            ReadCounters: self._count,
        }

    def close(self) -> None:
        """Stop sending and listening."""
        listening, self._listening = self._listening, None
        if listening is not None:
            self._air.stop(self._tor, listening)
            listening.stopped = True
            listening.stir()

    async def _start(self, asked: StartBeacons) -> Message:
        if self._listening is not None:
            return Failure(error="Busy", text="beacons are sent already: stop them first")
        there = self._air.devices(self._tor)
        if missing := sorted({*asked.devices} - {*there}):
            text = f"no network device {', '.join(missing)} here; there are {sorted(there)}"
            return Failure(error="Refused", text=text)
        if asked.interval_ns < INTERVAL_MIN_NS:
            text = f"beacons every {asked.interval_ns} ns: {INTERVAL_MIN_NS} ns is the shortest"
            return Failure(error="Refused", text=text)
        self._listening = Listening(asked)
        self._air.start(self._tor, self._listening)
        return Done(t_ns=self._clock.now_ns())

    async def _heard(self, asked: Heard) -> Message:
        listening = self._listening
        if listening is None:
            return NOBODY
        if missing := sorted({*asked.expect} - listening.records.keys()):
            return Failure(error="Refused", text=f"no beacons on {', '.join(missing)}")
        if asked.expect:
            await listening.wait(asked, self._clock)
        return STOPPED if listening.stopped else self._report(listening, asked.since_ns)

    async def _stop(self, _asked: StopBeacons) -> Message:
        if self._listening is None:
            return NOBODY
        found = self._report(self._listening, 0)
        self.close()
        return found

    def _report(self, listening: Listening, since_ns: int) -> Beacons:
        now_ns = self._clock.now_ns()
        return report(listening.records, listening.interval_ns, since_ns, now_ns)

    async def _count(self, _asked: ReadCounters) -> Message:
        """Counters tell bytes of frames, the network those of payload."""
        sent, received = self._fabric.crossed(self._tor)
        return Counters(
            sent_bytes={name: round(size / PAYLOAD_SHARE) for name, size in sent.items()},
            received_bytes={name: round(size / PAYLOAD_SHARE) for name, size in received.items()},
            t_ns=self._clock.now_ns(),
            down=() if ELECTRICAL in sent else (ELECTRICAL,),
        )
