"""Points made by a cluster of `dask.distributed`: ``dask://HOST:PORT`` is its scheduler.

Every task starts a worker process of our own and makes one point in it, so limits, deaths and
threads are as on one machine. Files are read where points are made: the folders of the scenario
must be there under the same paths. Where a sweep is stopped, tasks that wait are cancelled; those
at work end by themselves, at the latest by their time limit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.clock import RealClock
from harness.errors import InfrastructureError, UsageError
from harness.sweeps.point import Measure, Point, Row, row_of
from harness.sweeps.pool import LocalPool, Rows
from harness.sweeps.worker import name_of, named

CONNECT_LIMIT_S = 10


class DaskCluster:
    """The workers of a scheduler at `address`, ``HOST:PORT``."""

    def __init__(self, measure: Measure, address: str) -> None:
        self._measure, self._address = measure, address

    def made(self, points: Sequence[Point]) -> Rows:
        """See `harness.sweeps.pool.Executor`."""
        if not points:
            return
        try:
            import distributed  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(
                "--on dask://: the package distributed is not installed; the extra [dask] has it"
            ) from error
        dask: Any = distributed  # it is typed in part
        try:
            client = dask.Client(
                f"tcp://{self._address}", timeout=CONNECT_LIMIT_S, set_as_default=False
            )
        except (OSError, ValueError) as error:
            raise InfrastructureError(
                f"dask://{self._address}: no scheduler answers: {error}"
            ) from error
        with client:
            measure = name_of(self._measure)
            asked = {
                client.submit(
                    made_alone, measure, msgspec.json.encode(point), pure=False, priority=-turn
                ): point
                for turn, point in enumerate(points)
            }
            try:
                for future in dask.as_completed(list(asked), loop=client.loop):
                    yield _row(future, asked[future])
            finally:
                client.cancel(list(asked), force=True)


def _row(future: Any, point: Point) -> Row:
    """Return what a task came to; one that dask gave up is a failed point."""
    if error := future.exception():
        return row_of(point, error=f"{type(error).__name__}: {error}")
    return msgspec.json.decode(future.result(), type=Row)


def made_alone(measure: str, point: bytes) -> bytes:
    """Return a point's row, made in a process of its own on this machine; both are JSON."""
    asked = msgspec.json.decode(point, type=Point)
    with tempfile.TemporaryDirectory() as folder:
        pool = LocalPool(named(measure), 1, RealClock(), Path(folder) / "worker.log")
        return msgspec.json.encode(next(iter(pool.made([asked]))))
