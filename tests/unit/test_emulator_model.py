"""The emulated switch as a thing: who is connected, when light is where, what the meters show."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.emulators.config import EmulatedSwitch, Faults, Light, Optics, Timing
from drivers.emulators.flap import Pattern
from drivers.emulators.model import Change, PortState, SwitchModel
from drivers.errors import Misuse

MS = 1_000_000


def switch(**changes: object) -> SwitchModel:
    settings = {"name": "agg0", "ports": 4, "faces": (), **changes}
    return SwitchModel(EmulatedSwitch(**settings), Random(1))


def lit_after(model: SwitchModel, *changes: Change) -> dict[int, int]:
    """What a light that carries out every transition ends up with."""
    lit: dict[int, int] = {}
    for change in changes:
        for ingress in change.dark:
            lit.pop(ingress, None)
        lit.update({x.ingress: x.egress for x in change.light})
    return lit


def test_a_moved_circuit_is_dark_for_the_switching_time_and_the_others_are_not_touched():
    model = switch(circuits=((1, 5), (2, 6), (3, 7)), timing=Timing(switch_ms=25))
    model.boot(0)
    change = model.connect([(1, 6), (2, 5)], 100 * MS)
    assert change.dark == (1, 2)
    assert [(x.at_ns, x.ingress, x.egress) for x in change.light] == [
        (125 * MS, 1, 6),
        (125 * MS, 2, 5),
    ]
    assert model.circuits() == [(1, 6), (2, 5), (3, 7)]


def test_boots_lit_with_the_configured_map():
    model = switch(circuits=((1, 5), (2, 6)))
    change = model.boot(7)
    assert [(x.at_ns, x.ingress, x.egress) for x in change.light] == [(7, 1, 5), (7, 2, 6)]
    assert model.circuits() == [(1, 5), (2, 6)]


def test_a_restarted_unit_finds_its_mirrors_where_they_were():
    model = switch(circuits=((1, 5),), faults=Faults(swapped=((6, 7),)))
    model.boot(0, found={2: 6})
    assert model.circuits() == [(2, 7)]


def test_a_busy_port_is_moved_and_both_old_partners_are_free():
    model = switch(circuits=((1, 5), (2, 6)))
    model.boot(0)
    change = model.connect([(1, 6)], MS)
    assert model.circuits() == [(1, 6)]
    assert change.dropped == ((1, 5), (2, 6))
    assert set(change.dark) == {1, 2}
    assert model.peer(5) is None
    assert model.peer(2) is None


def test_connecting_what_is_connected_disturbs_nothing():
    model = switch(circuits=((1, 5),))
    model.boot(0)
    assert model.connect([(1, 5)], MS) == Change()


@pytest.mark.parametrize(("hitless", "dark"), [(False, (1, 2)), (True, (2,))])
def test_replacing_the_map_blinks_unless_the_unit_is_hitless(hitless, dark):
    model = switch(circuits=((1, 5), (2, 6)), only_is_hitless=hitless)
    model.boot(0)
    change = model.connect([(1, 5), (2, 7)], MS, replace=True)
    assert change.dark == dark
    assert model.circuits() == [(1, 5), (2, 7)]


def test_switching_times_spread_as_told_and_repeat_with_the_seed():
    timing = Timing(switch_ms=25, switch_sd_ms=3, distribution="normal")
    config = EmulatedSwitch(name="a", ports=512, faces=(), timing=timing)
    pairs = [(i, 512 + i) for i in range(1, 513)]

    def times(seed: int) -> list[int]:
        return [x.at_ns for x in SwitchModel(config, Random(seed)).connect(pairs, 0).light]

    first = times(1)
    assert first == times(1) != times(2)
    mean = sum(first) / len(first) / MS
    spread = (sum((t / MS - mean) ** 2 for t in first) / len(first)) ** 0.5
    assert 24.5 < mean < 25.5
    assert 2.5 < spread < 3.5


def test_the_meter_climbs_for_one_averaging_window_after_the_light_is_there():
    model = switch(optics=Optics(averaging=4, loss_sd_db=0.0), timing=Timing(switch_ms=25))
    model.connect([(1, 5)], 0)
    assert model.power_dbm(5, 25 * MS) == -60
    half = model.power_dbm(5, (25 + 40) * MS)
    assert half == pytest.approx(-1.2 - 3.01, abs=0.01)
    assert model.power_dbm(5, (25 + 80) * MS) == pytest.approx(-1.2)
    model.disconnect([1], 200 * MS)
    assert model.power_dbm(5, 240 * MS) == pytest.approx(-1.2 - 3.01, abs=0.01)
    assert model.power_dbm(5, 280 * MS) == -60


def test_a_circuit_that_never_settled_is_not_measured():
    model = switch(timing=Timing(switch_ms=25))
    model.connect([(1, 5)], 0)
    model.connect([(1, 6)], 10 * MS)
    assert model.power_dbm(5, 100 * MS) == -60
    assert model.power_dbm(6, 100 * MS) > -3


def test_insertion_loss_belongs_to_the_circuit():
    model = switch(optics=Optics(loss_sd_db=0.3))
    model.connect([(1, 5), (2, 6)], 0)
    first = model.power_dbm(5, 100 * MS), model.power_dbm(6, 100 * MS)
    assert first[0] != first[1]
    model.disconnect([1], 200 * MS)
    model.connect([(1, 5)], 300 * MS)
    assert model.power_dbm(5, 500 * MS) == pytest.approx(first[0])


def test_a_closed_shutter_darkens_the_circuit_and_keeps_the_map():
    model = switch(circuits=((1, 5), (2, 6)))
    model.boot(0)
    assert model.set_enabled([5], MS, enabled=False).dark == (1,)
    assert model.circuits() == [(1, 5), (2, 6)]
    assert model.state(5) is PortState.DISABLED
    assert model.power_dbm(5, 100 * MS) == -60
    assert model.set_enabled([5], 200 * MS, enabled=False) == Change()
    opened = model.set_enabled([5], 300 * MS, enabled=True)
    assert [(x.at_ns, x.ingress) for x in opened.light] == [(325 * MS, 1)]


def test_a_circuit_through_a_failed_port_is_on_the_map_and_dark():
    model = switch(faults=Faults(failed_ports=(5,)))
    change = model.connect([(1, 5), (2, 6)], 0)
    assert [x.ingress for x in change.light] == [2]
    assert model.circuits() == [(1, 5), (2, 6)]
    assert model.state(5) is PortState.FAILED
    assert model.power_dbm(5, 100 * MS) == -60


def test_swapped_cables_lead_light_to_the_other_port():
    model = switch(faults=Faults(swapped=((5, 6),)))
    change = model.connect([(1, 5)], 0)
    assert [(x.ingress, x.egress) for x in change.light] == [(1, 6)]
    assert model.circuits() == [(1, 5)]
    assert model.power_dbm(5, 100 * MS) > -3, "the meter is inside, before the cable"
    assert model.power_dbm(6, 100 * MS) == -60


def test_a_stuck_port_takes_every_command_and_passes_light_only_where_it_stood():
    model = switch(faults=Faults(stuck_ports=(2,)), circuits=((1, 5), (2, 6)))
    assert lit_after(model, model.boot(0)) == {1: 5, 2: 6}
    moved = model.connect([(2, 7), (1, 6)], MS)
    assert model.circuits() == [(1, 6), (2, 7)]
    assert model.state(2) is PortState.ENABLED
    assert lit_after(model, moved) == {1: 6}
    assert model.power_dbm(7, 200 * MS) == -60
    back = model.connect([(2, 6)], 200 * MS)
    assert lit_after(model, moved, back) == {2: 6}


def test_a_port_that_sticks_at_work_keeps_its_light_until_it_is_moved():
    model = switch(circuits=((1, 5),))
    booted = model.boot(0)
    stuck = model.break_down(Faults(stuck_ports=(5, 6)), MS)
    moved = model.connect([(1, 6)], 2 * MS)
    assert lit_after(model, booted, stuck) == {1: 5}
    assert lit_after(model, booted, stuck, moved) == {}
    freed = model.break_down(Faults(), 3 * MS)
    assert lit_after(model, booted, stuck, moved, freed) == {1: 6}


@pytest.mark.parametrize(
    ("faults", "lit"),
    [
        (Faults(failed_ports=(1,)), {2: 6}),
        (Faults(swapped=((5, 6),)), {1: 6, 2: 5}),
        (Faults(deny_ports=(1,)), {1: 5, 2: 6}),
    ],
)
def test_what_breaks_at_work_shows_in_the_light_at_once_and_is_mended_again(faults, lit):
    model = switch(circuits=((1, 5), (2, 6)))
    changes = [model.boot(0), model.break_down(faults, 50 * MS)]
    assert lit_after(model, *changes) == lit
    assert (model.power_dbm(5, 99 * MS) > -3) == (1 in lit)
    changes.append(model.break_down(Faults(), 100 * MS))
    assert lit_after(model, *changes) == {1: 5, 2: 6}
    assert model.circuits() == [(1, 5), (2, 6)]


def test_ports_that_are_not_there_cannot_break():
    model = switch(circuits=((1, 5),))
    model.boot(0)
    for faults in (Faults(stuck_ports=(9,)), Faults(swapped=((5, 6), (6, 7)))):
        with pytest.raises(Misuse, match="agg0"):
            model.break_down(faults, MS)
    assert model.power_dbm(5, 100 * MS) > -3


def test_a_unit_that_lost_power_is_empty_whatever_its_boot_mode():
    model = switch(circuits=((1, 5), (2, 6)))
    model.boot(0)
    model.settings.boot_mode = "RESTORE"
    starts = model.starts
    assert model.lose_power(MS).dark == (1, 2)
    assert model.circuits() == []
    assert model.starts == starts + 1


def test_a_denied_port_is_left_out_and_the_rest_is_made():
    model = switch(faults=Faults(deny_ports=(6,)), circuits=((2, 7),))
    model.boot(0)
    change = model.connect([(1, 5), (2, 6), (3, 8)], 0)
    assert change.refused == ((2, 6),)
    assert model.circuits() == [(1, 5), (2, 7), (3, 8)]
    assert 2 not in change.dark


@pytest.mark.parametrize(("mode", "kept"), [("DARK", []), ("RESTORE", [(1, 5)])])
def test_a_restart_keeps_or_loses_the_map_as_the_boot_mode_says(mode, kept):
    model = switch(circuits=((1, 5),))
    model.boot(0)
    model.settings.boot_mode = mode
    assert model.restart(MS).dark == (1,)
    assert model.circuits() == kept


@pytest.mark.parametrize(
    "wrong",
    [
        {"ports": 0},
        {"circuits": ((1, 9),)},
        {"circuits": ((1, 4),)},
        {"circuits": ((1, 5), (2, 5))},
        {"circuits": ((1, 5), (1, 6))},
        {"faults": Faults(failed_ports=(9,))},
        {"faults": Faults(swapped=((1, 5),))},
        {"optics": Optics(averaging=9)},
        {"light": Light(tx={5: "v0"})},
    ],
)
def test_a_unit_that_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(Misuse, match="agg0"):
        switch(**wrong)


def test_the_model_string_tells_the_real_size():
    assert switch(model="N-VST-16x16-LU1-DMHNV").model == "N-VST-4x4-LU1-DMHNV"


PAIR = st.tuples(st.integers(1, 4), st.integers(5, 8))
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(PAIR, max_size=4)),
        st.tuples(st.just("only"), st.lists(PAIR, max_size=4)),
        st.tuples(st.just("drop"), st.lists(st.integers(1, 4), max_size=3)),
        st.tuples(st.just("close"), st.lists(st.integers(1, 8), max_size=3)),
        st.tuples(st.just("open"), st.lists(st.integers(1, 8), max_size=3)),
        st.tuples(st.just("flap"), st.lists(st.integers(1, 8), max_size=3)),
        st.tuples(st.just("calm"), st.lists(st.integers(1, 8), max_size=3)),
        st.tuples(st.just("restart"), st.just([])),
    ),
    max_size=20,
)


@given(ACTS, st.booleans())
def test_the_map_stays_one_to_one_and_the_light_follows_it(acts, hitless):
    model = switch(faults=Faults(failed_ports=(3,), swapped=((5, 8),)), only_is_hitless=hitless)
    model.flaps.set_pattern(model.ports, Pattern(off_ms=5, on_ms=8, cycles=2))
    changes = [model.boot(0)]
    for now_ns, (verb, items) in zip(range(3 * MS, 99 * MS, 3 * MS), acts, strict=False):
        changes.append(model.advance(now_ns))
        changes.append(
            {
                "add": model.connect,
                "only": lambda x, t: model.connect(x, t, replace=True),
                "drop": model.disconnect,
                "close": lambda x, t: model.set_enabled(x, t, enabled=False),
                "open": lambda x, t: model.set_enabled(x, t, enabled=True),
                "flap": model.start_flaps,
                "calm": model.stop_flaps,
                "restart": lambda _, t: model.restart(t),
            }[verb](items, now_ns)
        )
        circuits = model.circuits()
        assert len({b for _, b in circuits}) == len({a for a, _ in circuits}) == len(circuits)
        assert all(model.peer(a) == b and model.peer(b) == a for a, b in circuits)
    changes.append(model.stop_flaps(model.ports, 99 * MS))
    passing = {
        a: {5: 8, 8: 5}.get(b, b)
        for a, b in model.circuits()
        if model.state(a) is model.state(b) is PortState.ENABLED
    }
    assert lit_after(model, *changes) == passing
    long_after = 10**12
    shining = {p for p in range(5, 9) if model.power_dbm(p, long_after) > -10}
    assert shining == {model.peer(a) for a in passing}
