"""Links over one switch and through trunks: which cross-connects carry them."""

from harness.fabric.links import Link, Trunk, Uplink

A = Uplink("tor0", "u1", "agg0", 1, 17, "198.18.128.1")
B = Uplink("tor1", "u1", "agg0", 2, 18, "198.18.128.2")
C = Uplink("tor2", "u1", "agg1", 3, 19, "198.18.128.3")
UP = Trunk("agg0", 5, 21, "core0", 1, 9)
DOWN = Trunk("agg1", 6, 22, "core0", 2, 10)


def test_a_link_on_one_switch_is_two_circuits() -> None:
    link = Link(A, B)
    assert link.circuits == (("agg0", (1, 18)), ("agg0", (2, 17)))
    assert link.switches == ("agg0",)
    assert str(link) == "tor0-tor1@agg0"


def test_light_goes_up_one_trunk_and_down_another_and_back_the_same_way() -> None:
    link = Link(A, C, (UP, DOWN))
    assert link.circuits == (
        ("agg0", (1, 21)),
        ("core0", (1, 10)),
        ("agg1", (6, 19)),
        ("agg1", (3, 22)),
        ("core0", (2, 9)),
        ("agg0", (5, 17)),
    )
    assert link.switches == ("agg0", "core0", "agg1")
    assert link.circuits_on("core0") == ((1, 10), (2, 9))


def test_a_one_way_link_carries_only_the_light_of_its_first_end() -> None:
    link = Link(A, C, (UP, DOWN), both=False)
    assert link.circuits == (("agg0", (1, 21)), ("core0", (1, 10)), ("agg1", (6, 19)))
    assert link.ways == ((A, C),)
    assert str(link) == "tor0>tor2@agg0+core0+agg1"


def test_the_ends_of_a_link_are_the_only_uplinks_it_takes() -> None:
    link = Link(A, B, both=False)
    ports = {port for _, circuit in link.circuits for port in circuit}
    assert ports == {A.ingress, B.egress}
