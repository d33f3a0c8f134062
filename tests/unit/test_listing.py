"""Names and texts in a line that stays one."""

from harness.model.listing import few, first


def test_few_are_all_told_in_the_order_in_which_people_count() -> None:
    assert few(["n10", "n2", "m"]) == "m, n2, n10"


def test_of_many_the_first_and_how_many_more() -> None:
    assert few((f"n{i}" for i in range(2000)), 4) == "n0, n1 and 1,998 more"


def test_what_has_an_order_keeps_it() -> None:
    assert first(["b > c", "a > d"]) == "b > c; a > d"
    assert first([f"t{i}" for i in (3, 1, 2)], 2, " > ") == "t3 and 2 more"
