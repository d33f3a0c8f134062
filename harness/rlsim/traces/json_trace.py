"""Our own form of a trace: one JSON file, strict, small enough to be written by hand.

::

    {"schema": "rlsim-trace/1",
     "question": "What does a step of two ranks take?",
     "gpu": "h100",                                kind of GPU: for NVLink, and NCCL's choices
     "gpu_tflop_per_s": 400.0,                     for nodes that state flops; may be left out
     "gpu_memory_gb_per_s": 2500.0,                for nodes that state bytes; may be left out
     "groups": {"tp": {"size": 2},                 0-1, 2-3, ... of all ranks
                "dp": {"size": 2, "stride": 2},    0,2  1,3  4,6 ...
                "odd": {"ranks": [[0, 3], [1, 2]]}},
     "programs": [
       {"ranks": "0-1",                            ranks that do the same
        "nodes": [
          {"kind": "compute", "id": 1, "name": "forward", "duration_ns": 2000000},
          {"kind": "collective", "id": 2, "data_deps": [1], "op": "all_reduce", "bytes": 4096,
           "group": "tp"}]}]}

Kinds of nodes and their keys are those of `harness.rlsim.traces.model`: compute (`duration_ns`, or
`flops` and `bytes`; `on` "gpu" or "cpu"), memory (`to` "load" or "store"), collective (`op`,
`bytes`, `group`), send and recv (`peer`, `bytes`, `tag`), mark. Each may have `name`, `data_deps`
and `ctrl_deps`. Unknown keys are refused with their path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from harness.errors import BadFile
from harness.model.bench import Strict
from harness.model.schema import dotted, examine
from harness.rlsim.traces.model import Gpu, Node, Program, Ranks, Trace, ranges

SCHEMA = "rlsim-trace/1"
RANKS_MAX = 1_000_000
TERA, GIGA = 1e12, 1e9

_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)


class _Group(Strict, frozen=True, kw_only=True):
    ranks: tuple[tuple[int, ...], ...] = ()
    size: int | None = None
    stride: int = 1


class _Program(Strict, frozen=True, kw_only=True):
    ranks: str
    nodes: tuple[Node, ...]


class _File(Strict, frozen=True, kw_only=True):
    schema: Literal["rlsim-trace/1"]
    question: str = ""
    gpu: str = ""
    gpu_tflop_per_s: float = 0.0
    gpu_memory_gb_per_s: float = 0.0
    groups: dict[str, _Group] = {}
    programs: tuple[_Program, ...]


def parse_ranges(text: str) -> Ranks:
    """Parse ``"0-7,9"``. Raises `ValueError` on anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < RANKS_MAX:
            raise ValueError(f"{part.strip()!r} is not a rank or a range such as 0-7,9")
        found += range(first, last + 1)
    return tuple(found)


def parse(data: bytes, where: str) -> Trace:
    """Return the trace of a file's content; `where` is its name.

    Raises `BadFile` with every problem of its form, each with its key's path.
    """
    file = _decoded(data, where)
    problems: list[str] = []
    programs = []
    for place, program in enumerate(file.programs):
        try:
            programs.append(Program(parse_ranges(program.ranks), program.nodes))
        except ValueError as error:
            problems.append(f"programs[{place}].ranks: {error}")
    count = sum(len(program.ranks) for program in programs)
    groups = dict(_groups(file.groups, count, problems))
    if problems:
        raise BadFile(where, problems)
    gpu = Gpu(file.gpu, file.gpu_tflop_per_s * TERA, file.gpu_memory_gb_per_s * GIGA)
    return Trace(where, tuple(programs), groups, file.question, gpu)


def _decoded(data: bytes, where: str) -> _File:
    """Read it fast; only where that fails, slowly, for all problems and their paths."""
    try:
        return msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as error:
        table = msgspec.json.decode(data)
        if not isinstance(table, dict):
            raise BadFile(where, ["expected a JSON object"]) from error
        _, problems = examine(table, _File)
        raise BadFile(where, problems or [str(error)]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(where, [f"not JSON: {error}"]) from error


def _groups(
    tables: Mapping[str, _Group], count: int, problems: list[str]
) -> Iterator[tuple[str, tuple[Ranks, ...]]]:
    """Yield each group's lists of ranks; add to the problems."""
    for name, group in tables.items():
        path = dotted("groups", name)
        if bool(group.ranks) == (group.size is not None):
            problems.append(f"{path}: expected ranks, or size with or without stride")
        elif group.size is None:
            yield name, group.ranks
        elif group.size < 1 or group.stride < 1:
            problems.append(f"{path}: expected a size and a stride of 1 or more")
        elif count % (group.size * group.stride):
            told = f"size {group.size}"
            if group.stride > 1:
                told += f" x stride {group.stride} = {group.size * group.stride}"
            problems.append(f"{path}: {told} does not divide {count} ranks")
        else:
            yield name, tuple(_blocks(count, group.size, group.stride))


def _blocks(count: int, size: int, stride: int) -> Iterator[Ranks]:
    for first in range(0, count, size * stride):
        for start in range(first, first + stride):
            yield tuple(range(start, start + size * stride, stride))


def dump(trace: Trace) -> str:
    """Return a trace as the content of a file, a node a line, without what is not said."""
    head: dict[str, object] = {"schema": SCHEMA, "question": trace.question, "gpu": trace.gpu.kind}
    head["gpu_tflop_per_s"] = trace.gpu.flop_per_s / TERA
    head["gpu_memory_gb_per_s"] = trace.gpu.memory_bytes_per_s / GIGA
    head["groups"] = {name: {"ranks": lists} for name, lists in trace.groups.items()}
    lines = [f" {_text(key)}: {_text(value)}," for key, value in head.items() if value]
    return "{\n" + "\n".join(lines) + '\n "programs": [\n' + _programs(trace) + "\n ]\n}\n"


def _programs(trace: Trace) -> str:
    return ",\n".join(
        f'  {{"ranks": {_text(ranges(program.ranks))}, "nodes": [\n'
        + ",\n".join(f"   {_text(node)}" for node in program.nodes)
        + "\n  ]}"
        for program in trace.programs
    )


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
