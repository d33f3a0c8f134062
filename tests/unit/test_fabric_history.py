"""What earlier steps showed is expected again, but for what is no traffic to plan for."""

from __future__ import annotations

import numpy as np

from harness.fabric.prediction import PAYLOAD_SHARE
from harness.run.fabric.history import STRAY, History
from harness.run.fabric.traffic import Crossed
from tests.unit.fabric_bench import bench, demand

FOUR = bench(4)


def crossed(sent: list[float], received: list[float]) -> Crossed:
    """Bytes of payload as counters of frames show them."""
    return Crossed(np.array(sent) / PAYLOAD_SHARE, np.array(received) / PAYLOAD_SHARE, 0.0)


def test_what_was_not_announced_is_expected_again() -> None:
    history, announced = History(), demand(FOUR, t0_t1=1e6)
    history.crossed(announced, crossed([1e6, 0, 5e5, 0], [0, 1e6, 0, 5e5]))
    assert np.sum(history.unannounced_bytes) > 1e5


def test_acknowledgements_and_what_counters_are_apart_by_are_not() -> None:
    history, announced = History(), demand(FOUR, t0_t1=1e6)
    stray = 0.2 * STRAY * 1e6
    history.crossed(announced, crossed([1e6, stray, stray, 0], [0, 1e6, stray, stray]))
    assert not np.any(history.unannounced_bytes)
