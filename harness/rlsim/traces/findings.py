"""A replay from end to end: placed, run, and what follows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from harness.clock import NS_PER_US
from harness.errors import UsageError
from harness.model.scenario import Op
from harness.model.simulation import beyond
from harness.rlsim.collectives import Basis
from harness.rlsim.hops import Place
from harness.rlsim.traces.ground import Ground
from harness.rlsim.traces.meetings import Laid, Meeting
from harness.rlsim.traces.model import Compute, Mark, told_ranks
from harness.rlsim.traces.outcome import (
    Blocked,
    Communication,
    Outcome,
    RankTimes,
    communication,
    ms,
)
from harness.rlsim.traces.replay import NOT_YET, Replay
from harness.rlsim.traces.talk import Talks, interconnect_of, seats_of
from harness.rlsim.traces.wires import Wires

NAMED_MAX = 8
"""Nodes that one blocked communication names."""


def replayed(laid: Laid, ground: Ground, *, keep_spans: bool = False) -> tuple[Replay, Outcome]:
    """Replay a trace that was checked; return what happened, and what follows.

    Raises `UsageError` where ranks have no place on the bench, or nobody knows its GPUs.
    """
    trace, figures, topology = laid.trace, ground.figures, ground.topology
    seats = seats_of(topology, trace.ranks, ground.pod)
    gpu = _gpu(laid, ground)
    if figures.collectives.backend == "nccl" and not gpu:
        raise UsageError(
            f"{trace.where}: on which GPUs? Calibration {figures.name} has NCCL, which differs by"
            " GPU: write gpu in a JSON trace, or collectives.gpu there, or say --gpu h100"
        )
    interconnect = interconnect_of(topology, figures, gpu, ground.tables)
    wires = Wires(topology, figures.network, ground.lit)
    # NCCL's own latencies are from end to end: what the network adds is in them.
    added_us = 0.0 if figures.collectives.backend == "nccl" else figures.network.latency_us.value
    replay = Replay(
        laid,
        Talks(interconnect, seats, wires),
        wires,
        round(added_us * NS_PER_US),
        {rank: ground.speed(node) for rank, (node, _) in enumerate(seats)},
        keep_spans=keep_spans,
    )
    replay.run()
    return replay, _outcome(replay, ground, seats)


def _gpu(laid: Laid, ground: Ground) -> str:
    """Return the kind of GPU, as the trace has it, else as the calibration has; "" where none."""
    return laid.trace.gpu.kind or ground.figures.collectives.gpu


def _outcome(replay: Replay, ground: Ground, seats: Sequence[Place]) -> Outcome:
    laid, left = replay.laid, replay.standing.left
    not_run = {rank: left[rank] for rank in sorted(left) if left[rank]}
    makespan_ns = max(account.end_ns for account in replay.accounts.values())
    if not_run:
        makespan_ns = replay.now_ns
    return Outcome(
        trace=laid.trace.where,
        question=laid.trace.question,
        bench=ground.bench.name,
        basis=tuple(_basis(laid, ground, seats)),
        notes=(*laid.trace.notes, *_notes(laid)),
        end="blocked" if not_run else "finished",
        nodes=laid.trace.nodes,
        makespan_ms=ms(makespan_ns),
        ranks=tuple(_ranks(replay, seats, makespan_ns)),
        communications=tuple(_communications(replay)),
        blocked=tuple(_blocked(replay)) if not_run else (),
        not_run=not_run,
    )


def _ranks(replay: Replay, seats: Sequence[Place], makespan_ns: int) -> Iterator[RankTimes]:
    for rank, account in replay.accounts.items():
        node, gpu = seats[rank]
        spent_ns = account.compute_ns + account.exposed_ns + account.waiting_ns
        yield RankTimes(
            rank=rank,
            node=node,
            gpu=gpu,
            end_ms=ms(account.end_ns),
            compute_ms=ms(account.compute_ns),
            exposed_ms=ms(account.exposed_ns),
            waiting_ms=ms(account.waiting_ns),
            idle_ms=ms(makespan_ns - spent_ns),
        )


def _communications(replay: Replay) -> Iterator[Communication]:
    """Yield those that ended, by kind and by what they were reckoned from, as kinds came first."""
    times_ns: dict[tuple[tuple[str, Op, int, int], tuple[str, str, Basis]], list[int]]
    times_ns = defaultdict(list)
    for meeting in replay.laid.meetings.all:
        begin_ns, end_ns = replay.times_ns.get(meeting.number, (0, NOT_YET))
        if end_ns != NOT_YET:
            kind = (meeting.group, meeting.op, meeting.bytes, len(meeting.ranks))
            planned = replay.talks.of(meeting).planned
            by = (planned.algorithm, planned.protocol, planned.basis)
            times_ns[kind, by].append(end_ns - begin_ns)
    for (kind, by), each_ns in times_ns.items():
        yield communication(kind, each_ns, by)


# -- what it rests on ------------------------------------------------------------------------------


def _basis(laid: Laid, ground: Ground, seats: Sequence[Place]) -> Iterator[str]:
    figures, backend = ground.figures, ground.figures.collectives.backend
    yield (
        f"compute: as the trace says; network: fluid flows of {ground.bench.name}, circuits"
        f" {ground.circuits}, by calibration {figures.name} of {figures.date}"
    )
    if laid.meetings.all:
        gpu = f" on {_gpu(laid, ground)}" if backend == "nccl" else ""
        yield f"collectives: {backend}{gpu}, by its model, or tables where the column basis says so"
    speeds = {node: ground.speed(node) for node in ground.topology.nodes}
    if others := [f"{node} {speed:g}" for node, speed in speeds.items() if speed != 1]:
        yield f"speeds: {', '.join(others)} times that of the trace"
    sizes = [meeting.bytes for meeting in laid.meetings.all]
    loads: list[tuple[str, float]] = [
        ("ranks", laid.trace.ranks),
        ("nodes", len({node for node, _ in seats})),
        ("link_mbit_per_s", ground.topology.rates.link_mbit_per_s),
    ]
    loads += [("size_bytes", size) for size in (min(sizes), max(sizes))] if sizes else []
    if outside := list(dict.fromkeys(beyond(figures, loads))):
        yield f"beyond what {figures.name} was fitted on: {'; '.join(outside)}"


def _notes(laid: Laid) -> Iterator[str]:
    marks = still = computes = 0
    for program in laid.trace.programs:
        many = len(program.ranks)
        marks += many * sum(isinstance(node, Mark) for node in program.nodes)
        works = [node for node in program.nodes if isinstance(node, Compute)]
        computes += many * len(works)
        still += many * sum(node.duration_ns == 0 for node in works)
    if marks:
        yield f"{marks} nodes are labels and take no time"
    if still:
        yield f"{still} of {computes} compute nodes state a duration of 0"


# -- what blocked ----------------------------------------------------------------------------------


def _blocked(replay: Replay) -> Iterator[Blocked]:
    """Yield communications that somebody came to and that never ended."""
    laid, standing = replay.laid, replay.standing
    for meeting in laid.meetings.all:
        number = meeting.number
        if standing.is_over[number] or not standing.came[number]:
            continue
        if number in replay.times_ns:
            because = replay.talks.of(meeting).lost
        elif standing.came[number] == len(meeting.seats):
            continue  # its turn did not come: that before it is told
        else:
            waits = [seat.rank for seat in meeting.seats if standing.waits[seat.rank][seat.place]]
            because = f"{told_ranks(waits)} did not come"
        yield Blocked(
            op=meeting.op,
            group=meeting.group,
            ranks=told_ranks(meeting.ranks),
            nodes=tuple(_nodes(laid, meeting)),
            because=because,
        )


def _nodes(laid: Laid, meeting: Meeting) -> Iterator[str]:
    names = list(dict.fromkeys(laid.told(seat) for seat in meeting.seats))
    yield from names[:NAMED_MAX]
    if len(names) > NAMED_MAX:
        yield f"... {len(names) - NAMED_MAX} more"
