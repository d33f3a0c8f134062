"""The apply contract on a switch in memory: checked first, least change, verified, or undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.apply import apply, read_ours, wait_for_light
from drivers.base import Applied, Capabilities, Circuit, Delta, Identity, Matching, Receipt
from drivers.errors import (
    BadMatching,
    DeadlineExpired,
    DeviceFault,
    Indeterminate,
    LinkLost,
    Mismatch,
    NoLight,
    Refused,
)

N = 8
IDENTITY = Identity("Acme", "X-8x8-", "1", "1", range(1, N + 1), range(N + 1, 2 * N + 1))
ALL = frozenset(range(1, 2 * N + 1))
FAR_NS = 10**15

Act = Callable[["Switch"], None]


class Clock:
    """Virtual: moves a microsecond at each look, and by what is slept."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


class Switch:
    """An Ocs in memory. `troubles` are what happens in place of the next changes and reads."""

    name = "agg0"
    capabilities = Capabilities(
        has_power=True,
        has_shutters=False,
        hitless_add=True,
        steals_busy_ports=True,
        batch_max=64,
        typical_switch_ns=25_000_000,
    )

    def __init__(self, *circuits: Circuit) -> None:
        self.map = dict(circuits)
        self.sent: list[str] = []
        self.on_change: list[Act | None] = []
        self.on_read: list[DeviceFault | None] = []
        self.reads = 0

    def identify(self) -> Identity:
        return IDENTITY

    def read(self) -> Matching:
        self.reads += 1
        if self.on_read and (fault := self.on_read.pop(0)):
            raise fault
        return Matching.of(self.map.items())

    def connect(self, circuits: Sequence[Circuit]) -> None:
        self.sent += [f"+{a}->{b}" for a, b in circuits]
        self._change(lambda: self.map.update(circuits))

    def disconnect(self, circuits: Sequence[Circuit]) -> None:
        self.sent += [f"-{a}->{b}" for a, b in circuits]

        def drop() -> None:
            for a, b in circuits:
                if self.map.get(a) == b:
                    del self.map[a]

        self._change(drop)

    def _change(self, obey: Callable[[], None]) -> None:
        act = self.on_change.pop(0) if self.on_change else None
        if act is None:
            obey()
            return
        act(self)

    def preview(self, delta: Delta) -> list[str]:
        return [str(delta)]

    def close(self) -> None:
        pass


class OneExchange(Switch):
    """A Switch that takes deletes and makes together and reads back in the same exchange."""

    def __init__(self, *circuits: Circuit, clock: Clock) -> None:
        super().__init__(*circuits)
        self._clock = clock

    def rewire(self, drop: Sequence[Circuit], make: Sequence[Circuit]) -> Receipt:
        sent_ns = self._clock()
        if drop:
            self.disconnect(drop)
        if make:
            self.connect(make)
        return Receipt(sent_ns, self._clock(), Matching.of(self.map.items()))


def put(
    switch: Switch,
    *circuits: Circuit,
    ours: frozenset[int] = ALL,
    clock: Clock | None = None,
    deadline_ns: int = FAR_NS,
) -> Applied:
    clock = clock or Clock()
    return apply(
        switch,
        Matching(frozenset(circuits)),
        ours,
        deadline_ns=deadline_ns,
        now_ns=clock,
        sleep=clock.sleep,
    )


def ports(side: range) -> st.SearchStrategy[list[int]]:
    return st.permutations(list(side))


matchings = st.builds(
    lambda a, b, n: Matching.of(zip(a[:n], b[:n], strict=True)),
    ports(IDENTITY.ingress),
    ports(IDENTITY.egress),
    st.integers(0, N),
)


@given(matchings, matchings)
def test_any_map_is_reached_by_its_least_difference_deletes_first(
    before: Matching, wanted: Matching
) -> None:
    switch = Switch(*before)
    clock = Clock()
    applied = apply(switch, wanted, ALL, deadline_ns=FAR_NS, now_ns=clock, sleep=clock.sleep)
    assert (applied.before, applied.after, switch.read()) == (before, wanted, wanted)
    drops = [f"-{a}->{b}" for a, b in sorted(before.circuits - wanted.circuits)]
    makes = [f"+{a}->{b}" for a, b in sorted(wanted.circuits - before.circuits)]
    assert switch.sent == drops + makes
    assert applied.sent_ns <= applied.acknowledged_ns <= applied.done_ns


