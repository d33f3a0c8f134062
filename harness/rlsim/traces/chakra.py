"""Traces of MLCommons' Chakra, one file a rank, as nodes of a trace; what is not meant is refused.

``comm_size`` is what each rank puts in, in bytes: so PyTorch's converter writes it and ASTRA-sim
takes it. nccl-tests counts an all-gather by what comes out, which is that times the ranks. A
collective without a ``pg_name`` is of all ranks. A BARRIER is an all-reduce of nothing. A compute
node without a duration has ``num_ops`` and ``tensor_size``, for a roofline. METADATA takes no time.
Durations of communication are not taken: they are what is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from harness.clock import NS_PER_US
from harness.errors import BadFile
from harness.rlsim.traces.model import (
    WORLD,
    Collective,
    Compute,
    GroupOp,
    Mark,
    Memory,
    Named,
    Node,
    Program,
    Ranks,
    Recv,
    Send,
    Trace,
)
from harness.rlsim.traces.record import Record, Recorded, by_content, of_json, of_protobuf

N = TypeVar("N", bound=Named)

VERSIONS = ("0.0.4", "1.0.0")
PROBLEMS_MAX = 20
"""Of each file."""

OPS: tuple[tuple[str, GroupOp | None], ...] = (
    ("ALL_REDUCE", "all_reduce"),
    ("REDUCE", None),
    ("ALL_GATHER", "all_gather"),
    ("GATHER", None),
    ("SCATTER", None),
    ("BROADCAST", "broadcast"),
    ("ALL_TO_ALL", "all_to_all"),
    ("REDUCE_SCATTER", "reduce_scatter"),
    ("REDUCE_SCATTER_BLOCK", "reduce_scatter"),
    ("BARRIER", "all_reduce"),
)
"""By number, as in enum CollectiveCommType; None: there is no model of it."""


class Refused(ValueError):
    """A node that is not read, and why."""


class _Reading(NamedTuple):
    """Of one file."""

    world_size: int
    """How many ranks the trace has."""
    groups: Mapping[str, Ranks]


def trace_of(
    where: str, files: Sequence[tuple[int, str, bytes]], groups: Mapping[str, Ranks]
) -> Trace:
    """Return the trace of (rank, name, content) of its files; `groups` by ``pg_name``.

    Raises `BadFile`, naming `where`, with the problems of all files.
    """
    names = {rank: name for rank, name, _ in files}
    problems: list[str] = []
    notes: dict[str, None] = {}
    programs = []
    for data, ranks in by_content([(rank, data) for rank, _, data in files]).items():
        name = names[ranks[0]]
        reading = _Reading(len(files), groups)
        try:
            recorded = of_json(data) if name.endswith(".json") else of_protobuf(data)
            notes |= dict.fromkeys(_checked(recorded))
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        nodes, wrong = _nodes(recorded.records, reading)
        problems += [f"{name}: {problem}" for problem in wrong]
        programs.append(Program(tuple(ranks), nodes))
    if problems:
        raise BadFile(where, problems)
    lists = {name: (ranks,) for name, ranks in groups.items()}
    return Trace(where, tuple(programs), lists, notes=tuple(notes))


def _checked(recorded: Recorded) -> Iterator[str]:
    """Yield what to know of a file's version; raises `ValueError` for one that is not read."""
    if not recorded.version:
        yield f"no version of the Chakra schema is stated: read as {VERSIONS[0]}"
    elif recorded.version not in VERSIONS:
        raise ValueError(
            f"version {recorded.version!r} of the Chakra schema; read are {' and '.join(VERSIONS)}"
        )


def _nodes(records: Sequence[Record], reading: _Reading) -> tuple[tuple[Node, ...], list[str]]:
    nodes, problems = [], []
    for record in records:
        try:
            nodes.append(_node(record, reading))
        except Refused as error:
            problems.append(f"node {record.id} {record.name!r}: {error}")
    if len(problems) > PROBLEMS_MAX:
        problems[PROBLEMS_MAX:] = [f"... and {len(problems) - PROBLEMS_MAX} more nodes"]
    return tuple(nodes), problems


