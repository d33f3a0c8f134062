"""The definition of done for a ToR's driver: what every steerable ToR must pass.

A test of a new driver is a *maker*, which starts a ToR (emulated or real) with a given trouble and
yields a `Specimen`, and one call: ``check_tor(maker)``. A failed requirement is an AssertionError
that says which.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from drivers.errors import DeviceFault, Misuse, Refused
from drivers.tor.base import Hop, Route, Tor


class Trouble(StrEnum):
    """What is wrong with a specimen."""

    NONE = "none"
    LOST_REPLY = "the first change is obeyed, but its answer never comes"
    CUT = "the connection ends in the middle of the first change"
    REFUSAL = "one way out is refused"


@dataclass(frozen=True)
class Specimen:
    """A ToR under test, without a steering route."""

    tor: Tor
    prefixes: tuple[str, ...]
    """Four or more, none of which contains another."""
    pinned: str
    """A host (/32) inside the first of `prefixes`."""
    hops: tuple[Hop, ...]
    """Three or more ways out, over two or more uplinks."""
    foreign: Callable[[], object]
    """Every route of the ToR that is not ours, looked at by other means than the driver."""
    ours: Callable[[], frozenset[str]]
    """The prefixes of our routes, looked at by other means than the driver."""
    refused: Hop | None = None
    """With `Trouble.REFUSAL`, a way out that the ToR refuses."""

    def put(self, *routes: Route) -> frozenset[Route]:
        """Apply routes, and check that they are there."""
        wanted = frozenset(routes)
        self.tor.apply(wanted)
        self.expect(wanted)
        return wanted

    def expect(self, wanted: frozenset[Route]) -> None:
        """Check that exactly `wanted` is in force."""
        found = self.tor.read()
        assert found == wanted, f"wanted {_listed(wanted)}; the ToR reads {_listed(found)}"
        there, prefixes = self.ours(), {route.prefix for route in wanted}
        assert there == prefixes, f"routes to {sorted(prefixes)} wanted, {sorted(there)} are there"

    def routes(self, hop: int = 0) -> list[Route]:
        """Return a route to every prefix by one hop."""
        return [Route(prefix, (self.hops[hop],)) for prefix in self.prefixes]


TorMaker = Callable[[Trouble], AbstractContextManager[Specimen]]


def check_tor(maker: TorMaker, *, without: Container[Trouble] = ()) -> None:
    """Check a driver against the contract of `drivers.tor.base.Tor`.

    `without` names what the maker cannot arrange: the kernel's own answer is never lost.
    """
    for trouble, checks in _CHECKS.items():
        if trouble in without:
            continue
        with maker(trouble) as specimen:
            foreign = specimen.foreign()
            for check in checks:
                check(specimen)
                assert specimen.foreign() == foreign, f"{check.__name__}: foreign routes changed"


def _applies_and_reads_back(specimen: Specimen) -> None:
    specimen.expect(frozenset())
    first, second = specimen.routes(), specimen.routes(1)
    specimen.put(*first[:2])
    specimen.put(*first)
    specimen.put(*second[:1], *first[2:])
    specimen.put()


def _applying_twice_is_harmless(specimen: Specimen) -> None:
    wanted = specimen.put(*specimen.routes())
    specimen.tor.apply(wanted)
    specimen.expect(wanted)


def _hops_are_replaced_added_and_taken_away(specimen: Specimen) -> None:
    one, two, three, *_ = specimen.hops
    prefix, other, *_ = specimen.prefixes
    beside = Route(other, (one,))
    for hops in ((one,), (two,), (one, two), (three, one, two), (three, two), (three,)):
        specimen.put(Route(prefix, hops), beside)


def _a_host_is_pinned_beside_its_prefix(specimen: Specimen) -> None:
    both = Route(specimen.prefixes[0], specimen.hops[:2])
    specimen.put(both, Route(specimen.pinned, specimen.hops[1:2]))
    specimen.put(both)


def _what_was_read_undoes_a_change(specimen: Specimen) -> None:
    specimen.put(Route(specimen.prefixes[0], specimen.hops), *specimen.routes()[1:3])
    before = specimen.tor.read()
    specimen.put(*specimen.routes(1)[1:])
    specimen.tor.apply(before)
    specimen.expect(before)


def _impossible_routes_are_refused_unsent(specimen: Specimen) -> None:
    before = specimen.put(*specimen.routes())
    prefix, hop = specimen.prefixes[0], specimen.hops[0]
    impossible = {
        "one prefix twice": {Route(prefix, (hop,)), Route(prefix, specimen.hops[1:2])},
        "no prefix": {Route("nowhere", (hop,))},
        "no address": {Route.one(prefix, "far away", hop.device)},
        "no interface's name": {Route.one(prefix, hop.via, "u1; reboot")},
    }
    for what, routes in impossible.items():
        try:
            specimen.tor.apply(frozenset(routes))
        except Misuse:
            specimen.expect(before)
        else:
            raise AssertionError(f"{what}: Misuse was not raised")


def _closes_twice_and_leaves_the_routes(specimen: Specimen) -> None:
    specimen.put(*specimen.routes())
    specimen.tor.close()
    specimen.tor.close()
    assert specimen.ours() == set(specimen.prefixes), "closing took routes away"
    try:
        specimen.tor.read()
    except DeviceFault:
        return
    raise AssertionError("read after close was answered")


def _a_lost_answer_is_resolved_by_reading(specimen: Specimen) -> None:
    specimen.put(*specimen.routes())
    specimen.put(*specimen.routes(1)[1:])


def _a_refusal_leaves_the_old_routes(specimen: Specimen) -> None:
    assert specimen.refused is not None, "the maker names no way out that the ToR refuses"
    first, second, *_ = specimen.prefixes
    refused = Route(second, (specimen.refused,))
    before = specimen.put(*specimen.routes()[:1], *specimen.routes()[2:])
    moved = Route(first, specimen.hops[:2])  # sorts before what is refused: it is sent, and undone
    for made in (refused, Route(second, (specimen.hops[0], specimen.refused))):
        refusal = _refusal(specimen.tor, frozenset({moved, made}))
        assert refusal.code, "a refusal without a code"
        assert specimen.tor.name in str(refusal), f"{refusal} does not name the ToR"
        specimen.expect(before)
    specimen.put(*specimen.routes(1))


def _refusal(tor: Tor, wanted: frozenset[Route]) -> Refused:
    """Return how the ToR refuses `wanted`, as it must."""
    try:
        tor.apply(wanted)
    except Refused as refusal:
        return refusal
    raise AssertionError(f"{_listed(wanted)}: Refused was not raised")


_Check = Callable[[Specimen], None]
_CHECKS: dict[Trouble, tuple[_Check, ...]] = {
    Trouble.NONE: (
        _applies_and_reads_back,
        _applying_twice_is_harmless,
        _hops_are_replaced_added_and_taken_away,
        _a_host_is_pinned_beside_its_prefix,
        _what_was_read_undoes_a_change,
        _impossible_routes_are_refused_unsent,
        _closes_twice_and_leaves_the_routes,
    ),
    Trouble.LOST_REPLY: (_a_lost_answer_is_resolved_by_reading,),
    Trouble.CUT: (_a_lost_answer_is_resolved_by_reading,),
    Trouble.REFUSAL: (_a_refusal_leaves_the_old_routes,),
}


def _listed(routes: frozenset[Route]) -> str:
    return "; ".join(map(str, sorted(routes))) or "none"
