"""A point of a sweep: one simulation, known by all that decides its result; and what came of it.

Two points with the same key have the same result, whichever sweep asks for them: prices, limits
and names of designs are no part of it, the bytes of every file are. Pure but for reading those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from harness.errors import BadFile

Scalar = str | int | float | bool

KEY_DIGITS = 20
OURS = "orchestrl-harness"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation: `scenario` on a bench, with one arm of its rl step, and a seed.

    The bench is the file `bench` ("": none) with `values` in its table ``[generated]``. Paths are
    absolute. `files` are all that are read, with their SHA-256.
    """

    scenario: str
    bench: str
    calibration: str
    """"": that which the bench file names."""
    values: dict[str, Scalar]
    arm: str
    """``POLICY@FABRIC``; "": the scenario as it is."""
    seed: int
    files: dict[str, str]
    version: str
    """Of the harness."""
    timeout_s: float
    memory_gb: float

    @property
    def key(self) -> str:
        """Digest of all that decides the result; neither paths nor limits do."""
        values = sorted((name, _plain(value)) for name, value in self.values.items())
        digests = list(self.files.values())
        decides = (self.version, digests, bool(self.bench), values, self.arm, self.seed)
        return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()[:KEY_DIGITS]


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of one simulation; `plus_minus` in its unit, None where nothing is known."""

    value: float
    unit: str
    n: int = 1
    plus_minus: float | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """When a training step's parts were under way, in s since the loop's first step began."""

    begin_s: float
    """Of its batch: the first request."""
    batch_end_s: float
    train_begin_s: float
    train_end_s: float
    sync_end_s: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation found; `notes`: what its reader must know, such as an extrapolation."""

    metrics: dict[str, Value]
    notes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``points.jsonl``: what came of a point, or why nothing did (`error`).

    `values`, `arm` and `seed` are the point's, for a reader. `cpu_s` and `peak_mb` are what the
    simulation itself took; 0 where its process died.
    """

    key: str
    arm: str
    values: dict[str, Scalar]
    seed: int
    measured: Measured | None = None
    error: str = ""
    cpu_s: float = 0.0
    peak_mb: float = 0.0


Measure = Callable[[Point], Measured]
"""Simulates a point. A function at the top of a module: workers import it by its name."""


def row_of(
    point: Point,
    *,
    measured: Measured | None = None,
    error: str = "",
    cpu_s: float = 0.0,
    peak_mb: float = 0.0,
) -> Row:
    """Return the line of a point."""
    return Row(
        key=point.key,
        arm=point.arm,
        values=point.values,
        seed=point.seed,
        measured=measured,
        error=error,
        cpu_s=cpu_s,
        peak_mb=peak_mb,
    )


def our_version() -> str:
    """Return the version of the harness that is installed here."""
    return version(OURS)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises `BadFile` where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadFile(str(path), [f"cannot be read: {error.strerror}"]) from error


def differences(point: Point) -> Iterator[str]:
    """Yield what is not here as it was when the point was asked for: it would not be its result."""
    if point.version != our_version():
        yield f"harness {point.version} asks, and {our_version()} is here"
    for path, digest in point.files.items():
        if digest_of(Path(path)) != digest:
            yield f"{path}: not the file that was asked for; it was changed since, or is another"


def _plain(value: Scalar) -> Scalar:
    """Return whole numbers as such: 400.0 and 400 are one value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
