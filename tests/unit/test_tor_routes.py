"""Routes as values: hops in order, what cannot be is named, the least change between two sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.errors import Misuse
from drivers.tor.base import Delta, Hop, Route, check

FAR = "198.18.128.7"
hops = st.builds(Hop, st.sampled_from([FAR, "198.18.128.8"]), st.sampled_from(["u1", "u2"]))
ways = st.lists(hops, min_size=1, max_size=3, unique=True).map(tuple)
sets = st.dictionaries(st.sampled_from(["10.0.0.0/24", "10.0.1.0/24", "10.0.1.9/32"]), ways).map(
    lambda by_prefix: frozenset(Route(prefix, way) for prefix, way in by_prefix.items())
)


@given(ways, st.randoms(use_true_random=False))
def test_the_order_of_hops_means_nothing(way: tuple[Hop, ...], chance: object) -> None:
    shuffled = list(way)
    chance.shuffle(shuffled)
    assert Route("10.0.0.0/24", way) == Route("10.0.0.0/24", tuple(shuffled))


def test_a_route_over_one_hop_is_simply_made() -> None:
    route = Route.one("10.0.0.0/24", FAR, "u1")
    assert route == Route("10.0.0.0/24", (Hop(FAR, "u1"),))
    assert str(route) == "10.0.0.0/24 via 198.18.128.7 dev u1"


@pytest.mark.parametrize(
    ("way", "words"), [((), "needs a hop"), ((Hop(FAR, "u1"), Hop(FAR, "u1")), "twice")]
)
def test_a_route_without_a_way_is_refused(way: tuple[Hop, ...], words: str) -> None:
    with pytest.raises(Misuse, match=f"10.0.0.0/24: .*{words}"):
        Route("10.0.0.0/24", way)


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (Route.one("198.19.3.1/24", FAR, "u2"), "host bits"),
        (Route.one("nowhere", FAR, "u2"), "nowhere"),
        (Route.one("198.19.3.1", FAR, "u2"), "write 198.19.3.1/32"),
        (Route.one("198.19.3.0/24", "198.18.128.777", "u2"), "128.777"),
        (Route.one("198.19.3.0/24", FAR, "u2; reboot"), "'u2; reboot' is no name"),
        (Route.one("198.19.3.0/24", FAR, "-batch"), "'-batch' is no name"),
        (Route.one("198.19.3.0/24", FAR, "u2\n"), "no name"),
    ],
)
def test_a_route_that_cannot_be_is_refused_by_name(route: Route, words: str) -> None:
    with pytest.raises(Misuse, match=r"ToR tor0: route to") as refused:
        check("tor0", frozenset({route}))
    assert route.prefix in str(refused.value)
    assert words in str(refused.value)


def test_two_routes_to_one_prefix_are_refused() -> None:
    routes = {Route.one("10.0.0.0/24", FAR, device) for device in ("u1", "u2")}
    with pytest.raises(Misuse, match="two steering routes for one prefix"):
        check("tor0", frozenset(routes))


@given(sets, sets)
def test_a_delta_carried_out_gives_what_was_wanted(
    before: frozenset[Route], after: frozenset[Route]
) -> None:
    delta = Delta.between(before, after)
    gone = {route for route, _ in delta.move} | set(delta.drop)
    assert gone <= before
    assert (before - gone) | {route for _, route in delta.move} | set(delta.make) == after
    assert all(old.prefix == new.prefix and old != new for old, new in delta.move)
    assert bool(delta) == (before != after)