def test_nothing_to_do_sends_nothing_and_costs_one_read() -> None:
    switch = Switch((1, 9))
    applied = put(switch, (1, 9))
    assert (switch.sent, switch.reads) == ([], 1)
    assert not applied.delta
    assert applied.sent_ns == applied.acknowledged_ns == applied.done_ns


def test_a_unit_that_reads_back_itself_costs_one_read_and_one_exchange() -> None:
    clock = Clock()
    switch = OneExchange((1, 9), clock=clock)
    applied = put(switch, (1, 10), clock=clock)
    assert switch.reads == 1
    assert applied.sent_ns < applied.acknowledged_ns < applied.done_ns


@pytest.mark.parametrize(
    ("circuits", "says"),
    [
        ([(1, 9), (2, 9)], "egress ports used twice: 9"),
        ([(1, 9), (1, 10)], "ingress ports used twice: 1"),
        ([(1, 17)], "1->17: 17 is no egress port of this unit (9..16)"),
        ([(9, 1)], "9->1: 9 is no ingress port of this unit (1..8); 9->1: 1 is no egress"),
        ([(8, 9)], "8->9: port 8 is not ours"),
        ([(1, 16)], "1->16: port 16 is not ours"),
        ([(2, 10)], "2->10: port 2 is held by 2->16, which is not all ours"),
    ],
)
def test_an_impossible_map_is_refused_before_anything_is_sent(
    circuits: list[Circuit], says: str
) -> None:
    switch = Switch((1, 9), (2, 16))
    with pytest.raises(BadMatching) as caught:
        put(switch, *circuits, ours=ALL - {8, 16})
    assert says in str(caught.value)
    assert switch.sent == []


def test_circuits_that_are_not_all_ours_are_neither_seen_nor_touched() -> None:
    switch = Switch((1, 9), (7, 15), (6, 16))
    ours = ALL - {7, 15, 16}
    assert read_ours(switch, ours) == Matching.of([(1, 9)])
    put(switch, (2, 9), ours=ours)
    assert switch.map == {2: 9, 7: 15, 6: 16}
    assert switch.sent == ["-1->9", "+2->9"]


def test_past_the_deadline_nothing_is_begun() -> None:
    switch = Switch((1, 9))
    with pytest.raises(DeadlineExpired, match="nothing was changed"):
        put(switch, (1, 10), deadline_ns=0)
    assert switch.sent == []


def lost_but_obeyed(switch: Switch) -> None:
    switch.map[1] = 10
    raise Indeterminate("no answer")


def lost(_: Switch) -> None:
    raise Indeterminate("no answer")


def refuse(_: Switch) -> None:
    raise Refused("IDNV", "Invalid OXC port", "ENT-PATCH::1,10")


def ignore(_: Switch) -> None:
    pass


def test_a_lost_reply_is_resolved_by_reading() -> None:
    switch = Switch()
    switch.on_change = [lost_but_obeyed]
    applied = put(switch, (1, 10))
    assert switch.sent == ["+1->10"]
    assert applied.sent_ns < applied.acknowledged_ns <= applied.done_ns


def test_what_a_lost_command_did_not_do_is_sent_once_more() -> None:
    switch = Switch((1, 9), (2, 11))
    switch.on_change = [None, lost]
    put(switch, (1, 10), (2, 11))
    assert switch.sent == ["-1->9", "+1->10", "+1->10"]
    assert switch.map == {1: 10, 2: 11}


def test_a_command_lost_twice_is_undone_and_told() -> None:
    switch = Switch((1, 9))
    switch.on_change = [None, lost, lost]
    with pytest.raises(Mismatch, match=r"1->10 missing .*restored"):
        put(switch, (1, 10))
    assert switch.map == {1: 9}


def test_a_refusal_restores_the_previous_map_and_names_what_is_missing() -> None:
    switch = Switch((1, 9), (3, 11))
    switch.on_change = [None, refuse]
    with pytest.raises(Refused) as caught:
        put(switch, (1, 10), (3, 11))
    assert (caught.value.code, caught.value.command) == ("IDNV", "ENT-PATCH::1,10")
    assert "1->10 missing" in str(caught.value)
    assert "the previous map is restored" in str(caught.value)
    assert switch.map == {1: 9, 3: 11}


