"""The bound is a promise: the true offset is inside it, whatever the path and the clocks do."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.wire.pulse import Silence
from harness.wire.timesync import (
    STAMP_COST_NS,
    WINDOW_NS,
    ClockError,
    ClockFit,
    Sample,
    fit,
    interval,
    same_clock,
    thin,
)

S = 1_000_000_000


class Node:
    """A clock that is `offset` ahead at coordinator time 0 and gains `ppm`."""

    def __init__(self, offset: int, ppm: float) -> None:
        self.offset, self.rate = offset, ppm * 1e-6

    def read(self, t: float) -> int:
        return round(t + self.offset + self.rate * t)

    def truth(self, t_node: int) -> float:
        """Return coordinator time."""
        return (t_node - self.offset) / (1 + self.rate)


def probes(
    node: Node, at: list[int], seed: int, there: int, back: int, jitter: int
) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for t1 in at:
        out = there + rng.expovariate(1 / jitter)
        home = back + rng.expovariate(1 / jitter)
        held = rng.uniform(1_000, 20_000)
        stamps = node.read(t1 + out), node.read(t1 + out + held)
        samples.append(Sample(t1, *stamps, round(t1 + out + held + home)))
    return samples


def bursts(seconds: int, start: int) -> list[int]:
    """A first burst, single beats, a small burst every five seconds."""
    first = [start + i * 150_000 for i in range(200)]
    beats = [start + i * S // 5 for i in range(1, 5 * seconds)]
    small = [start + s * S + i * 150_000 for s in range(5, seconds, 5) for i in range(20)]
    return sorted(first + beats + small)


@given(
    offset=st.integers(-(10**16), 10**16),
    ppm=st.floats(-200, 200),
    seconds=st.sampled_from([1, 6, 31, 90]),
    start=st.integers(0, 10**15),
    there=st.integers(10_000, 2_000_000),
    back=st.integers(10_000, 2_000_000),
    jitter=st.integers(1_000, 5_000_000),
    seed=st.integers(0, 2**32),
)
def test_the_true_time_is_always_inside_the_bound(
    offset: int, ppm: float, seconds: int, start: int, there: int, back: int, jitter: int, seed: int
) -> None:
    # The clock is placed so that `offset` holds at `start`, where floats are still exact.
    node = Node(offset, ppm)
    samples = [
        Sample(s.t1 + start, s.t2 + start, s.t3 + start, s.t4 + start)
        for s in probes(node, bursts(seconds, 0), seed, there, back, jitter)
    ]
    result = fit("n0", thin(samples, samples[-1].at), len(samples))
    for t in (0, seconds * S // 2, seconds * S, (seconds + 10) * S):
        t_node = node.read(t) + start
        # 4 ns: floats at 10^16, in this test's own arithmetic.
        assert abs(result.to_coordinator(t_node) - (t + start)) <= result.bound_at(t_node) + 4


def test_a_long_look_finds_the_drift_and_narrows_its_doubt() -> None:
    samples = probes(Node(5 * S, 40.0), bursts(60, 0), 1, 50_000, 50_000, 20_000)
    result = fit("n0", thin(samples, samples[-1].at), len(samples))
    assert result.drift_ppb == pytest.approx(40_000, abs=1_000)
    assert result.drift_bound_ppb < 10_000
    assert result.bound_ns < 70_000


def test_the_bound_is_half_the_least_delay_and_the_stamps() -> None:
    samples = [Sample(t, t + 40_000, t + 41_000, t + 81_000) for t in range(0, 10**8, 10**6)]
    result = fit("n0", thin(samples, samples[-1].at), len(samples))
    assert result.delay_ns == 80_000
    assert 40_000 <= result.bound_ns <= 40_000 + STAMP_COST_NS + 20


def test_slow_probes_do_not_spoil_the_fit() -> None:
    rng = random.Random(3)
    good = [Sample(t, t + 30_000, t + 30_500, t + 60_500) for t in range(0, 10**8, 10**6)]
    slow = [s._replace(t4=s.t4 + rng.randrange(10**6, 10**7)) for s in good[1:]]
    result = fit("n0", thin([*good[:20], *slow], good[-1].at), 120)
    assert abs(result.offset_ns) < 1_000


def test_old_samples_are_forgotten() -> None:
    old, new = Sample(0, 1, 2, 3), Sample(WINDOW_NS * 2, *[WINDOW_NS * 2 + i for i in (1, 2, 3)])
    assert thin([old, new], new.at) == [new]


def test_a_clock_that_was_stepped_is_not_fitted() -> None:
    before = probes(Node(0, 0), bursts(10, 0), 1, 30_000, 30_000, 1_000)
    after = probes(Node(S, 0), bursts(10, 20 * S), 1, 30_000, 30_000, 1_000)
    with pytest.raises(ClockError, match="n0: clock probes contradict each other"):
        fit("n0", thin([*before, *after], after[-1].at), 1)


def test_no_answered_probe_is_said() -> None:
    with pytest.raises(ClockError, match="n0: no clock probe was answered"):
        fit("n0", [], 10)


def fitted(node: str, offset_ns: int = 0, bound_ns: int = 100) -> ClockFit:
    return ClockFit(
        node=node, offset_ns=offset_ns, drift_ppb=0.0, at_ns=0, delay_ns=0, bound_ns=bound_ns,
        samples=1, drift_bound_ppb=1_000.0,
    )  # fmt: skip


def test_a_shared_clock_is_the_identity_once_probes_agree() -> None:
    assert same_clock(fitted("n0", offset_ns=90)).to_coordinator(12) == 12
    with pytest.raises(ClockError, match="n0 claims to share"):
        same_clock(fitted("n0", offset_ns=101))


def test_a_duration_across_nodes_carries_both_bounds() -> None:
    start, end = fitted("a", offset_ns=50), fitted("b", offset_ns=-50)
    assert interval(start, 1_000, end, 5_000) == (4_100, 200, False)
    far = interval(start, 10 * S, end, 10 * S)
    assert far.bound_ns == 200 + 2 * 10_000  # a part per million over ten seconds, twice


def test_a_negative_duration_inside_the_bound_is_zero_and_counted() -> None:
    assert interval(fitted("a"), 1_000, fitted("b"), 800) == (0, 200, True)


def test_a_negative_duration_beyond_the_bound_is_a_clock_error() -> None:
    with pytest.raises(ClockError, match="b is 201 ns ahead of a"):
        interval(fitted("a"), 1_000, fitted("b"), 799)
    with pytest.raises(ClockError):
        interval(fitted("a"), 1_000, fitted("a"), 999)


def test_fits_survive_the_record() -> None:
    original = fitted("n0", offset_ns=-7)
    assert msgspec.json.decode(msgspec.json.encode(original), type=ClockFit) == original


def test_silence_grows_until_a_sign_of_life() -> None:
    silence = Silence(turn_ns=100, now_ns=0)
    assert [silence.at(t) for t in (100, 200, 300)] == [100, 200, 300]
    silence.heard(310)
    assert silence.at(400) == 90


def test_time_in_which_we_stood_still_ourselves_is_not_the_peers_silence() -> None:
    silence = Silence(turn_ns=100, now_ns=0)
    silence.at(100)
    assert silence.at(10_000) <= 200
    assert silence.at(10_100) <= 300


@given(t=st.integers(0, 10**15), offset=st.integers(-(10**15), 10**15), ppb=st.floats(-5e5, 5e5))
def test_a_stamp_mapped_there_and_back_is_the_same(t: int, offset: int, ppb: float) -> None:
    there = msgspec.structs.replace(fitted("n0", offset), drift_ppb=ppb, at_ns=t + offset - S)
    assert abs(there.to_coordinator(there.to_node(t)) - t) <= 1
