"""Emulated units that are broken: what a driver reads back and measures, and what a run hears."""

import signal
import time
from pathlib import Path

import msgspec
import pytest

from drivers.apply import apply, read_ours, wait_for_light
from drivers.base import Matching, Ocs
from drivers.emulators.config import EmulatedSwitch, Faults
from drivers.errors import DriverError, Indeterminate, NoLight
from harness.bench.breaking import break_unit
from harness.bench.leftovers import kept_for
from harness.errors import UsageError
from tests.emulated.driver_bench import OURS, Unit, emulated
from tests.emulated.lab import Lab, lab

LIMIT_S = 10.0
FLOOR_DBM = -25.0
STRAIGHT, CROSSED = Matching.of({(1, 9), (2, 10)}), Matching.of({(1, 10), (2, 9)})
FACES = [("scpi", "tcp"), ("scpi", "serial"), ("tl1", "ssh")]


def after_s(limit_s: float) -> int:
    return time.monotonic_ns() + round(limit_s * 1e9)


def make(ocs: Ocs, wanted: Matching) -> None:
    apply(ocs, wanted, OURS, deadline_ns=after_s(LIMIT_S))


def await_light(ocs: Ocs, *egress: int, limit_s: float = LIMIT_S) -> None:
    wait_for_light(ocs, egress, FLOOR_DBM, after_s(limit_s))


def break_at_work(unit: Unit, folder: Path, faults: Faults) -> None:
    path = folder / "unit.json"
    told = msgspec.json.decode(path.read_bytes(), type=EmulatedSwitch)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, faults=faults)))
    unit.process.send_signal(signal.SIGHUP)


# -- as a driver sees it -----------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "server"), FACES)
def test_a_stuck_port_is_read_back_as_made_and_has_no_light(tmp_path, protocol, server):
    faults = Faults(stuck_ports=(9,))
    with emulated(tmp_path, protocol, server, faults=faults) as unit:
        ocs = unit.open()
        make(ocs, STRAIGHT)
        assert read_ours(ocs, OURS) == STRAIGHT
        await_light(ocs, 10)
        with pytest.raises(NoLight) as dark:
            await_light(ocs, 9, 10, limit_s=0.1)
        assert set(dark.value.ports) == {9}
        ocs.close()


@pytest.mark.parametrize(("protocol", "server"), [("scpi", "tcp"), ("tl1", "ssh")])
def test_a_unit_that_loses_power_is_in_doubt_and_then_found_empty(tmp_path, protocol, server):
    faults = Faults(reboot_on_command=2)
    with emulated(tmp_path, protocol, server, faults=faults) as unit:
        ocs = unit.open()
        make(ocs, STRAIGHT)
        with pytest.raises(Indeterminate):
            make(ocs, CROSSED)
        deadline_ns = after_s(LIMIT_S)
        while True:
            try:
                found = read_ours(ocs, OURS)
                break
            except DriverError:
                assert time.monotonic_ns() < deadline_ns
        assert found == Matching.of(())
        make(ocs, CROSSED)
        await_light(ocs, 9, 10)
        ocs.close()


def test_behind_a_serial_line_a_unit_that_loses_power_is_only_slow(tmp_path):
    faults = Faults(reboot_on_command=2)
    with emulated(tmp_path, "scpi", "serial", faults=faults) as unit:
        ocs = unit.open(exchange_ns=500_000_000)
        make(ocs, STRAIGHT)
        make(ocs, CROSSED)
        assert read_ours(ocs, OURS) == CROSSED
        await_light(ocs, 9, 10)
        ocs.close()


def test_a_unit_that_is_up_breaks_when_it_is_told_and_is_mended(tmp_path):
    with emulated(tmp_path, "scpi", "tcp", circuits=((1, 9),)) as unit:
        ocs = unit.open()
        await_light(ocs, 9)
        break_at_work(unit, tmp_path, Faults(failed_ports=(9,)))
        deadline_ns = after_s(LIMIT_S)
        while ocs.power_dbm([9])[9] > FLOOR_DBM:
            assert time.monotonic_ns() < deadline_ns
        assert read_ours(ocs, OURS) == Matching.of({(1, 9)})
        break_at_work(unit, tmp_path, Faults())
        await_light(ocs, 9)
        ocs.close()


def test_a_unit_that_is_told_of_a_port_it_has_not_goes_on_as_it_is(tmp_path):
    with emulated(tmp_path, "scpi", "tcp", circuits=((1, 9),)) as unit:
        ocs = unit.open()
        break_at_work(unit, tmp_path, Faults(failed_ports=(99,)))
        assert read_ours(ocs, OURS) == Matching.of({(1, 9)})
        await_light(ocs, 9)
        assert unit.process.poll() is None
        ocs.close()


# -- as a run sees it --------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path):
    with lab(tmp_path) as made:
        yield made


@pytest.mark.root
@pytest.mark.timeout(120)
def test_cables_that_are_swapped_are_heard_though_the_unit_measures_light(bench: Lab) -> None:
    bench.files(emulate="swapped_ports = [[11, 12]]")
    code, out = bench.run()
    assert code == 3, out
    for near, far in (("u1", "u2"), ("u2", "u1")):  # side by side between the same ToRs
        assert f"right:{near} hears left:{far} instead of left:{near}" in out
    assert "no light" not in out
    assert bench.snapshots() == {"ocs": True}


@pytest.mark.root
@pytest.mark.timeout(120)
def test_a_port_that_sticks_during_a_run_is_named_at_the_next_change(bench: Lab) -> None:
    bench.files(count=1000, rest_ms=20.0)
    process = bench.start()
    bench.await_traffic(process)
    (record,) = kept_for(bench.run_folder)
    with pytest.raises(UsageError, match="no emulated unit"):
        break_unit(record, "nobody", Faults())
    break_unit(record, "ocs", Faults(stuck_ports=(11,)))
    code, out = bench.finish(process)
    assert code == 3, out
    assert "no light on egress ports 11" in out
    assert bench.snapshots() == {"ocs": True}
