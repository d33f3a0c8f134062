"""What beacons would have told, without sending any: worked out from who was lit for how long.

A sender's beacons leave when it begins and every interval from then on, and arrive at once where
their light does. What is reported is what `agents.beacons` makes of those same arrivals. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from harness.wire.messages import Beacons, Gap

SILENCE_INTERVALS = 3
"""A silence longer than this many intervals is a gap; as agents have it."""


@dataclass(frozen=True, eq=False, slots=True)
class Stream:
    """The beacons of one uplink since they were started. Equal only to itself."""

    sender: str
    begin_ns: int
    interval_ns: int

    def first(self, from_ns: int) -> int:
        """Return the number of the first beacon at this moment or after it."""
        return max(0, -((self.begin_ns - from_ns) // self.interval_ns))

    def at_ns(self, number: int) -> int:
        """Return when a beacon leaves."""
        return self.begin_ns + number * self.interval_ns


@dataclass(eq=False, slots=True)
class Span:
    """Light of a stream arrives from `begin_ns` on, and not any more at `end_ns`."""

    stream: Stream
    begin_ns: int
    end_ns: int | None = None

    def numbers(self, now_ns: int, since_ns: int = -1) -> range:
        """Return the numbers of the beacons that arrived by now, of those after `since_ns`."""
        end_ns = now_ns + 1 if self.end_ns is None else min(self.end_ns, now_ns + 1)
        first = self.stream.first(max(self.begin_ns, since_ns + 1))
        return range(first, max(first, self.stream.first(end_ns)))


@dataclass(eq=False)
class Record:
    """What one device heard: its spans in order of time."""

    spans: list[Span] = field(default_factory=list)

    def begin(self, stream: Stream, now_ns: int) -> None:
        """Hear a stream from now on."""
        self.spans.append(Span(stream, now_ns))

    def end(self, now_ns: int) -> None:
        """Hear nobody from now on; of whom nothing arrived meanwhile nothing is known."""
        if self.spans and (span := self.spans[-1]).end_ns is None:
            span.end_ns = now_ns
            if not span.numbers(now_ns):
                self.spans.pop()

    def heard_ns(self, sender: str, since_ns: int, now_ns: int) -> int | None:
        """Return when a sender was first heard after `since_ns`, or will be if all stays as it is.

        None: it will not be.
        """
        found = None
        for span in reversed(self.spans):
            if span.end_ns is not None and span.end_ns <= since_ns:
                break
            if span.stream.sender == sender:
                if numbers := span.numbers(now_ns, since_ns):
                    found = span.stream.at_ns(numbers[0])
                elif span.end_ns is None and found is None:
                    found = span.stream.at_ns(numbers.start)
        return found

    def since(self, since_ns: int, now_ns: int) -> list[tuple[Stream, range]]:
        """Return who was heard after `since_ns`, by what beacons; before those, whoever was last.

        Of whoever was last before, the last beacon only.
        """
        found: list[tuple[Stream, range]] = []
        for span in reversed(self.spans):
            numbers = span.numbers(now_ns)
            if not numbers:
                continue
            late = span.numbers(now_ns, since_ns)
            if len(late) < len(numbers):
                before = numbers[len(numbers) - len(late) - 1]
                return [(span.stream, range(before, numbers.stop)), *reversed(found)]
            found.append((span.stream, numbers))
        return found[::-1]


def report(records: Mapping[str, Record], interval_ns: int, since_ns: int, now_ns: int) -> Beacons:
    """Return what happened after `since_ns`, by device; `last` is told however old it is.

    Since 0 is since the beginning: then all is counted.
    """
    counted_ns = since_ns if since_ns > 0 else -1
    last, first_ns, lost, received = {}, {}, {}, {}
    gaps: list[Gap] = []
    for device, record in records.items():
        heard = record.since(counted_ns, now_ns)
        arrived = [(stream, _after(stream, numbers, since_ns)) for stream, numbers in heard]
        received[device] = sum(len(_after(*each, counted_ns)) for each in heard)
        lost[device] = sum(_lost(heard))
        gaps += _gaps(device, heard, SILENCE_INTERVALS * interval_ns)
        if heard:
            last[device] = heard[-1][0].sender
            stamps = (
                stream.at_ns(numbers[0])
                for stream, numbers in arrived
                if numbers and stream.sender == last[device]
            )
            if (first := next(stamps, None)) is not None:
                first_ns[device] = first
    gaps.sort(key=lambda gap: gap.first_ns)
    return Beacons(last=last, first_ns=first_ns, gaps=tuple(gaps), lost=lost, received=received)


def _after(stream: Stream, numbers: range, since_ns: int) -> range:
    return range(max(numbers.start, stream.first(since_ns + 1)), numbers.stop)


def _lost(heard: Iterable[tuple[Stream, range]]) -> Iterable[int]:
    """Yield how many beacons of one stream were missing between two that were heard."""
    for (stream, before), (after_stream, after) in pairwise(heard):
        if stream is after_stream:
            yield after[0] - before[-1] - 1


def _gaps(device: str, heard: Iterable[tuple[Stream, range]], silence_ns: int) -> Iterable[Gap]:
    for (stream, before), (after_stream, after) in pairwise(heard):
        last_ns, first_ns = stream.at_ns(before[-1]), after_stream.at_ns(after[0])
        if first_ns - last_ns > silence_ns:
            yield Gap(
                device=device,
                last_ns=last_ns,
                first_ns=first_ns,
                before=stream.sender,
                after=after_stream.sender,
            )
