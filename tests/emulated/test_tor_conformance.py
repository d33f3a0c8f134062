"""Every ToR driver against real routes: the kernel's by netlink and over SSH, and a real FRR's."""

from pathlib import Path

import pytest

from drivers.tor.conformance import Trouble, check_tor
from tests.emulated.tor_bench import FRR, maker

pytestmark = pytest.mark.root


def test_the_netlink_driver_keeps_the_contract(tmp_path: Path) -> None:
    check_tor(maker(tmp_path, "netlink"), without={Trouble.LOST_REPLY, Trouble.CUT})


@pytest.mark.parametrize("user", ["admin", "root"])
def test_the_linux_driver_keeps_the_contract_over_ssh(tmp_path: Path, user: str) -> None:
    check_tor(maker(tmp_path, "linux-ssh", user=user))


@pytest.mark.skipif(not FRR.exists(), reason="no FRRouting here: apt-get install frr")
def test_the_frr_driver_keeps_the_contract_over_ssh(tmp_path: Path) -> None:
    check_tor(maker(tmp_path, "frr-ssh"))
