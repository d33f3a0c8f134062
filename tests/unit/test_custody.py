"""Snapshots outlive the process, and a switch is called restored only when it was read back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivers.base import EMPTY, Applied, Delta, Matching
from drivers.errors import Indeterminate, LinkLost
from harness.entry import recover
from harness.errors import InfrastructureError, RestoreFailed, SteeringFailed
from harness.model.bench import Switch, Tor
from harness.run import custody, recovery

SPEC = Switch(driver="polatis-scpi", url="tcp://10.0.0.5:5025", ports="1-8,9-16")
FOUND = Matching.of([(1, 9), (2, 10)])


@dataclass
class Unit:
    """A switch of which only the map is of interest; `broken` makes every change fail."""

    name: str = "agg0"
    spec: Switch = SPEC
    map: Matching = EMPTY
    broken: bool = False
    mute: bool = False
    waited_ns: int = 0
    typical_switch_ns: int = 0
    applied: list[Delta] = field(default_factory=list)

    async def read(self) -> Matching:
        if self.mute:
            raise LinkLost("the device closed the line")
        return self.map

    async def apply(self, wanted: Matching) -> Applied:
        if self.broken:
            raise Indeterminate("no answer")
        before, self.map = self.map, wanted
        delta = Delta.between(before, wanted)
        self.applied.append(delta)
        return Applied(before, wanted, delta, 0, 0, 0)


def snapshot(folder: Path) -> custody.Snapshot:
    taken = custody.Snapshot(
        switch="agg0", spec=SPEC, ports=tuple(range(1, 17)), circuits=tuple(FOUND)
    )
    custody.write(folder, taken)
    return taken


def give_back(folder: Path, unit: Unit) -> tuple[str, str]:
    outcomes = asyncio.run(
        custody.give_back({"agg0": unit}, folder, custody.read_all(folder))  # type: ignore[dict-item]
    )
    return outcomes["agg0"]


def test_a_snapshot_read_by_another_process_is_the_one_written(tmp_path: Path) -> None:
    taken = snapshot(tmp_path)
    assert custody.read_all(tmp_path) == {"agg0": taken}
    assert taken.matching == FOUND


def test_a_changed_switch_is_put_back_and_marked(tmp_path: Path) -> None:
    snapshot(tmp_path)
    unit = Unit(map=Matching.of([(1, 10), (2, 9)]))
    outcome, difference = give_back(tmp_path, unit)
    assert outcome == "restored"
    assert difference == "drop 1->10, 2->9; make 1->9, 2->10"
    assert unit.map == FOUND
    assert custody.read_all(tmp_path)["agg0"].restored


def test_a_switch_that_is_as_it_was_is_called_unchanged(tmp_path: Path) -> None:
    snapshot(tmp_path)
    assert give_back(tmp_path, Unit(map=FOUND)) == ("unchanged", "")
    assert custody.read_all(tmp_path)["agg0"].restored


def test_what_could_not_be_put_back_is_said_circuit_by_circuit_and_stays_unmarked(
    tmp_path: Path,
) -> None:
    snapshot(tmp_path)
    outcome, difference = give_back(tmp_path, Unit(map=Matching.of([(1, 9)]), broken=True))
    assert outcome == "failed"
    assert "still to do: make 2->10" in difference
    assert not custody.read_all(tmp_path)["agg0"].restored


def test_a_mute_switch_is_unknown_and_the_wanted_map_is_told(tmp_path: Path) -> None:
    snapshot(tmp_path)
    outcome, difference = give_back(tmp_path, Unit(broken=True, mute=True))
    assert outcome == "failed"
    assert "map unknown" in difference
    assert "1->9, 2->10" in difference


def test_a_full_disk_leaves_the_snapshot_before_and_the_switch_put_back(tmp_path: Path) -> None:
    taken = snapshot(tmp_path)
    (tmp_path / "agg0.snapshot.tmp").symlink_to("/dev/full")
    with pytest.raises(InfrastructureError, match=r"agg0.*cannot be written: No space"):
        custody.write(tmp_path, taken)
    unit = Unit(map=Matching.of([(1, 10), (2, 9)]))
    outcome, difference = give_back(tmp_path, unit)
    assert outcome == "restored"
    assert "No space" in difference
    assert unit.map == FOUND
    assert custody.read_all(tmp_path) == {"agg0": taken}


def test_a_damaged_snapshot_needs_a_person_and_is_named(tmp_path: Path) -> None:
    snapshot(tmp_path)
    path = tmp_path / "agg0.snapshot.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RestoreFailed, match=r"agg0\.snapshot\.json: the snapshot cannot be read"):
        custody.read_all(tmp_path)


def test_a_journal_that_lost_its_start_does_not_stand_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "journal.jsonl").write_bytes(b'{"type":"sta')
    assert recover("r1", tmp_path) == {}
    custody.write(
        folder / "snapshots",
        custody.Snapshot(
            switch="agg0",
            spec=Switch(driver="polatis-scpi", url="tcp://127.0.0.1:1", ports="1-8,9-16"),
            ports=tuple(range(1, 17)),
            circuits=tuple(FOUND),
        ),
    )
    with pytest.raises(RestoreFailed, match=r"agg0 failed: .*127\.0\.0\.1:1"):
        recover("r1", tmp_path)


# -- ToRs ------------------------------------------------------------------------------------------

LEAF = Tor(driver="linux-ssh", url="ssh://admin@127.0.0.1:1", known_hosts="none")


@dataclass
class Handle:
    """A ToR of which only how it is reached is of interest."""

    spec: Tor = LEAF


class Rack:
    """A bench of two ToRs; the second one refuses where `stubborn`."""

    switches: Mapping[str, Unit] = {}
    tors = {"tor0": Handle(), "tor1": Handle()}
    topology = SimpleNamespace(routes=lambda _links: {"tor0": frozenset(), "tor1": frozenset()})
    stubborn = False

    async def steer(self, wanted: Mapping[str, frozenset[object]]) -> None:
        assert wanted == {"tor0": frozenset(), "tor1": frozenset()}
        if self.stubborn:
            raise SteeringFailed({"tor1": "tor1: no answer"})


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_tor_is_marked_once_it_has_no_route_of_ours(tmp_path: Path, *, stubborn: bool) -> None:
    rack: Any = Rack()
    rack.stubborn = stubborn
    assert asyncio.run(custody.take(rack, tmp_path)) == {}
    assert custody.pending(tmp_path) == {
        name: custody.Steered(tor=name, spec=LEAF) for name in rack.tors
    }
    failed = asyncio.run(custody.unsteer(rack, tmp_path))
    assert failed == (["tor1: no answer"] if stubborn else [])
    assert list(custody.pending(tmp_path)) == (["tor1"] if stubborn else [])


def test_a_tor_that_is_not_reached_needs_a_person_and_is_named(tmp_path: Path) -> None:
    custody.write(tmp_path, custody.Steered(tor="tor0", spec=LEAF))
    custody.write(tmp_path, custody.Steered(tor="tor1", spec=LEAF, restored=True))
    with pytest.raises(RestoreFailed) as caught:
        recovery.recover(tmp_path)
    assert "tor0 failed: tor0 (ssh://admin@127.0.0.1:1): " in str(caught.value)
    assert "tor1" not in str(caught.value)
    assert list(recovery.abandon(tmp_path)) == ["tor0"]
    assert recovery.recover(tmp_path) == {}


def test_a_full_disk_while_a_tor_is_put_back_keeps_nobody_from_putting_back_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        """A ToR, or a switch, that is reached."""

        def __init__(self, name: str, *_: object) -> None:
            self.name, self.unit = name, units.setdefault(name, Unit(name))

        async def open(self) -> None: ...

        async def close(self) -> None: ...

        async def read(self) -> Any:
            return self.unit.map

        async def apply(self, wanted: Any) -> Any:
            return await self.unit.apply(wanted) if isinstance(wanted, Matching) else None

    units: dict[str, Unit] = {}
    monkeypatch.setattr(recovery, "ThreadedSwitch", Opened)
    monkeypatch.setattr(recovery, "SteerableTor", Opened)
    custody.write(tmp_path, custody.Steered(tor="tor0", spec=LEAF))
    snapshot(tmp_path)
    (tmp_path / "tor0.steered.tmp").symlink_to("/dev/full")
    told = recovery.recover(tmp_path)
    assert units["agg0"].map == FOUND
    assert "No space" in told["tor0"]
    assert told["agg0"].startswith("restored")
