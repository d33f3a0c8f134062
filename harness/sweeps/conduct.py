"""One sweep, from its file to all its rows: what is there is kept, what is missing is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from harness.errors import Interrupted
from harness.sweeps.grid import Cell, points_of
from harness.sweeps.point import Row
from harness.sweeps.pool import Executor
from harness.sweeps.store import Folder, Shard, at_work


@dataclass(frozen=True)
class Standing:
    """How far a sweep has come: points of this shard that are there, of all; and failed ones."""

    done: int
    total: int
    failed: int


class Made(NamedTuple):
    """All rows of the cells, by key, whoever made them; and how far this shard has come."""

    rows: Mapping[str, Row]
    standing: Standing


Watch = Callable[[Row | None, Standing], None]
"""Told of the beginning (no row), and of each row as it comes."""


def make_points(
    cells: tuple[Cell, ...],
    folder: Folder,
    executor: Executor,
    watch: Watch,
    *,
    shard: Shard,
    asked: bytes,
    retry_failed: bool = False,
    go_on: str = "",
) -> Made:
    """Make what is missing of a shard.

    `asked` is the sweep file, of which a copy is left; `go_on` is the command that goes on with
    what is left. Raises `UsageError` where the folder is taken, `Interrupted` at Ctrl-C.
    """
    points = points_of(cells)
    keys = {point.key for point in points}
    share = points[shard.index - 1 :: shard.of]
    with at_work(folder, shard) as file:
        (folder.path / "sweep.toml").write_bytes(asked)
        rows = {key: row for key, row in folder.rows().items() if key in keys}
        missing = [
            point
            for point in share
            if (row := rows.get(point.key)) is None or (retry_failed and row.error)
        ]
        to_do = {point.key for point in missing}
        there = {point.key: rows[point.key] for point in share if point.key not in to_do}

        def standing() -> Standing:
            failed = sum(1 for row in there.values() if row.error)
            return Standing(len(there), len(share), failed)

        watch(None, standing())
        try:
            with closing(executor.made(missing)) as coming:
                for row in coming:
                    file.add(row)
                    there[row.key] = rows[row.key] = row
                    watch(row, standing())
        except KeyboardInterrupt:
            kept = folder.rows().keys() & {point.key for point in share}
            raise Interrupted(
                f"stopped; {len(kept)} of {len(share)} points are kept in {folder.path}."
                f" Go on with: {go_on}"
            ) from None
    return Made(rows, standing())
