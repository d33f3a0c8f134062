"""Collective times against public tables of NCCL on one node: sizes and GPU counts held out.

Tables: five logs of nccl-tests (``tests/data/nccl-tests``, 8 x A100, an old NCCL with one process
for all GPUs), and those of `aiconfigurator-core` where that and `pyarrow` are installed, for
2, 4 and 8 GPUs of five kinds. Ways to foretell what was held out, errors as shares of the measured:

- ``sizes, table``: every other size is a table, the sizes between are read off it;
- ``sizes, model``: constants of `harness.rlsim.nvlink` are fitted to every other size, all counts;
- ``N GPUs, model``: they are fitted to the other counts, all sizes; 8 lies beyond them;
- ``as shipped``: constants of ``data/nvlink-gpus.toml``, on tables that they were not fitted to.

Mark: a mean error of at most 10 % for each operation and table, in each way but the second.
`fitted` are the constants from all of a table, as they are shipped. Not fitted, but stated in sight
of the first four tables, 8 GPUs too: NCCL's graph and channels, and the form of the model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares

from harness.model.scenario import Op
from harness.rlsim.nvlink import Links, Node, links_of, node_of, pairwise
from harness.rlsim.tables import Key, parse_log, table_of
from harness.rlsim.tuner import Group

LOGS = Path(__file__).parents[1] / "data" / "nccl-tests"
OPS: Mapping[Op, str] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
}
PACKAGE = "aiconfigurator_core"
TABLES: Mapping[str, tuple[str, str]] = {
    "A100, NCCL 2.27.3": ("a100", "a100_sxm/comm/nccl/2.27.3"),
    "H100, NCCL 2.27.3": ("h100", "h100_sxm/comm/nccl/2.27.3"),
    "H200, NCCL 2.29.2": ("h200", "h200_sxm/comm/nccl/2.29.2"),
    "B200, NCCL 2.27.5": ("b200", "b200_sxm/comm/nccl/2.27.5"),
    "H100, NCCL 2.29.2": ("h100", "h100_sxm/comm/nccl/2.29.2"),
    "H200, NCCL 2.26.2": ("h200", "h200_sxm/comm/nccl/2.26.2"),
    "B200, NCCL 2.29.2": ("b200", "b200_sxm/comm/nccl/2.29.2"),
    "B300, NCCL 2.29.2": ("b200", "b300_sxm/comm/nccl/2.29.2"),
}
SHIPPED = tuple(TABLES)[:4]
"""Whose constants are shipped."""
ELEMENT_BYTES = {"half": 2, "int8": 1}
MARK_PCT = 10.0

RING = (
    ("base_us", 0), ("base_us", 1), ("base_us", 2), ("step_us", 0), ("step_us", 1), ("step_us", 2),
    ("threads_us", None), ("bus_gb_per_s", 0), ("bus_gb_per_s", 2), ("own_gb_per_s", 0),
    ("own_gb_per_s", 2), ("ramp_us", 2), ("nvls_us", None), ("nvls_step_us", None),
    ("nvls_gb_per_s", None), ("nvls_ramp_us", None),
)  # fmt: skip
PAIRS = (
    ("pair_us", None), ("pair_step_us", None), ("pair_gb_per_s", None),
    ("pair_own_gb_per_s", None), ("pair_ramp_us", None), ("pair_ll_us", None),
    ("pair_ll_gb_per_s", None),
)  # fmt: skip
"""What is fitted: (field, place by protocol). LL128 follows Simple: see `_with`."""
LATENCIES_US = {
    "base_us": (5.0, 8.0, 10.0), "step_us": (0.8, 1.3, 2.5), "threads_us": 0.3,
    "ramp_us": (0.01, 2.0, 2.0), "nvls_us": 8.0, "nvls_step_us": 2.0, "nvls_ramp_us": 5.0,
    "pair_us": 12.0, "pair_step_us": 0.2, "pair_ramp_us": 2.0, "pair_ll_us": 7.0,
}  # fmt: skip
OF_GRAPH = {
    "bus_gb_per_s": (0.6, 0.92, 1.0), "own_gb_per_s": (0.6, 2.0, 2.0), "nvls_gb_per_s": 0.7,
    "pair_gb_per_s": 1.0, "pair_own_gb_per_s": 2.0,
}  # fmt: skip
"""Where every fit starts, of any kind of GPU: round figures, rates as shares of the graph's."""
PRIOR = 0.02
"""How much it costs a constant to leave its start by a factor of e, beside errors of points."""

