"""Every switch of a bench file keeps the contract of its driver, on our ports only.

``pytest tests/hardware --bench my-lab.toml``. Light on our ports goes and comes meanwhile; the map
is restored at the end of each test. What others have connected is never touched.
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from drivers.base import PortState, PowerMonitor, Shutters
from drivers.conformance import Trouble, check_ocs
from tests.hardware.racked import Racked

pytestmark = pytest.mark.timeout(900)

PAIRS_MIN = 4


def test_it_says_who_it_is_and_reads_the_same_twice(switch: Racked) -> None:
    with closing(switch.open()) as ocs:
        who = ocs.identify()
        assert who.vendor, who
        assert who.model, who
        assert who.serial, who
        strange = switch.ours - {*who.ingress, *who.egress}
        assert not strange, f"{switch.name}.ports: {sorted(strange)} are not on {who}"
        assert ocs.read() == ocs.read(), "the map changes by itself: is somebody else switching?"


def test_its_power_meters_read_plausible_values(switch: Racked) -> None:
    with closing(switch.open()) as ocs:
        if not (ocs.capabilities.has_power and isinstance(ocs, PowerMonitor)):
            pytest.skip(f"{switch.name} has no power meters")
        powers = ocs.power_dbm(sorted(switch.ours))
    assert set(powers) == switch.ours
    wrong = {p: dbm for p, dbm in powers.items() if not (math.isfinite(dbm) and -100 < dbm < 30)}
    assert not wrong, f"dBm that no meter reads: {wrong}"


def test_none_of_our_ports_has_failed(switch: Racked) -> None:
    with closing(switch.open()) as ocs:
        if not (ocs.capabilities.has_shutters and isinstance(ocs, Shutters)):
            pytest.skip(f"{switch.name} tells no port states")
        states = ocs.port_states(sorted(switch.ours))
    failed = [port for port, state in states.items() if state is PortState.FAILED]
    assert not failed, f"{switch.name} says that these ports have failed: {failed}"


def test_its_driver_keeps_the_contract(switch: Racked, tmp_path: Path) -> None:
    with switch.maker(tmp_path)(Trouble.NONE) as specimen:
        count = len(specimen.pairs())
    if count < PAIRS_MIN:
        pytest.skip(
            f"{switch.name}: the check needs {PAIRS_MIN} free pairs of our ports, not {count}"
        )
    check_ocs(switch.maker(tmp_path), without={Trouble.REFUSAL})
