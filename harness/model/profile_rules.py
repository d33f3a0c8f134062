"""What must hold between the values of a latency profile, beyond their types. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises,
whatever the (well-typed) profile; `harness.model.load` collects them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from harness.model.profile import Coefficients, Figure, Profile, Table
from harness.model.schema import did_you_mean, dotted
from harness.model.shape import shape_problems

_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?", re.ASCII)
_GROUP = re.compile(r"[1-9]\d{0,4}", re.ASCII)
_SHARES = ("weights_share", "kv_share", "gemm_share", "attention_share", "link_share")
_PEAKS = ("bandwidth_gb_per_s", "peak_tflop_per_s", "link_gb_per_s")
_MAY_BE_ZERO = ("step_overhead_us", "layer_overhead_us", "sequence_us", "hop_us", "workspace_gb")


def profile_problems(profile: Profile) -> Iterator[str]:
    """Yield all problems of a profile, in the order of the file's tables."""
    yield from (f"shape.{problem}" for problem in shape_problems(profile.shape))
    for name, source in profile.sources.items():
        where = dotted("sources", name)
        if not source.what.strip():
            yield f"{where}.what: empty; say where the numbers can be looked up"
        if not _DATE.fullmatch(source.date):
            yield f'{where}.date: expected "YYYY", "YYYY-MM" or "YYYY-MM-DD"'
    for where, named in _sources_named(profile):
        if named not in profile.sources:
            yield f"{where}: no source {named!r}{did_you_mean(named, profile.sources)}"
    for where, figure in _figures(profile):
        yield from _figure(where, figure.value)
    yield from _basis(profile)
    for i, fit in enumerate(profile.coefficients):
        yield from _fit(f"coefficients[{i}]", fit)
    for i, table in enumerate(profile.tables):
        yield from _table(f"tables[{i}]", table)
    yield from _each_layout_once(profile)


def _basis(profile: Profile) -> Iterator[str]:
    if profile.roofline is None and not profile.tables and not profile.coefficients:
        yield "roofline: missing; a profile has a roofline, coefficients or tables"
    for key in _PEAKS:
        if profile.roofline is not None and getattr(profile.gpu, key) is None:
            yield f"gpu.{key}: missing; a roofline needs it"


def _figures(profile: Profile) -> Iterator[tuple[str, Figure]]:
    for name, part in (("gpu", profile.gpu), ("roofline", profile.roofline)):
        for key in getattr(part, "__struct_fields__", ()):
            value: Any = getattr(part, key)
            if isinstance(value, Figure):
                yield f"{name}.{key}", value
            elif isinstance(value, dict):
                for group, figure in value.items():
                    yield dotted(f"{name}.{key}", group), figure


def _sources_named(profile: Profile) -> Iterator[tuple[str, str]]:
    yield "shape.source", profile.shape.source
    yield from ((f"{where}.source", figure.source) for where, figure in _figures(profile))
    for key in ("coefficients", "tables"):
        for i, measured in enumerate(getattr(profile, key)):
            yield f"{key}[{i}].source", measured.source


def _figure(where: str, value: float) -> Iterator[str]:
    key = where.split(".")[1]
    group = where.split(".")[2] if where.count(".") > 1 else "1"
    if not _GROUP.fullmatch(group.strip('"')):
        yield f"{where}: name the number of GPUs in the group, such as 2, 4 or 8"
    if key in _SHARES and not 0 < value <= 1:
        yield f"{where}.value: a share lies above 0 and up to 1"
    elif key == "expert_imbalance" and value < 1:
        yield f"{where}.value: the fullest GPU's share over the mean is at least 1"
    elif value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        yield f"{where}.value: expected more than 0"


def _fit(where: str, fit: Coefficients) -> Iterator[str]:
    for key in ("fixed_us", "sequence_us", "kv_token_ns", "prefill_token_us"):
        if getattr(fit, key) < 0:
            yield f"{where}.{key}: expected 0 or more; a step never gets faster as its load grows"
    if fit.fixed_us + fit.sequence_us <= 0:
        yield f"{where}.fixed_us: a step takes time; expected more than 0"
    for key in ("batch_max", "kv_max_tokens", "prefill_max_tokens"):
        if getattr(fit, key) < 1:
            yield f"{where}.{key}: expected at least 1"


def _table(where: str, table: Table) -> Iterator[str]:
    axes = ("batch", "context_tokens", "prefill_tokens")
    for key in axes:
        axis: tuple[int, ...] = getattr(table, key)
        if not axis or axis[0] < 1 or any(low >= high for low, high in pairwise(axis)):
            yield f"{where}.{key}: expected whole numbers from 1 up, each above the one before"
    if len(table.step_us) != len(table.batch):
        yield f"{where}.step_us: expected {len(table.batch)} rows, one for each batch"
    if any(len(row) != len(table.context_tokens) for row in table.step_us):
        yield f"{where}.step_us: expected rows of {len(table.context_tokens)}, one for each context"
    elif table.step_us:
        yield from _rising(f"{where}.step_us", table.step_us)
    if len(table.prefill_us) != len(table.prefill_tokens):
        yield f"{where}.prefill_us: expected {len(table.prefill_tokens)}, as prefill_tokens has"
    yield from _rising(f"{where}.prefill_us", [table.prefill_us])


def _rising(where: str, rows: Sequence[Sequence[float]]) -> Iterator[str]:
    if any(value <= 0 for row in rows for value in row):
        yield f"{where}: a step takes time; expected more than 0"
    falls = any(low > high for row in rows for low, high in pairwise(row))
    falls |= any(low > high for column in zip(*rows, strict=True) for low, high in pairwise(column))
    if falls:
        yield f"{where}: falls as the load grows; measure again, or smooth it before it is written"


def _each_layout_once(profile: Profile) -> Iterator[str]:
    for key in ("coefficients", "tables"):
        seen: set[tuple[int, ...]] = set()
        for i, measured in enumerate(getattr(profile, key)):
            degrees = (measured.tp, measured.pp, measured.ep, measured.dp)
            if min(degrees) < 1:
                yield f"{key}[{i}].tp: degrees are at least 1"
            if degrees in seen:
                yield f"{key}[{i}].tp: this layout is given twice"
            seen.add(degrees)
