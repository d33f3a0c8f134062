"""Which network devices have no link, as the kernel tells."""

from agents.probe import without_link


def test_the_loopback_has_a_link_and_what_is_not_there_has_none() -> None:
    assert without_link(["lo", "nothing0"]) == ("nothing0",)
