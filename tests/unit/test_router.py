"""Where requests go, and when an instance is given up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.model.layout import Layout
from harness.scheduling.router import (
    STICKY_MARGIN,
    STICKY_REQUESTS,
    WAITING_MAX,
    Candidate,
    Router,
    Wanted,
    nowhere,
    seat,
)
from harness.scheduling.speed import Speeds
from harness.scheduling.watchdog import RESTARTS_MAX, look, may_restart, stalled

ONE = Wanted(known_tokens=10, length_tokens=100)


def at(name: str, requests: int = 0, **more: Any) -> Candidate:
    known: dict[str, Any] = {
        "accepting": True, "waiting": 0, "sequences_max": 8, "kv_free_tokens": 1000,
        "length_max_tokens": 1000, "tokens_per_s": 100.0,
    }  # fmt: skip
    return Candidate(name=name, requests=requests, **(known | more))


def chosen(wanted: Wanted, *candidates: Candidate) -> str | None:
    found = Router(candidates).route(wanted)
    return found and found.name


def test_the_least_loaded_gets_it_weighed_by_speed() -> None:
    assert chosen(ONE, at("a", 3), at("b", 2)) == "b"
    assert chosen(ONE, at("a", 3, tokens_per_s=200.0), at("b", 2)) == "a"


def test_it_goes_back_unless_that_is_loaded_by_the_margin() -> None:
    back = Wanted(known_tokens=10, length_tokens=100, home="a")
    assert chosen(back, at("a", 2), at("b", 0)) == "a"
    assert chosen(back, at("a", 5), at("b", 2), at("c", 1)) == "c"
    assert chosen(back, at("a", 104, sequences_max=200), at("c", 90, sequences_max=200)) == "a"
    assert chosen(back, at("c"), at("d", 1)) == "c"


def test_siblings_decide_only_between_equals() -> None:
    with_siblings = Wanted(known_tokens=10, length_tokens=100, sibling="b")
    assert chosen(with_siblings, at("a", 2), at("b", 2)) == "b"
    assert chosen(with_siblings, at("a", 1), at("b", 2)) == "a"


def test_never_to_one_that_does_not_accept_or_could_not_hold_it() -> None:
    assert chosen(ONE, at("a", accepting=False), at("b", 7)) == "b"
    assert chosen(ONE, at("a", length_max_tokens=99), at("b", 7)) == "b"
    refused = Wanted(known_tokens=10, length_tokens=100, refused={"a": "no"})
    assert chosen(refused, at("a"), at("b", 7)) == "b"
    assert chosen(ONE, at("a", accepting=False)) is None


def test_only_a_few_wait_at_an_instance() -> None:
    full = {"requests": 8, "waiting": WAITING_MAX - 1}
    assert chosen(ONE, at("a", **full)) == "a"
    assert chosen(ONE, at("a", **full | {"waiting": WAITING_MAX})) is None
    assert chosen(ONE, at("a", 3, kv_free_tokens=9, waiting=WAITING_MAX)) is None
    assert chosen(ONE, at("a", 3, kv_free_tokens=10, waiting=WAITING_MAX)) == "a"


def test_a_seat_is_where_a_request_would_not_wait() -> None:
    full = {"requests": 8, "waiting": 0}
    found = seat(ONE, [at("a", **full), at("b", 7), at("c", 6, kv_free_tokens=9)])
    assert found is not None
    assert found.name == "b"
    assert seat(ONE, [at("a", **full), at("b", accepting=False)]) is None


def test_why_it_can_run_nowhere() -> None:
    long = Wanted(known_tokens=10, length_tokens=2000)
    assert nowhere(long, [at("a", 99, accepting=False, length_max_tokens=2000)]) == ""
    assert nowhere(long, []) == ""
    assert nowhere(long, [at("a"), at("b", length_max_tokens=1500)]) == (
        "2000 tokens with its response; b, which holds the longest requests, takes 1500"
    )
    refused = Wanted(known_tokens=10, length_tokens=100, refused={"a": "no adapter"})
    assert nowhere(refused, [at("a")]) == "a: no adapter"


def test_without_a_profile_the_best_seen_of_a_layout_counts() -> None:
    one, two, four = (Layout(1, tp) for tp in (1, 2, 4))
    speeds = Speeds(None)
    assert speeds.expected(one, 1, 0) == speeds.expected(two, 1, 0) == 1.0
    speeds.measured(one, 300.0)
    speeds.measured(one, 100.0)
    speeds.measured(two, 500.0)
    assert [speeds.expected(layout, 4, 0) for layout in (one, two, four)] == [300.0, 500.0, 500.0]


def test_no_work_done_for_the_stated_time_is_a_stall() -> None:
    life = look(None, busy=True, work_tokens=5, now_ns=0)
    life = look(life, busy=True, work_tokens=5, now_ns=90)
    assert not stalled(life, 99, stall_ns=100)
    assert stalled(life, 100, stall_ns=100)
    assert not stalled(look(life, busy=True, work_tokens=6, now_ns=100), 100, stall_ns=100)
    assert not stalled(look(life, busy=False, work_tokens=5, now_ns=100), 100, stall_ns=100)


def test_restarts_end() -> None:
    assert [may_restart(n) for n in (0, RESTARTS_MAX - 1, RESTARTS_MAX)] == [True, True, False]


def by_looking_at_all(wanted: Wanted, candidates: list[Candidate]) -> Candidate | None:
    """The rule in one place: what the router must come to however it looks."""
    able = [
        c
        for c in candidates
        if wanted.length_tokens <= c.length_max_tokens
        and wanted.only in ("", c.name)
        and c.name not in wanted.refused
        and c.takes(wanted.known_tokens)
    ]
    if not able:
        return None
    least = min(able, key=lambda c: (c.load, c.name != wanted.sibling))
    home = next((c for c in able if c.name == wanted.home), None)
    if home is None:
        return least
    more = home.requests - least.requests > STICKY_REQUESTS
    overloaded = more and home.load > least.load * (1 + STICKY_MARGIN)
    return least if overloaded else home


NAMES = st.sampled_from(["", "i0", "i1", "i2", "i3", "gone"])
WANTED = st.builds(
    Wanted,
    known_tokens=st.integers(1, 60),
    length_tokens=st.integers(1, 120),
    home=NAMES,
    sibling=NAMES,
    only=st.sampled_from(["", "", "", "i1", "gone"]),
    refused=st.dictionaries(st.sampled_from(["i0", "i2"]), st.just("no"), max_size=1),
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.integers(0, 5), st.integers(1, 6), st.integers(0, 100),
            st.sampled_from([50, 100]), st.sampled_from([50.0, 100.0]), st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(WANTED, min_size=1, max_size=20),
)  # fmt: skip
def test_however_many_are_routed_each_gets_what_looking_at_all_would_give(
    rows: list[tuple[int, int, int, int, int, float, bool]], many: list[Wanted]
) -> None:
    candidates = [
        Candidate(f"i{i}", accepting, requests, waiting, seats, kv, length, speed)
        for i, (requests, waiting, seats, kv, length, speed, accepting) in enumerate(rows)
    ]
    router = Router(candidates)
    for wanted in many:
        expected, found = by_looking_at_all(wanted, candidates), router.route(wanted)
        assert found is expected
        assert router.is_full == (not any(candidate.takes(1) for candidate in candidates))
        if found is not None:
            found.requests += 1
            found.waiting += 1
            found.kv_free_tokens -= wanted.known_tokens
            router.replace(found)