def _node(record: Record, reading: _Reading) -> Node:
    """Return one node. Raises `Refused`."""
    node: Node
    match record.type:
        case "METADATA_NODE":
            node = _made(Mark, record)
        case "COMP_NODE":
            node = _compute(record)
        case "MEM_LOAD_NODE" | "MEM_STORE_NODE":
            node = _memory(record)
        case "COMM_COLL_NODE":
            node = _collective(record, reading)
        case "COMM_SEND_NODE":
            node = _made(Send, record, peer=_whole(record, "comm_dst"), **_message(record))
        case "COMM_RECV_NODE":
            node = _made(Recv, record, peer=_whole(record, "comm_src"), **_message(record))
        case _:
            raise Refused(f"type {record.type} is not supported")
    return node


def _made(kind: type[N], record: Record, **own: Any) -> N:
    return kind(
        id=record.id,
        name=record.name,
        data_deps=record.data_deps,
        ctrl_deps=record.ctrl_deps,
        **own,
    )


def _message(record: Record) -> dict[str, int]:
    return {"bytes": _whole(record, "comm_size"), "tag": _whole(record, "comm_tag", 0)}


def _compute(record: Record) -> Compute:
    on = "cpu" if record.attributes.get("is_cpu_op") else "gpu"
    operations = _whole(record, "num_ops", 0)
    if record.duration_us or not operations:
        return _made(Compute, record, duration_ns=record.duration_us * NS_PER_US, on=on)
    moved = _whole(record, "tensor_size", 0)
    return _made(Compute, record, flops=float(operations), bytes=float(moved), on=on)


def _memory(record: Record) -> Memory:
    to = "load" if record.type == "MEM_LOAD_NODE" else "store"
    if record.duration_us:
        return _made(Memory, record, to=to, duration_ns=record.duration_us * NS_PER_US)
    return _made(Memory, record, to=to, bytes=_whole(record, "tensor_size"))


def _collective(record: Record, reading: _Reading) -> Collective:
    number = _whole(record, "comm_type")
    if not 0 <= number < len(OPS):
        raise Refused(f"comm_type {number} is not known")
    name, op = OPS[number]
    if op is None:
        known = ", ".join(word for word, one in OPS if one)
        raise Refused(f"{name} is not supported; supported are {known}")
    group = str(record.attributes.get("pg_name", "")) or WORLD
    ranks = len(reading.groups[group]) if group in reading.groups else reading.world_size
    if group == WORLD:
        _refuse_some_dimensions(record)
    elif group not in reading.groups:
        raise Refused(
            f"who is in process group {group!r}? Say it with --groups FILE, as for ASTRA-sim:"
            f' {{"{group}": [0, 1], ...}}'
        )
    size = 0 if name == "BARRIER" else _whole(record, "comm_size")
    return _made(
        Collective, record, op=op, group=group, bytes=size * (ranks if op == "all_gather" else 1)
    )


def _refuse_some_dimensions(record: Record) -> None:
    """Refuse a collective over some dimensions of a network that is not described here."""
    involved = record.attributes.get("involved_dim")
    if isinstance(involved, tuple) and not all(involved):
        told = ", ".join(map(str, involved)).lower()
        raise Refused(f"involved_dim is [{told}]; name its ranks with pg_name and --groups FILE")


def _whole(record: Record, name: str, default: int | None = None) -> int:
    """Return an attribute that is a whole number, however it was typed."""
    value = record.attributes.get(name, default)
    if value is None:
        raise Refused(f"no attribute {name}")
    if isinstance(value, tuple | str) or value != int(value):
        raise Refused(f"attribute {name} is {value!r}; expected a whole number")
    return int(value)


def parse_groups(data: bytes, where: str) -> dict[str, Ranks]:
    """Read ASTRA-sim's communicator groups: ``{"0": [0, 1], "1": [2, 3]}``. Raises `BadFile`."""
    try:
        return msgspec.json.decode(data, type=dict[str, tuple[int, ...]])
    except msgspec.DecodeError as error:
        raise BadFile(where, [f'expected groups such as {{"0": [0, 1]}}: {error}']) from error
