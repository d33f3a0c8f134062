"""What is wrong with a trace, all of it at once, each problem with its ranks and its node. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from harness.errors import BadFile
from harness.rlsim.traces import graph
from harness.rlsim.traces.meetings import Laid, lay
from harness.rlsim.traces.model import Trace, ranges, told_ranks
from harness.rlsim.traces.standing import deadlock

PROBLEMS_MAX = 100
"""Those that are told; a count tells of the others."""


def checked(trace: Trace) -> Laid:
    """Return a trace as it can be replayed; raises `BadFile` with every problem found."""
    laid = lay(trace)
    problems = list(dict.fromkeys(_problems(laid)))
    if problems:
        more = len(problems) - PROBLEMS_MAX
        raise BadFile(
            trace.where, problems[:PROBLEMS_MAX] + ([f"... and {more} more"] if more > 0 else [])
        )
    return laid


def _problems(laid: Laid) -> Iterator[str]:
    trace = laid.trace
    if not trace.programs:
        yield "no ranks: there is nothing in it"
        return
    amiss = [*_ranks(trace), *_groups(trace)]
    yield from amiss
    for program in trace.programs:
        of = told_ranks(program.ranks)
        yield from (f"{of}: {problem}" for problem in graph.problems(program.nodes, trace.gpu))
    yield from laid.meetings.problems
    if not amiss:  # who waits for whom means nothing where ranks are doubled or not there
        yield from deadlock(laid)


def _ranks(trace: Trace) -> Iterator[str]:
    counts = Counter(rank for program in trace.programs for rank in program.ranks)
    if twice := sorted(rank for rank, count in counts.items() if count > 1):
        yield f"{told_ranks(twice)}: more than one program"
    if missing := sorted({*range(max(counts, default=-1) + 1)} - {*counts}):
        yield f"{told_ranks(missing)}: no program, though ranks go up to {max(counts)}"


def _groups(trace: Trace) -> Iterator[str]:
    there = {rank for program in trace.programs for rank in program.ranks}
    if "" in trace.groups:
        yield "group '': a group needs a name"
    for name, lists in trace.groups.items():
        counts = Counter(rank for ranks in lists for rank in ranks)
        if strange := sorted(rank for rank in counts if rank not in there):
            known = ranges(sorted(there))
            yield f"group {name!r}: {told_ranks(strange)} not there; there are {known}"
        if twice := sorted(rank for rank, count in counts.items() if count > 1):
            yield f"group {name!r}: {told_ranks(twice)} listed more than once"
        if not all(lists) or not lists:
            yield f"group {name!r}: a list without ranks"
