"""What each kind of step does: a literal table from the scenario's step types to coroutines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext

from harness.clock import NS_PER_S
from harness.errors import InfrastructureError, StepFailed, UsageError
from harness.fabric.circuits import factor_round
from harness.model.busbw import smallest_bytes
from harness.model.scenario import Collectives, Generate, Op, Reconfigure, Rl, Shift
from harness.model.sizes import format_size, parse_size
from harness.run.change import listen, switch_over
from harness.run.generation.generate import generate
from harness.run.hearing import beacons_off, beacons_on, uplinks_of
from harness.run.reconfigure import reconfigure
from harness.run.rl.loop import rl
from harness.run.session import Session
from harness.tasks import beside
from harness.wire.messages import RankSamples, RunCollective, Samples

Step = Collectives | Shift | Reconfigure | Generate | Rl


async def perform(session: Session, step: Step, number: int) -> None:
    """Perform one step; errors carry their own exit code."""
    by_arm = isinstance(step, Rl)  # it tells of each arm by itself
    with nullcontext() if by_arm else session.pressed(number):
        await PERFORM[type(step)](session, step, number)


async def collectives(session: Session, step: Collectives, number: int) -> None:
    """Sweep operations and sizes over the path in force, one row per group of ranks."""
    for label, groups in rounds(session, step):
        await session.ensure_groups(groups)
        for op in step.ops:
            for size in step.sizes:
                await _collective(session, step, op, parse_size(size), label)


def rounds(
    session: Session, step: Collectives
) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Yield (label of the path, disjoint subgroups) to measure; no subgroups means all ranks.

    `circuits` goes switch by switch: there a ToR has one link per uplink, so the groups are
    disjoint; a ToR with several uplinks on one switch is measured with the first.
    """
    if not session.ranks_of:
        session.lay_out_ranks()
    if step.group == "all":
        yield session.shape, ()
    elif step.group == "pairs":
        pairs = factor_round(session.workers, 0)
        if not pairs:
            raise UsageError('group = "pairs" needs two nodes')
        yield session.shape, tuple(session.ranks_of[a] + session.ranks_of[b] for a, b in pairs)
    else:
        found = {name: _by_circuit(session, name) for name in session.bench.topology.switches}
        if not any(found.values()):
            raise UsageError('group = "circuits": no circuit joins nodes; bring a shape up first')
        for switch, groups in found.items():
            if groups:
                yield f"{session.shape}@{switch}", groups


def _by_circuit(session: Session, switch: str) -> tuple[tuple[int, ...], ...]:
    groups = []
    taken: set[str] = set()
    for link in sorted(link for link in session.lit if link.switches == (switch,)):
        tors = {link.a.tor, link.b.tor}
        if taken & tors:
            continue
        places = session.bench.topology.nodes
        nodes = [node for node in session.workers if tors & {nic.tor for nic in places[node].nics}]
        if tors <= {nic.tor for node in nodes for nic in places[node].nics}:
            taken |= tors
            groups.append(tuple(rank for node in nodes for rank in session.ranks_of[node]))
    return tuple(groups)


async def _collective(
    session: Session, step: Collectives, op: Op, size_bytes: int, path: str
) -> None:
    _refuse_empty(session, step, op, size_bytes)
    timeout_ns = round(step.timeout_s * NS_PER_S)
    answers = await session.everyone(
        RunCollective(
            op=op,
            size_bytes=size_bytes,
            dtype=step.dtype,
            iterations=step.iterations,
            warmup=step.warmup,
            verify=step.verify,
            use_subgroups=bool(session.subgroups),
            timeout_ns=timeout_ns,
        ),
        Samples,
        timeout_ns,
    )
    rows = [row for answer in answers.values() for row in answer.ranks]
    wrong = 0
    for group in sorted({row.group for row in rows}):
        members = sorted((row for row in rows if row.group == group), key=lambda row: row.rank)
        session.record.event("collective", collective_row(session, step, op, path, members))
        wrong += sum(row.wrong or 0 for row in members)
    if wrong:
        raise StepFailed(f"{op} over {path}, {size_bytes} B: {wrong} wrong elements")


def _refuse_empty(session: Session, step: Collectives, op: Op, size_bytes: int) -> None:
    """Refuse a size that is cut to nothing among the ranks: the file knew nodes, not GPUs."""
    ranks = max((len(group) for group in session.subgroups), default=session.world_size)
    least = smallest_bytes(op, ranks, step.dtype)
    if size_bytes < least:
        raise UsageError(
            f"{op}: {format_size(size_bytes)} leaves nothing for each of {ranks} ranks; "
            f"{step.dtype} takes {format_size(least)} or more"
        )


def collective_row(
    session: Session, step: Collectives, op: Op, path: str, members: list[RankSamples]
) -> dict[str, object]:
    """Return one row: every rank's every iteration, in rank order."""
    checked = [row.wrong for row in members if row.wrong is not None]
    return {
        "op": op,
        "path": path,
        "size_bytes": members[0].size_bytes,
        "ranks": len(members),
        "group": "all" if not session.subgroups else "-".join(str(r.rank) for r in members),
        "dtype": step.dtype,
        "times_ns": [list(row.times_ns) for row in members],
        "wrong": sum(checked) if checked else None,
        "backend": session.backend,
    }


async def shift(session: Session, step: Shift, number: int) -> None:
    """Bring a shape up with no traffic running."""
    plan = session.plans[step.shape]
    watch = await beacons_on(session, uplinks_of(plan.links))
    async with beside(listen(session, plan)) as hearing:
        change = await switch_over(session, plan, step.shape, hearing)
    await beacons_off(session, watch)
    session.record.event(
        "shape",
        {
            "step": number,
            "shape": session.shape,
            "lit": sorted(map(str, session.lit)),
            "unserved": ["-".join(edge) for edge in plan.unserved],
            "failures": change.failures,
        },
    )
    if change.failures:
        raise InfrastructureError("; ".join(change.failures.values()))


PERFORM: dict[type, Callable[[Session, object, int], Awaitable[None]]] = {
    Collectives: collectives,  # type: ignore[dict-item]  # each takes its own step type
    Shift: shift,  # type: ignore[dict-item]
    Reconfigure: reconfigure,  # type: ignore[dict-item]
    Generate: generate,  # type: ignore[dict-item]
    Rl: rl,  # type: ignore[dict-item]
}
