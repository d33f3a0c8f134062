"""What is blamed for links that stay dark: never what carries another link, if anything else is."""

from itertools import combinations

from harness.fabric.blame import blamed, parts_of, switch_ports
from harness.fabric.links import Link, Trunk, Uplink

UPLINKS = [Uplink(f"tor{i}", "u1", "agg0", i + 1, i + 17, f"198.18.128.{i}") for i in range(4)]
FAR = [Uplink(f"tor{i}", "u1", "agg1", i + 1, i + 17, f"198.18.128.{i}") for i in range(4, 6)]
UP = Trunk("agg0", 9, 25, "core0", 1, 9)
DOWN = Trunk("agg1", 9, 25, "core0", 2, 10)
ACROSS = Link(UPLINKS[0], FAR[0], (UP, DOWN))


def test_without_any_other_sign_all_parts_of_a_link_are_blamed_with_its_reason() -> None:
    found = blamed({ACROSS: "hears nobody"}, (), {})
    assert found == dict.fromkeys(["tor0:u1", "agg0:9", "agg1:9", "tor4:u1"], "hears nobody")


def test_a_part_that_carries_another_link_is_not_blamed() -> None:
    dark, lit = Link(UPLINKS[0], UPLINKS[1]), Link(UPLINKS[0], UPLINKS[2], both=False)
    assert blamed({dark: "dark"}, [lit], {}) == {"tor1:u1": "dark"}


def test_a_dark_port_narrows_it_down_to_the_two_fibres_that_it_joins() -> None:
    # the core's egress 10 leads down to agg1; its light came up from agg0
    assert blamed({ACROSS: "no light"}, (), {"core0": [10]}).keys() == {"agg0:9", "agg1:9"}
    assert blamed({ACROSS: "no light"}, (), {"agg1": [FAR[0].egress]}).keys() == {
        "agg1:9",
        "tor4:u1",
    }


def test_somebody_is_blamed_even_if_all_carry_others() -> None:
    dark = Link(UPLINKS[0], UPLINKS[1])
    lit = [Link(a, b, both=False) for a, b in combinations(UPLINKS, 2)]
    assert blamed({dark: "dark"}, lit, {}).keys() == {"tor0:u1", "tor1:u1"}


def test_ports_of_a_link_are_those_of_its_parts() -> None:
    ports = {port for part in parts_of(ACROSS) for port in switch_ports(part)}
    crossed = {(s, port) for s, circuit in ACROSS.circuits for port in circuit}
    assert crossed == ports
