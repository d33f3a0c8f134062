"""What a replay found: values with units, in JSON and as lines for a reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from harness.clock import NS_PER_MS, NS_PER_US
from harness.model.busbw import busbw_gb_per_s
from harness.model.scenario import Op
from harness.rlsim.collectives import Basis
from harness.rlsim.economics import aligned

RANKS_SHOWN = 16
"""Of more, the first to end and the last are told; JSON has all."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank; its times add up to the makespan."""

    rank: int
    node: str
    gpu: int
    end_ms: float
    """When its last node ended."""
    compute_ms: float
    """Something of it computes, or moves memory."""
    exposed_ms: float
    """It communicates, and nothing computes meanwhile."""
    waiting_ms: float
    """It waits for ranks that have not come, and nothing else goes on."""
    idle_ms: float


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """All of one kind among as many ranks; `group` is "" for sends. Means are over `count`."""

    group: str
    op: Op
    size_bytes: int
    ranks: int
    count: int
    mean_us: float
    min_us: float
    max_us: float
    busbw_gb_per_s: float
    """Of the mean, exactly as nccl-tests defines it."""
    algorithm: str
    protocol: str
    basis: Basis
    """A measured table, a model scaled to the edge of one, or the model alone."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """A communication that began and never ended, and why."""

    op: Op
    group: str
    ranks: str
    nodes: tuple[str, ...]
    because: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A whole replay. `end` says whether all nodes ended; `not_run` how many did not, by rank."""

    trace: str
    question: str
    bench: str
    basis: tuple[str, ...]
    """What times are taken from, in words."""
    notes: tuple[str, ...]
    end: Literal["finished", "blocked"]
    nodes: int
    makespan_ms: float
    ranks: tuple[RankTimes, ...]
    communications: tuple[Communication, ...]
    blocked: tuple[Blocked, ...] = ()
    not_run: dict[int, int] = {}


def communication(
    kind: tuple[str, Op, int, int], times_ns: Sequence[int], planned: tuple[str, str, Basis]
) -> Communication:
    """Return the row of one kind: (group, op, bytes, ranks), how long each took, and by what."""
    group, op, size, ranks = kind
    algorithm, protocol, basis = planned
    mean_ns = sum(times_ns) / len(times_ns)
    busbw = busbw_gb_per_s(op, size, ranks, mean_ns) if mean_ns else 0.0
    return Communication(
        group=group,
        op=op,
        size_bytes=size,
        ranks=ranks,
        count=len(times_ns),
        mean_us=mean_ns / NS_PER_US,
        min_us=min(times_ns) / NS_PER_US,
        max_us=max(times_ns) / NS_PER_US,
        busbw_gb_per_s=busbw,
        algorithm=algorithm,
        protocol=protocol,
        basis=basis,
    )


# -- lines -----------------------------------------------------------------------------------------


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield what a reader wants to know; what it rests on comes first."""
    if outcome.question:
        yield outcome.question
    yield f"Simulated: {outcome.trace} on bench {outcome.bench}."
    yield from (f"  {each}" for each in (*outcome.basis, *outcome.notes))
    yield ""
    yield from _ending(outcome)
    yield ""
    yield from _ranks(outcome.ranks)
    if outcome.communications:
        yield ""
        yield from _communications(outcome.communications)


def _ending(outcome: Outcome) -> Iterator[str]:
    if outcome.end == "finished":
        yield (
            f"finished: {outcome.nodes} nodes of {len(outcome.ranks)} ranks"
            f" in {outcome.makespan_ms:.3f} ms"
        )
        return
    count = sum(outcome.not_run.values())
    yield (
        f"BLOCKED after {outcome.makespan_ms:.3f} ms: {count} of {outcome.nodes} nodes did not end,"
        f" on {len(outcome.not_run)} of {len(outcome.ranks)} ranks"
    )
    for blocked in outcome.blocked:
        what = f"{blocked.op} of group {blocked.group!r}" if blocked.group else blocked.op
        yield f"  {what} of {blocked.ranks} ({', '.join(blocked.nodes)}): {blocked.because}"
    yield "  all others wait for these"


def _ranks(ranks: Sequence[RankTimes]) -> list[str]:
    shown: Iterable[RankTimes] = ranks
    if len(ranks) > RANKS_SHOWN:
        by_end = sorted(ranks, key=lambda one: (one.end_ms, one.rank))
        half = RANKS_SHOWN // 2
        shown = sorted((*by_end[:half], *by_end[-half:]), key=lambda one: one.rank)
    names = ("end", "compute", "exposed communication", "waiting for ranks", "idle")
    rows: list[tuple[str, ...]] = [
        ("rank", "node", "GPU", *(f"{name} [ms]" for name in names)),
        *(
            (
                str(one.rank),
                one.node,
                str(one.gpu),
                *(f"{ms:.3f}" for ms in _times(one)),
            )
            for one in shown
        ),
    ]
    means = [sum(column) / len(ranks) for column in zip(*map(_times, ranks), strict=True)]
    rows.append(("mean", "", "", *(f"{ms:.3f}" for ms in means)))
    found = aligned(rows, texts=2)
    if len(ranks) > RANKS_SHOWN:
        half = RANKS_SHOWN // 2
        found.append(f"({half} that end first and {half} that end last; --json tells all)")
    return found


def _times(one: RankTimes) -> tuple[float, ...]:
    return one.end_ms, one.compute_ms, one.exposed_ms, one.waiting_ms, one.idle_ms


def _communications(found: Sequence[Communication]) -> list[str]:
    head = ("group", "operation", "algorithm", "basis", "size [B]", "ranks", "count")
    rows: list[tuple[str, ...]] = [
        (*head, "mean [us]", "min [us]", "max [us]", "busbw [GB/s]"),
        *(
            (
                one.group or "-",
                one.op,
                f"{one.algorithm}/{one.protocol}",
                one.basis,
                str(one.size_bytes),
                str(one.ranks),
                str(one.count),
                f"{one.mean_us:.2f}",
                f"{one.min_us:.2f}",
                f"{one.max_us:.2f}",
                f"{one.busbw_gb_per_s:.2f}",
            )
            for one in found
        ),
    ]
    return aligned(rows, texts=4)


def ms(duration_ns: int) -> float:
    """Return ns in ms."""
    return duration_ns / NS_PER_MS
