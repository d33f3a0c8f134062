"""A NIC's port that needs its time after the light: seen by packets, and by no power meter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulated.lab import lab

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

HOLD_MS, SWITCH_MS = 150.0, 10.0


def test_the_hold_of_the_bench_file_lengthens_the_dark_time_of_packets(tmp_path: Path) -> None:
    with lab(tmp_path) as bench:
        bench.files()
        path = bench.folder / "bench.toml"
        path.write_text(f"{path.read_text()}\n[links]\nnic_hold_ms = {HOLD_MS}\n")
        code, out = bench.run()
        assert code == 0, out
        rows = bench.events("reconfigure")
    assert rows
    for row in rows:
        # the silence is known to a beacon at either end, and beacons come late on a busy machine
        assert 0.9 * (HOLD_MS + SWITCH_MS) <= row["dark_ms"] < HOLD_MS + SWITCH_MS + 100
        after_light_ms = (row["stages"]["path_verified"] - row["stages"]["light"]) / 1e6
        assert (
            after_light_ms >= 0.5 * HOLD_MS
        )  # the meter was read long before packets went through
