"""A replay as a timeline that Perfetto and chrome://tracing open: a process a rank, a track a lane.

The format is the Trace Event Format: complete events, times in us. Communications that go on at
once are on tracks side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.clock import NS_PER_US
from harness.rlsim.traces.model import (
    Collective,
    Compute,
    Memory,
    Node,
    Recv,
    Send,
    lane_of,
    op_of,
    told,
)
from harness.rlsim.traces.replay import Replay, Span

LANES = {"gpu": 0, "cpu": 1, "memory": 2}
TALK = 3
"""The first track of communications."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event; `ph` M names a process or a track, X is something that lasts."""

    ph: str
    name: str
    pid: int
    tid: int | None = None
    cat: str = ""
    ts: float | None = None
    dur: float | None = None
    args: dict[str, str | int] = {}


def chunks(replay: Replay) -> Iterator[str]:
    """Yield the text of a file, an event a line; the replay must have kept its spans."""
    assert replay.spans is not None, "keep_spans"
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    before = ""
    by_rank: dict[int, list[Span]] = {rank: [] for rank in replay.laid.program}
    for span in replay.spans:
        by_rank[span.rank].append(span)
    for rank, spans in sorted(by_rank.items()):
        node, gpu = replay.talks.seats[rank]
        for event in _of_rank(replay, rank, spans, f"rank {rank} ({node}, GPU {gpu})"):
            yield before + msgspec.json.encode(event).decode()
            before = ",\n"
    yield "\n]}\n"


def _of_rank(replay: Replay, rank: int, spans: list[Span], name: str) -> Iterator[Event]:
    yield Event(ph="M", name="process_name", pid=rank, args={"name": name})
    nodes = replay.laid.program[rank].nodes
    free_ns: list[int] = []
    used: dict[int, str] = {}
    for span in sorted(spans, key=lambda span: (span.begin_ns, span.place)):
        node = nodes[span.place]
        if isinstance(node, Compute | Memory):
            title = str(lane_of(node))
            track = LANES[title]
        else:
            number = _track(free_ns, span)
            track, title = TALK + number, f"communication {number + 1}"
        used[track] = title
        yield _event(node, span, track)
    for track, title in sorted(used.items()):
        yield Event(ph="M", name="thread_name", pid=rank, tid=track, args={"name": title})


def _track(free_ns: list[int], span: Span) -> int:
    """Return the first track of communications on which nothing else goes on."""
    for number, until_ns in enumerate(free_ns):
        if until_ns <= span.begin_ns:
            free_ns[number] = span.end_ns
            return number
    free_ns.append(span.end_ns)
    return len(free_ns) - 1


def _event(node: Node, span: Span, track: int) -> Event:
    args: dict[str, str | int] = {"node": node.id}
    kind = type(node).__name__.lower()
    if isinstance(node, Collective | Send | Recv):
        args["bytes"] = node.bytes
        kind = op_of(node)
    if isinstance(node, Collective):
        args["group"] = node.group
    elif isinstance(node, Send | Recv):
        args |= {"peer": node.peer, "tag": node.tag}
    return Event(
        ph="X",
        name=node.name or told(node),
        pid=span.rank,
        tid=track,
        cat=kind,
        ts=span.begin_ns / NS_PER_US,
        dur=(span.end_ns - span.begin_ns) / NS_PER_US,
        args=args,
    )
