"""The sweep file: what is asked, of which designs, at which values; and its rules.

A *design* is a network that is compared with others: values of a bench's ``[generated]`` table,
and the arm of the scenario's rl step that runs on it. *Axes* are values that every design is given
in turn. A *place* is one value of each axis: there all designs meet.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import BadFile
from harness.model.bench import Generated, Strict
from harness.model.metrics import metric_problem, parse_metric, quantities
from harness.model.schema import did_you_mean, dotted, examine
from harness.rlsim.economics import Gpu
from harness.sweeps.arm import split_arm
from harness.sweeps.point import Scalar

Rule = dict[str, tuple[Scalar, ...]]
"""By axis, ``design`` or ``seed``: values. It fits where every one of its keys does."""

DESIGN, SEED = "design", "seed"
VALUES = tuple(field.name for field in msgspec.structs.fields(Generated) if field.name != "roles")
"""Keys of ``[generated]`` that a sweep may set."""
PATHS = ("scenario", "bench", "calibration", "prices", "power")


class Design(Strict, frozen=True, kw_only=True):
    """One network. `kind`: a ``bound`` is there to compare with, and cannot be bought."""

    kind: Literal["electrical", "optical", "bound"] = "electrical"
    arm: str = ""
    """``POLICY@FABRIC`` of the scenario's rl step: it alone runs. "": all of the scenario."""
    bench: dict[str, Scalar] = {}
    ignores: tuple[str, ...] = ()
    """Axes that change nothing here: one point is made, and shown at all values of theirs."""


class Sweep(Strict, frozen=True, kw_only=True):
    """A whole sweep. Paths are relative to the file."""

    question: str
    scenario: str
    bench: str = ""
    """A bench file whose ``[generated]`` is changed; "": `base` is all of it."""
    calibration: str = ""
    base: dict[str, Scalar] = {}
    axes: dict[str, tuple[Scalar, ...]]
    designs: dict[str, Design]
    baseline: str
    """The design that gains are told over."""
    only: tuple[Rule, ...] = ()
    """Where there are any: a combination is made if it fits one of them."""
    skip: tuple[Rule, ...] = ()
    """A combination that fits one of them is not made."""
    performance: str = "rl.samples_per_s"
    """A metric of which more is better."""
    metrics: tuple[str, ...] = ()
    """Shown beside it."""
    seeds: tuple[int, ...] = (1,)
    timeout_s: float = 600.0
    """Of a point; it fails then."""
    memory_gb: float = 4.0
    """The same: what its process may hold, Python and libraries included."""
    prices: str = ""
    """A file of prices; "": the house's."""
    power: str = ""
    """The same of what parts draw."""
    gpu_usd: float = Gpu().usd
    """Of one GPU in a divisor, all round."""
    gpu_w: float = Gpu().w


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file; paths in it are resolved against its own folder.

    Raises `BadFile` with every problem found.
    """
    sweep, problems = examine(_table(path), Sweep)
    if sweep is not None:
        problems += _problems(sweep)
    if problems or sweep is None:
        raise BadFile(str(path), list(dict.fromkeys(problems)))
    folder = path.resolve().parent
    paths = {
        key: str((folder / Path(value).expanduser()).resolve())
        for key in PATHS
        if (value := getattr(sweep, key))
    }
    return msgspec.structs.replace(sweep, **paths)


def _table(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise BadFile(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise BadFile(str(path), ["not UTF-8 text"]) from error
    except tomllib.TOMLDecodeError as error:
        raise BadFile(str(path), [f"not TOML: {error}"]) from error


def _problems(sweep: Sweep) -> Iterator[str]:
    yield from _metric_problems(sweep)
    yield from _axis_problems(sweep)
    yield from _design_problems(sweep)
    for name in ("only", "skip"):
        for i, rule in enumerate(getattr(sweep, name)):
            yield from _rule_problems(sweep, rule, f"{name}[{i}]")
    if not sweep.calibration and not sweep.bench:
        yield "calibration: missing; name the file that simulations take their times from"
    if not sweep.seeds:
        yield "seeds: empty; give at least one, such as [1]"
    if len(set(sweep.seeds)) < len(sweep.seeds):
        yield "seeds: each once; the same seed gives the same result"
    for name in ("timeout_s", "memory_gb", "gpu_usd", "gpu_w"):
        if getattr(sweep, name) <= 0:
            yield f"{name}: expected more than 0"


def _metric_problems(sweep: Sweep) -> Iterator[str]:
    for where, metric in (
        ("performance", sweep.performance),
        *((f"metrics[{i}]", metric) for i, metric in enumerate(sweep.metrics)),
    ):
        if problem := metric_problem(metric):
            yield f"{where}: {problem}"
        elif where == "performance" and not (unit := _unit(metric)).endswith("/s"):
            told = f"in {unit}" if unit else "a mere number"
            yield f"performance: {metric} is {told}; expected a rate, such as rl.samples_per_s"


def _unit(metric: str) -> str:
    return quantities()[parse_metric(metric)[0]].unit


def _axis_problems(sweep: Sweep) -> Iterator[str]:
    if not sweep.axes:
        yield "axes: empty; name at least one, such as gpus = [64, 256]"
    for name, values in sweep.axes.items():
        where = dotted("axes", name)
        if name not in VALUES:
            yield f"{where}: no value of a generated bench{did_you_mean(name, VALUES)}"
        if not values:
            yield f"{where}: empty; give at least one value"
        if len(set(values)) < len(values):
            yield f"{where}: a value is there twice"
        if name in sweep.base:
            yield f"{where}: {dotted('base', name)} gives it a value, too; leave that out"
    for name in sweep.base:
        if name not in VALUES:
            where = dotted("base", name)
            yield f"{where}: no value of a generated bench{did_you_mean(name, VALUES)}"


def _design_problems(sweep: Sweep) -> Iterator[str]:
    if not sweep.designs:
        yield "designs: empty; there is nothing to compare"
    elif sweep.baseline not in sweep.designs:
        yield f"baseline: no design {sweep.baseline!r}{did_you_mean(sweep.baseline, sweep.designs)}"
    for name, design in sweep.designs.items():
        where = dotted("designs", name)
        try:
            split_arm(design.arm)
        except ValueError as error:
            yield f"{where}.arm: {error}"
        for key in design.bench:
            at = dotted(f"{where}.bench", key)
            if key not in VALUES:
                yield f"{at}: no value of a generated bench{did_you_mean(key, VALUES)}"
            elif key in sweep.axes and key not in design.ignores:
                yield f"{at}: an axis gives it values, too; name it in {where}.ignores"
        for axis in design.ignores:
            if axis not in sweep.axes:
                yield f"{where}.ignores: no axis {axis!r}{did_you_mean(axis, sweep.axes)}"


def _rule_problems(sweep: Sweep, rule: Rule, where: str) -> Iterator[str]:
    if not rule:
        yield f"{where}: empty; name an axis, design or seed"
    there: dict[str, Iterable[Scalar]] = {
        DESIGN: tuple(sweep.designs),
        SEED: sweep.seeds,
        **sweep.axes,
    }
    for key, values in rule.items():
        if key not in there:
            yield f"{dotted(where, key)}: no axis{did_you_mean(key, there)}"
            continue
        for value in values:
            if value not in there[key]:
                yield f"{dotted(where, key)}: {value!r} is not one of its values"
