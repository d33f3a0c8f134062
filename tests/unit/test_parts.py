"""Parts of a file: what a simulated hop carries at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.rlsim.parts import Parts


def test_few_buckets_are_the_first_and_the_last_ones() -> None:
    assert Parts.of(70, 100) == Parts(0, 0, 0, 70)
    assert Parts.of(170, 100) == Parts(100, 0, 0, 70)
    assert Parts.of(270, 100) == Parts(100, 0, 100, 70)
    assert Parts.of(470, 100) == Parts(100, 200, 100, 70)


@given(size=st.integers(1, 10**6), bucket=st.integers(1, 10**6))
def test_all_of_a_file_is_carried_once(size: int, bucket: int) -> None:
    parts = Parts.of(size, bucket)
    assert sum(parts) == size
    assert 0 < parts.last <= bucket
