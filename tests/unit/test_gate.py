"""Holding traffic at an agreed iteration: the bookkeeping, without torch."""

from hypothesis import given
from hypothesis import strategies as st

from harness.model.gate import Gate, Watch


def iterate(gate: Gate, begin_ns: int, end_ns: int) -> None:
    assert gate.may_enter()
    gate.enter(begin_ns)
    gate.leave(end_ns)


def test_nothing_begins_once_held_and_the_agreed_iteration_still_does() -> None:
    gate = Gate()
    iterate(gate, 0, 10)
    gate.enter(10)
    assert gate.hold() == 2
    assert not gate.standing, "an iteration is in flight"
    gate.leave(20)
    assert gate.standing
    assert gate.stop_at(3), "a peer is one ahead"
    assert not gate.standing
    iterate(gate, 20, 30)
    assert gate.standing
    assert gate.last_good_ns == 30
    assert not gate.stop_at(2), "beyond it"


def test_holding_twice_changes_nothing() -> None:
    gate = Gate()
    assert gate.hold() == 0
    assert gate.stop_at(1)
    iterate(gate, 0, 5)
    assert gate.hold() == 1
    assert gate.standing


@given(st.lists(st.sampled_from([0, 1, 2]), min_size=10, max_size=200), st.integers(2, 5))
def test_ranks_that_go_to_the_furthest_iteration_all_stand_there(
    choices: list[int], ranks: int
) -> None:
    """A collective ends on no rank before it was entered on all: any interleaving of that."""
    gates = [Gate() for _ in range(ranks)]

    def step(choice: int) -> None:
        gate = gates[choice % ranks]
        if gate.entered == gate.finished and gate.may_enter():
            gate.enter(0)
        elif gate.entered > gate.finished and min(g.entered for g in gates) >= gate.entered:
            gate.leave(1)

    for turn, choice in enumerate(choices):
        step(choice + turn)
    furthest = max(gate.hold() for gate in gates)
    for gate in gates:
        assert gate.stop_at(furthest)
    for turn in range(8 * ranks):
        step(turn)
    assert all(gate.standing for gate in gates)
    assert {gate.finished for gate in gates} == {furthest}


def test_steady_is_the_first_of_three_near_ones() -> None:
    watch = Watch(released_ns=0, reference_ns=100, within_pct=10.0)
    spans = [(0, 500), (500, 610), (610, 900), (900, 1010), (1010, 1060), (1060, 1170)]
    found = [watch.observe(*span) for span in spans]
    assert found == [False, False, False, False, False, True]
    assert (watch.first_good_ns, watch.steady_ns, watch.longest_ns) == (500, 1010, 500)


def test_the_stall_of_the_held_iteration_is_felt() -> None:
    gate = Gate()
    iterate(gate, 0, 900)
    gate.enter(1000)
    gate.hold()
    gate.leave(1400)
    watch = gate.resume(2000, reference_ns=100, within_pct=10.0)
    assert watch.longest_ns == 400
    assert gate.may_enter()
    assert gate.resume(3000, 100, 10.0).longest_ns == 0, "it was not held this time"


def test_the_last_iterations_are_kept() -> None:
    gate = Gate()
    for begin in range(5000):
        iterate(gate, begin, begin + 1)
    assert gate.finished == 5000
    assert gate.spans[-1] == (4999, 5000)
    assert len(gate.spans) < 5000
