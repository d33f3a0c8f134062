"""What is in a trace that was checked: counts a reader wants to see before it is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from harness.rlsim.economics import aligned
from harness.rlsim.traces.meetings import Laid
from harness.rlsim.traces.model import Collective, Compute, Gpu, Mark, Memory, Node, op_of


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Counts; `kinds` by kind of node, over all ranks."""

    trace: str
    question: str
    ranks: int
    programs: int
    """How many different things ranks do."""
    nodes: int
    kinds: dict[str, int]
    groups: dict[str, str]
    """Lists of ranks of each group, in words."""
    communications: int
    bytes: int
    """Of all communications, each counted once, as nccl-tests counts a size."""
    gpu: str
    notes: tuple[str, ...]


def contents(laid: Laid) -> Contents:
    """Return what is in a trace."""
    trace = laid.trace
    kinds: Counter[str] = Counter()
    for program in trace.programs:
        for node in program.nodes:
            kinds[_kind(node)] += len(program.ranks)
    return Contents(
        trace=trace.where,
        question=trace.question,
        ranks=trace.ranks,
        programs=len(trace.programs),
        nodes=trace.nodes,
        kinds=dict(kinds),
        groups={name: _sizes(lists) for name, lists in trace.groups.items()},
        communications=len(laid.meetings.all),
        bytes=sum(meeting.bytes for meeting in laid.meetings.all),
        gpu=_gpu(trace.gpu),
        notes=trace.notes,
    )


def _kind(node: Node) -> str:
    if isinstance(node, Compute):
        return f"compute on {node.on}"
    if isinstance(node, Memory):
        return f"memory {node.to}"
    if isinstance(node, Mark):
        return "mark"
    return op_of(node) if isinstance(node, Collective) else type(node).__name__.lower()


def _sizes(lists: tuple[tuple[int, ...], ...]) -> str:
    sizes = Counter(map(len, lists))
    return ", ".join(f"{count} of {size} ranks" for size, count in sorted(sizes.items()))


def _gpu(gpu: Gpu) -> str:
    said = [gpu.kind] if gpu.kind else []
    if gpu.flop_per_s:
        said.append(f"{gpu.flop_per_s / 1e12:g} TFLOP/s")
    if gpu.memory_bytes_per_s:
        said.append(f"{gpu.memory_bytes_per_s / 1e9:g} GB/s of memory")
    return ", ".join(said) or "not said"


def lines(found: Contents) -> Iterator[str]:
    """Yield them for a reader."""
    if found.question:
        yield found.question
    programs = "program" if found.programs == 1 else "programs"
    yield (
        f"{found.trace} is sound: {found.nodes} nodes of {found.ranks} ranks,"
        f" {found.programs} {programs}; GPU: {found.gpu}"
    )
    yield from (f"  {note}" for note in found.notes)
    yield from (f"  group {name!r}: {told}" for name, told in found.groups.items())
    rows = [("nodes", "count"), *((kind, str(count)) for kind, count in found.kinds.items())]
    yield ""
    yield from aligned(rows)
    yield f"{found.communications} communications of {found.bytes} bytes in all"