Point = tuple[Op, int, int]
"""(operation, ranks, size in bytes)"""


class Split(NamedTuple):
    """What is fitted to, what is foretold."""

    name: str
    known: list[Point]
    asked: list[Point]


def run() -> dict[str, Any]:
    """Return by table and split: mean and worst error of each operation, %."""
    found: dict[str, Any] = {"skipped": [], "errors": {}, "fitted": {}}
    tables: dict[str, tuple[str, dict[Point, float]]] = {"A100, logs": ("a100", _logs())}
    if importlib.util.find_spec(PACKAGE) and importlib.util.find_spec("pyarrow"):
        tables |= {name: (gpu, _parquet(path)) for name, (gpu, path) in TABLES.items()}
    else:
        told = "pip install --no-deps aiconfigurator-core==0.12.0, and pyarrow"
        found["skipped"].append(f"{', '.join(TABLES)}: {told}")
    for name, (gpu, measured) in tables.items():
        splits = _splits(measured)
        if name in SHIPPED:
            links = _fitted(gpu, measured, list(measured))
            found["fitted"][name] = msgspec.to_builtins(links)
        elif name in TABLES:
            splits.append(Split("as shipped", [], list(measured)))
        found["errors"][name] = {s.name: _errors(gpu, measured, s) for s in splits}
    found["missed"] = [
        f"{name}, {split}: {op} {mean:.1f}"
        for name, errors in found["errors"].items()
        for split, by_op in errors.items()
        for op, (mean, _) in by_op.items()
        if split != "sizes, model" and mean > MARK_PCT
    ]
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the errors as text."""
    lines = [f"{'mean and worst error, %':38}" + "".join(f"{op:>16}" for op in OPS)]
    for name, errors in figures["errors"].items():
        for split, by_op in errors.items():
            told = (
                f"{by_op[op][0]:8.1f} {by_op[op][1]:6.1f} " if op in by_op else "" for op in OPS
            )
            lines.append(f"{name:20}{split:18}" + "".join(f"{cell:>16}" for cell in told))
    lines += [f"skipped: {what}" for what in figures["skipped"]]
    lines += [f"NOT met: {what}" for what in figures["missed"]]
    return "\n".join(lines)


# -- tables ----------------------------------------------------------------------------------------


def _logs() -> dict[Point, float]:
    found: dict[Point, float] = {}
    for op, name in OPS.items():
        log = parse_log((LOGS / f"nccl_{name}.log").read_text(), name)
        found |= {(op, log.ranks, size): us for size, us in log.out_of_place}
    return found


def _parquet(path: str) -> dict[Point, float]:
    """Return the median of all rows of a point; sizes there are counts of elements, times in ms."""
    from pyarrow import parquet  # noqa: PLC0415 - only where it is installed

    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "systems/data" / path / "nccl_perf.parquet"
    found: dict[Point, list[float]] = {}
    for row in parquet.read_table(file).to_pylist():
        op = "all_to_all" if row["op_name"] == "alltoall" else row["op_name"]
        size = row["message_size"] * ELEMENT_BYTES[row["nccl_dtype"]]
        found.setdefault((op, row["num_gpus"], size), []).append(row["latency"] * 1e3)
    return {point: median(times) for point, times in sorted(found.items())}


def _splits(measured: Iterable[Point]) -> list[Split]:
    points = list(measured)
    sizes = {op: sorted({size for o, _, size in points if o == op}) for op, _, _ in points}
    even = {op: set(of[::2]) for op, of in sizes.items()}
    known = [point for point in points if point[2] in even[point[0]]]
    # only sizes between two of the table: beyond its ends it says nothing
    asked = [p for p in points if p[2] not in even[p[0]] and p[2] < max(even[p[0]])]
    found = [Split("sizes, table", known, asked), Split("sizes, model", known, asked)]
    counts = sorted({ranks for _, ranks, _ in points})
    for count in counts[1:] if len(counts) > 1 else []:
        others = [point for point in points if point[1] != count]
        held = [point for point in points if point[1] == count]
        found.append(Split(f"{count} GPUs, model", others, held))
    return found


# -- foretelling -----------------------------------------------------------------------------------


def _errors(
    gpu: str, measured: Mapping[Point, float], split: Split
) -> dict[Op, tuple[float, float]]:
    told: Callable[[Point], float | None]
    if split.name == "sizes, table":
        told = partial(_read_off, measured, split.known)
    elif split.name == "as shipped":
        told = partial(_told_us, node_of(gpu))
    else:
        told = partial(_told_us, _node(_fitted(gpu, measured, split.known)))
    errors: dict[Op, list[float]] = {}
    for point in split.asked:
        us = told(point)
        assert us is not None
        errors.setdefault(point[0], []).append(abs(us / measured[point] - 1) * 100)
    return {op: (round(fmean(found), 2), round(max(found), 2)) for op, found in errors.items()}


def _read_off(measured: Mapping[Point, float], known: list[Point], asked: Point) -> float | None:
    op, ranks, size = asked
    rows = [(p[2], measured[p]) for p in known if p[:2] == (op, ranks)]
    return table_of(Key("", op, ranks), rows, "").time_us(size)


def _told_us(node: Node, point: Point) -> float:
    op, ranks, size = point
    if op == "all_to_all":
        block = size / ranks
        return pairwise(ranks - 1, block, block * (ranks - 1), block, node.links)[1].whole_us
    group = Group(ranks, 1, ranks)
    choice = node.tuner.choose(op, size, group)
    return node.time(op, (choice.algorithm, choice.protocol), size, group).whole_us


def _node(links: Links) -> Node:
    return Node(links, node_of(links.source).tuner)


def _fitted(gpu: str, measured: Mapping[Point, float], known: list[Point]) -> Links:
    """Return constants fitted to relative errors of `known`, ring and pairs apart."""
    links = _start(gpu)
    for fields, is_pairs in ((RING, False), (PAIRS, True)):
        points = [point for point in known if (point[0] == "all_to_all") == is_pairs]
        start = np.array([_get(links, *field) for field in fields])

        def residuals(
            shift: Any,
            fields: Any = fields,
            points: Any = points,
            start: Any = start,
            base: Links = links,
        ) -> Any:
            node = _node(_with(base, fields, start * np.exp(shift)))
            errors = [_told_us(node, point) / measured[point] - 1 for point in points]
            return np.array([*errors, *(PRIOR * shift)])

        fit = least_squares(
            residuals, np.zeros(len(fields)), loss="soft_l1", f_scale=0.1, max_nfev=60
        )
        links = _with(links, fields, start * np.exp(fit.x))
    return links


def _start(gpu: str) -> Links:
    """Return what is known of a kind of GPU before any of its times."""
    links = links_of(gpu)
    graph = links.graph_gb_per_s
    rates = {field: _times(graph, share) for field, share in OF_GRAPH.items()}
    return msgspec.structs.replace(links, source=gpu, pair_ll_gb_per_s=7.0, **LATENCIES_US, **rates)


def _times(graph_gb_per_s: float, share: Any) -> Any:
    if isinstance(share, tuple):
        return tuple(graph_gb_per_s * each for each in share)
    return graph_gb_per_s * share


def _get(links: Links, field: str, place: int | None) -> float:
    value = getattr(links, field)
    return float(value if place is None else value[place])


def _with(links: Links, fields: Any, values: Any) -> Links:
    """Return the links with these; LL128 gets 0.92 of Simple's bus, all else of its bytes alike."""
    new: dict[str, Any] = {}
    for (field, place), value in zip(fields, values.tolist(), strict=True):
        if place is None:
            new[field] = value
        else:
            triple = list(new.get(field, getattr(links, field)))
            triple[place] = value
            new[field] = tuple(triple)
    for field, share in (("bus_gb_per_s", 0.92), ("own_gb_per_s", 1.0), ("ramp_us", 1.0)):
        if field in new:
            ll, _, simple = new[field]
            new[field] = (ll, share * simple, simple)
    return msgspec.structs.replace(links, **new)