def test_a_map_that_is_not_the_one_asked_for_is_undone_and_named() -> None:
    switch = Switch((1, 9))
    switch.on_change = [None, ignore]
    with pytest.raises(Mismatch) as caught:
        put(switch, (1, 10))
    assert caught.value.missing == {(1, 10)}
    assert caught.value.unexpected == frozenset()
    assert switch.map == {1: 9}


def test_a_restore_that_is_refused_is_told_with_what_differs() -> None:
    switch = Switch((1, 9))
    switch.on_change = [None, refuse, refuse]
    with pytest.raises(Indeterminate) as caught:
        put(switch, (1, 10))
    assert "restoring the previous map failed" in str(caught.value)
    assert isinstance(caught.value.__cause__, Refused)


def test_a_restore_that_is_ignored_is_told_with_what_differs() -> None:
    switch = Switch((1, 9))
    switch.on_change = [None, refuse, ignore]
    with pytest.raises(Indeterminate, match="restoring the previous map failed: 1->9 missing"):
        put(switch, (1, 10))


def test_a_map_that_cannot_be_read_after_a_change_is_unknown() -> None:
    switch = Switch((1, 9))
    switch.on_read = [None, LinkLost("gone"), LinkLost("gone")]
    with pytest.raises(Indeterminate, match="could not be read back: gone") as caught:
        put(switch, (1, 10))
    assert "drop 1->9, make 1->10" in str(caught.value)


def test_a_read_back_that_fails_once_is_tried_again() -> None:
    switch = Switch((1, 9))
    switch.on_read = [None, LinkLost("cut in the middle")]
    assert put(switch, (1, 10)).after == Matching.of([(1, 10)])


def test_a_line_closed_while_idle_is_no_reason_to_fail() -> None:
    switch = Switch((1, 9))
    switch.on_read = [LinkLost("idle logout")]
    assert put(switch, (1, 10)).after == Matching.of([(1, 10)])
    switch.on_read = [LinkLost("gone"), LinkLost("gone")]
    with pytest.raises(LinkLost):
        put(switch, (1, 11))
    assert switch.map == {1: 10}


def test_a_map_that_lags_behind_is_waited_for() -> None:
    class Slow(Switch):
        def read(self) -> Matching:
            found = super().read()
            return found if self.reads > 4 else Matching.of([(1, 9)])

    switch = Slow((1, 9))
    assert put(switch, (1, 10)).after == Matching.of([(1, 10)])
    assert switch.reads == 5


class Lamp:
    """Egress ports that are lit from a time on."""

    def __init__(self, clock: Clock, lit_at_ns: Mapping[int, int]) -> None:
        self._clock, self._lit_at_ns = clock, lit_at_ns
        self.asked: list[list[int]] = []

    def power_dbm(self, ports: Sequence[int]) -> Mapping[int, float]:
        self.asked.append(list(ports))
        now = self._clock()
        return {port: -3.0 if now >= self._lit_at_ns[port] else -60.0 for port in ports}


def test_light_is_stamped_when_the_last_port_is_lit_and_only_dark_ports_are_asked() -> None:
    clock = Clock()
    lamp = Lamp(clock, {9: 0, 10: 25_000_000})
    stamp = wait_for_light(lamp, [9, 10], -50.0, FAR_NS, now_ns=clock, sleep=clock.sleep)
    assert 25_000_000 <= stamp < 27_000_000
    assert lamp.asked[0] == [9, 10]
    assert lamp.asked[-1] == [10]


def test_the_old_light_that_a_power_meter_still_shows_is_not_taken_for_the_new() -> None:
    clock = Clock()
    shown = Lamp(clock, {9: 0, 10: 5_000_000})  # 9 averages over what it has just lost
    stamp = wait_for_light(
        shown,
        [9, 10],
        -50.0,
        FAR_NS,
        lit_before=[9],
        stale_until_ns=80_000_000,
        now_ns=clock,
        sleep=clock.sleep,
    )
    assert 80_000_000 <= stamp < 82_000_000
    assert shown.asked[-1] == [9]
    assert len(shown.asked) < 12, "nothing is asked while nothing can be believed"


def test_ports_that_stay_dark_are_named_with_their_power() -> None:
    clock = Clock()
    lamp = Lamp(clock, {9: 0, 10: FAR_NS})
    with pytest.raises(NoLight) as caught:
        wait_for_light(lamp, [9, 10], -50.0, 10_000_000, now_ns=clock, sleep=clock.sleep)
    assert caught.value.ports == {10: -60.0}
