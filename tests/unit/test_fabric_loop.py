"""The fabric's controller over many random runs, and under the RL loop."""

from __future__ import annotations

import fabric_random
import pytest
from virtual_time import run_virtually

RUNS = 200


@pytest.mark.parametrize("first", range(0, RUNS, 20))
def test_whatever_breaks_nobody_is_stranded_for_long_and_the_session_tells_the_truth(
    first: int,
) -> None:
    for seed in range(first, first + 20):
        run_virtually(fabric_random.run(seed))
