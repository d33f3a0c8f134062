"""A sweep's folder: what is there is kept, what is torn is made again, two at once are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_study import Here, measure, refuses_fast_links, study

from harness.errors import Interrupted, UsageError
from harness.sweeps.conduct import Made, Standing, make_points
from harness.sweeps.grid import cells_of, points_of
from harness.sweeps.point import Row
from harness.sweeps.store import Folder, Shard, at_work
from harness.sweeps.sweep import Sweep

ALL = 24


def made(
    sweep: Sweep,
    out: Path,
    here: Here,
    *,
    shard: Shard | None = None,
    retry_failed: bool = False,
    heard: list[tuple[Row | None, Standing]] | None = None,
) -> Made:
    def watch(row: Row | None, standing: Standing) -> None:
        if heard is not None:
            heard.append((row, standing))

    return make_points(
        cells_of(sweep),
        Folder(out),
        here,
        watch,
        shard=shard or Shard(),
        asked=b"asked",
        retry_failed=retry_failed,
        go_on="harness sweep study.toml",
    )


def test_results_are_told_and_kept_as_they_come(tmp_path: Path) -> None:
    heard: list[tuple[Row | None, Standing]] = []
    sweep = study(tmp_path)
    found = made(sweep, tmp_path / "out", Here(), heard=heard)
    assert heard[0] == (None, Standing(0, ALL, 0))
    assert [standing.done for _, standing in heard] == list(range(ALL + 1))
    assert [row.key for row, _ in heard if row] == [p.key for p in points_of(cells_of(sweep))]
    assert found.standing == Standing(ALL, ALL, 0)
    assert Folder(tmp_path / "out").rows() == found.rows
    assert (tmp_path / "out/sweep.toml").read_bytes() == b"asked"


def test_a_sweep_that_was_stopped_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    sweep, out = study(tmp_path), tmp_path / "out"
    with pytest.raises(Interrupted, match="7 of 24 points are kept") as stopped:
        made(sweep, out, Here(stop_after=7))
    assert str(stopped.value).endswith("Go on with: harness sweep study.toml")
    rest = Here()
    heard: list[tuple[Row | None, Standing]] = []
    made(sweep, out, rest, heard=heard)
    assert heard[0] == (None, Standing(7, ALL, 0))
    assert [p.key for p in rest.asked] == [p.key for p in points_of(cells_of(sweep))][7:]
    again = Here()
    assert made(sweep, out, again).standing == Standing(ALL, ALL, 0)
    assert not again.asked


def test_a_torn_line_is_made_again_and_spoils_no_other(tmp_path: Path) -> None:
    sweep, out = study(tmp_path), tmp_path / "out"
    made(sweep, out, Here())
    lines = (out / "points.jsonl").read_bytes()
    (out / "points.jsonl").write_bytes(lines[:-40])
    again = Here()
    found = made(sweep, out, again)
    assert [p.key for p in again.asked] == [points_of(cells_of(sweep))[-1].key]
    assert found.rows == Folder(out).rows()
    assert len(found.rows) == ALL


def test_failed_points_are_rows_that_stop_nothing_and_are_retried_when_asked(
    tmp_path: Path,
) -> None:
    sweep, out = study(tmp_path), tmp_path / "out"
    found = made(sweep, out, Here(refuses_fast_links))
    assert found.standing == Standing(ALL, ALL, 12)
    errors = {row.error for row in found.rows.values() if row.error}
    assert errors == {"bench of this point: generated.link_gbit_per_s: 400 is too fast"}
    still = Here()
    assert made(sweep, out, still).standing.failed == 12
    assert not still.asked
    retried = Here()
    assert made(sweep, out, retried, retry_failed=True).standing == Standing(ALL, ALL, 0)
    assert {p.values["link_gbit_per_s"] for p in retried.asked} == {400}
    assert not any(row.error for row in Folder(out).rows().values())


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    sweep, folder = study(tmp_path), Folder(tmp_path / "out")
    with at_work(folder, Shard()), pytest.raises(UsageError, match="another sweep is at work"):
        made(sweep, folder.path, Here())
    with at_work(folder, Shard(1, 2)):
        with pytest.raises(UsageError, match="another sweep is at work"):
            made(sweep, folder.path, Here())
        with pytest.raises(UsageError, match="another sweep is at work"):
            made(sweep, folder.path, Here(), shard=Shard(1, 2))
        made(sweep, folder.path, Here(), shard=Shard(2, 2))
    made(sweep, folder.path, Here())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file"):
        made(study(tmp_path), tmp_path / "file", Here())


def test_shards_make_every_point_once_between_them(tmp_path: Path) -> None:
    sweep, out = study(tmp_path), tmp_path / "out"
    shards = [Here(), Here(), Here()]
    for index, here in enumerate(shards, start=1):
        standing = made(sweep, out, here, shard=Shard(index, 3)).standing
        assert standing == Standing(8, 8, 0)
    asked = [point.key for here in shards for point in here.asked]
    assert sorted(asked) == sorted(point.key for point in points_of(cells_of(sweep)))
    last = Here()
    assert made(sweep, out, last).standing == Standing(ALL, ALL, 0)
    assert not last.asked


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1.0/2"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Shard.parse(text)


def test_a_changed_file_keeps_the_points_that_still_fit(tmp_path: Path) -> None:
    out, before = tmp_path / "out", study(tmp_path)
    made(before, out, Here())
    changed = study(tmp_path, ("[100, 400]", "[400, 800]"), ("seeds = [1, 2, 3]", "seeds = [3]"))
    here = Here()
    found = made(changed, out, here)
    assert {point.values["link_gbit_per_s"] for point in here.asked} == {800}
    assert {row.values["link_gbit_per_s"] for row in found.rows.values()} == {400, 800}
    assert {row.seed for row in found.rows.values()} == {3}
    assert len(Folder(out).rows()) == ALL + 4, "what no longer fits stays in the file"
    back = Here()
    made(before, out, back)
    assert not back.asked


def test_another_scenario_makes_every_point_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(study(tmp_path), out, Here())
    here = Here(measure)
    made(
        study(tmp_path, ("calibrations/h800.toml", "profiles/../calibrations/h800.toml")), out, here
    )
    assert not here.asked, "the same file under another name is the same file"
    made(study(tmp_path, ("rl-simulated", "rl-async")), out, here)
    assert len(here.asked) == ALL
