"""Paced instances whose ranks are threads: real time, real sockets, real bytes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from agents.generation.base import Seat
from agents.generation.group import Group, RanksApart
from agents.generation.paced import Paced, make
from agents.generation.ports import Ports, Range
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import UsageError
from harness.model.intake import Refused
from harness.model.layout import Layout, parse_layout
from harness.model.load import load_profile
from harness.model.placement import Instance
from harness.model.profile import load_ns
from harness.model.requests import Carried
from harness.wire.generation import EngineSpec, KvTarget, Output, Verb, Work

pytestmark = pytest.mark.emulated

PROFILE = load_profile(
    Path(__file__).parents[2] / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
)
TWO_HEADS = msgspec.structs.replace(
    PROFILE, shape=msgspec.structs.replace(PROFILE.shape, kv_heads=2)
)
SPEC = EngineSpec(engine="paced", profile=PROFILE, bytes_scale=1e-4)
T = TypeVar("T")


@contextmanager
def marks(stage: str) -> Iterator[None]:
    assert stage in ("groups", "weights", "kv_cache", "teardown")
    yield


class Ranks:
    """One instance: an engine for each rank, all given the same verbs at once."""

    names = itertools.count()

    def __init__(self, layout: Layout, ports: range, spec: EngineSpec) -> None:
        self.told: list[Output] = []
        self.instance = Instance(
            name=f"i{next(self.names)}",
            gpus=tuple(range(layout.gpus)),
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
        )
        self.engines = [make(spec, self.told.append) for _ in range(layout.gpus)]
        meeting = f"127.0.0.1:{ports[0]}"

        def build(engine: Paced) -> int:
            rank = self.engines.index(engine)
            seat = Seat(self.instance, rank, rank, "127.0.0.1", meeting, range(0))
            return engine.build(seat, 1, marks).weights_bytes

        self.weights_bytes = sum(self.all(build))

    def all(self, verb: Callable[[Paced], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.engines)) as ranks:
            return list(ranks.map(verb, self.engines))

    def run(self, until: Callable[[], bool]) -> None:
        """Let rank 0 run; a command comes once `until` holds, seen every few ms."""
        deadline_ns = time.monotonic_ns() + 60 * NS_PER_S

        def wait(until_ns: int) -> bool:
            while (left_ns := until_ns - time.monotonic_ns()) > 0:
                if until() or time.monotonic_ns() > deadline_ns:
                    return True
                time.sleep(min(left_ns, 2 * NS_PER_MS) / NS_PER_S)
            return until()

        self.engines[0].run(wait)

    def run_until_told(self, tokens: int) -> None:
        self.run(lambda: sum(output.count for output in self.told) >= tokens)

    def submit(self, works: Sequence[Work]) -> tuple[dict[str, str], tuple[str, ...]]:
        return self.all(lambda engine: engine.submit(works))[0]

    def withdraw(
        self,
        to: Ranks | None = None,
        *,
        verb: Verb = "export",
        transfer: str = "t",
        ids: tuple[str, ...] | None = None,
    ) -> tuple[list[Carried], dict[str, int]]:
        peers = tuple(engine.kv_peer() for engine in to.engines) if to else ()
        target = KvTarget(transfer=transfer, instance=to.instance, peers=peers) if to else None
        answers = self.all(lambda engine: engine.withdraw(ids, verb, target))
        sent: dict[str, int] = {}
        for _, by_rank in answers:
            for name, count in by_rank.items():
                sent[name] = sent.get(name, 0) + count
        return answers[0][0], sent


Start = Callable[..., Ranks]


@pytest.fixture
def ports() -> Iterator[Callable[[], range]]:
    taken: list[Range] = []

    def take() -> range:
        taken.append(Ports("127.0.0.1").take())
        return taken[-1].ports

    yield take
    for one in taken:
        one.close()


@pytest.fixture
def start(ports: Callable[[], range]) -> Iterator[Start]:
    up: list[Ranks] = []

    def begin(layout: str, spec: EngineSpec = SPEC) -> Ranks:
        up.append(Ranks(parse_layout(layout), ports(), spec))
        return up[-1]

    before = set(threading.enumerate())
    yield begin
    for ranks in up:
        ranks.all(lambda engine: engine.tear_down(marks))
    assert set(threading.enumerate()) <= before


def works(count: int, prompt: int = 40, response: int = 60) -> list[Work]:
    return [Work(carried=Carried(f"r{n}", prompt, response, 0)) for n in range(count)]


def moved(left: Sequence[Carried], transfer: str) -> list[Work]:
    return [Work(carried=request, kv_transfer=transfer) for request in left]


def refusal(engine: Paced, verb: Callable[[Paced], object]) -> str:
    try:
        verb(engine)
    except Refused as error:
        return str(error)
    return ""


def tokens_of(*places: Ranks) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in (output for place in places for output in place.told):
        span = range(output.start, output.start + output.count)
        found.setdefault(output.id, []).extend(span)
    return {name: sorted(positions) for name, positions in found.items()}


@pytest.mark.parametrize("profile", [PROFILE, TWO_HEADS])
@pytest.mark.parametrize(
    ("one", "other"), [("1xTP1", "1xTP2"), ("1xTP4", "1xTP1"), ("1xTP2PP2", "1xTP1DP2")]
)
def test_requests_go_on_elsewhere_from_sent_kv_without_losing_a_token(
    start: Start, one: str, other: str, profile: object
) -> None:
    spec = msgspec.structs.replace(SPEC, profile=profile)
    source, target = start(one, spec), start(other, spec)
    assert source.submit(works(6)) == ({}, ())
    source.run_until_told(60)
    left, sent = source.withdraw(target)
    assert len(left) == 6
    assert sent.keys() == {request.id for request in left}
    refused, with_kv = target.submit(moved(left, "t"))
    assert not refused
    assert set(with_kv) == sent.keys()
    target.run(lambda: sum(output.ended == "finished" for output in target.told) == 6)
    assert tokens_of(source, target) == {f"r{n}": list(range(60)) for n in range(6)}
    first = {output.id: output for output in reversed(target.told)}
    assert {n: o.cached_tokens for n, o in first.items()} == {r.id: r.kv_tokens for r in left}
    stats = target.engines[0].stats()
    assert stats.prefilled_tokens == 0
    assert stats.generated_tokens == 360 - sum(request.produced_tokens for request in left)


def test_kv_that_did_not_come_whole_is_computed_anew(start: Start) -> None:
    source, target = start("1xTP1"), start("1xTP2")
    source.submit(works(2))
    source.run_until_told(10)
    lost = KvTarget(
        transfer="t",
        instance=target.instance,
        peers=(target.engines[0].kv_peer(), "127.0.0.1:1"),
    )
    left, sent = source.engines[0].withdraw(None, "export", lost)
    assert sent == {}
    refused, with_kv = target.submit(moved(left, "t"))
    assert (refused, with_kv) == ({}, ())
    target.run(lambda: sum(output.ended == "finished" for output in target.told) == 2)
    assert tokens_of(source, target) == {"r0": list(range(60)), "r1": list(range(60))}


def test_kv_for_which_there_is_no_seat_is_computed_anew(start: Start) -> None:
    source = start("1xTP1")
    target = start("1xTP1", msgspec.structs.replace(SPEC, sequences_max=1))
    source.submit(works(3))
    source.run_until_told(20)
    left, sent = source.withdraw(target)
    assert len(sent) == 3
    refused, with_kv = target.submit(moved(left, "t"))
    assert not refused
    assert with_kv == ("r0",)
    stats = target.engines[0].stats()
    assert (stats.running, stats.waiting) == (1, 2)


def test_received_kv_is_handed_on_and_dropped_with_its_request(start: Start) -> None:
    places = [start("1xTP1"), start("1xTP2"), start("1xTP1")]
    places[0].submit(works(2))
    places[0].run_until_told(10)
    for hop, (source, target) in enumerate(itertools.pairwise(places)):
        left, _ = source.withdraw(target, transfer=f"t{hop}")
        assert len(target.submit(moved(left, f"t{hop}"))[1]) == 2
        target.run_until_told(8)
    assert all(engine._up.kv.held_bytes == 0 for engine in places[1].engines)
    assert places[2].engines[0]._up.kv.held_bytes > 0
    assert places[2].engines[0]._up.landing.held_bytes == 0


def test_some_are_aborted_the_others_go_on(start: Start) -> None:
    ranks = start("1xTP1")
    ranks.submit(works(3))
    ranks.run_until_told(9)
    left, _ = ranks.withdraw(verb="abort", ids=("r1", "nobody"))
    assert [request.id for request in left] == ["r1"]
    assert ranks.told[-1].ended == "aborted"
    ranks.run(lambda: sum(output.ended == "finished" for output in ranks.told) == 2)
    assert tokens_of(ranks)["r1"] == list(range(left[0].produced_tokens))


def test_new_weights_are_really_copied_and_give_the_tokens_after_them(start: Start) -> None:
    ranks = start("1xTP2")
    ranks.submit(works(1))
    ranks.run_until_told(5)
    moved_bytes = ranks.all(lambda engine: engine.update_weights(2, "", drop_kv=True))
    assert sum(moved_bytes) == ranks.weights_bytes
    ranks.run(lambda: ranks.told[-1].ended == "finished")
    assert [output.version for output in ranks.told] == sorted(o.version for o in ranks.told)
    assert (ranks.told[0].version, ranks.told[-1].version) == (1, 2)
    assert ranks.engines[0].stats().prefilled_tokens > 40
    with pytest.raises(Refused, match="older"):
        ranks.engines[0].update_weights(1, "", drop_kv=False)
    with pytest.raises(UsageError, match="/weights: No such file"):
        ranks.engines[0].update_weights(3, "/weights", drop_kv=False)


def test_weights_come_no_sooner_than_a_gpu_takes_them_in(start: Start) -> None:
    lasts_ns = load_ns(PROFILE, Layout(tp=2), SPEC.speed)
    began_ns = time.monotonic_ns()

    def took_ns() -> int:
        nonlocal began_ns
        before_ns, began_ns = began_ns, time.monotonic_ns()
        return began_ns - before_ns

    ranks = start("1xTP2")
    assert took_ns() >= lasts_ns
    ranks.all(lambda engine: engine.update_weights(2, "", drop_kv=True))
    assert took_ns() >= lasts_ns
    ranks.all(lambda engine: engine.sleep())
    ranks.all(lambda engine: engine.wake(3, marks))
    assert took_ns() >= lasts_ns


def test_an_engine_sleeps_only_when_empty_and_wakes_as_it_was(start: Start) -> None:
    ranks = start("1xTP1")
    ranks.submit(works(1))
    with pytest.raises(Refused, match="holds requests"):
        ranks.engines[0].sleep()
    ranks.withdraw(verb="abort")
    assert ranks.engines[0].sleep() == 0
    ranks.engines[0].wake(7, marks)
    ranks.submit(works(1, response=3))
    ranks.run(lambda: bool(ranks.told) and ranks.told[-1].ended == "finished")
    assert ranks.told[-1].version == 7


def test_steps_are_timed_in_real_time(start: Start) -> None:
    ranks = start("1xTP2")

    def timed(*load: int) -> list[tuple[int, ...]]:
        return ranks.all(lambda engine: engine.measure(*load))

    for load in ((8, 100, 0, 5), (0, 0, 512, 3)):
        began_ns = time.monotonic_ns()
        times_ns, others = timed(*load)
        assert others == ()
        assert len(times_ns) == load[-1]
        assert 0 < sum(times_ns) <= time.monotonic_ns() - began_ns
    assert ranks.engines[0].stats().steps == 0


@pytest.mark.parametrize(
    ("verb", "reason"),
    [
        (lambda engine: engine.measure(0, 0, 4096, 1), "one step"),
        (lambda engine: engine.measure(0, 0, 1000, 1), "all of the KV cache holds 512"),
        (lambda engine: engine.measure(9, 100, 0, 1), "KV blocks"),
    ],
)
def test_what_cannot_be_timed_every_rank_refuses(
    start: Start, verb: Callable[[Paced], object], reason: str
) -> None:
    ranks = start("1xTP2", msgspec.structs.replace(SPEC, kv_max_tokens=512))
    told = ranks.all(lambda engine: refusal(engine, verb))
    assert [reason in one for one in told] == [True, True], told


def test_an_instance_in_use_is_neither_timed_nor_put_to_sleep_by_any_rank(start: Start) -> None:
    ranks = start("1xTP2")
    ranks.submit(works(1))
    told = ranks.all(lambda engine: refusal(engine, lambda one: one.measure(1, 100, 0, 1)))
    told += ranks.all(lambda engine: refusal(engine, Paced.sleep))
    assert ["holds requests" in one for one in told] == [True] * 4


def test_what_cannot_run_is_refused_with_the_reason(start: Start) -> None:
    ranks = start("1xTP1", msgspec.structs.replace(SPEC, length_max_tokens=100, kv_max_tokens=64))
    refused, _ = ranks.submit(works(1, prompt=60))
    assert "the model takes 100" in refused["r0"]
    refused, _ = ranks.submit(works(1, prompt=30, response=50))
    assert "all of the KV cache holds 64" in refused["r0"]
    with pytest.raises(UsageError, match="TP 16 does not divide"):
        start("1xTP16")
    with pytest.raises(UsageError, match="profile"):
        make(EngineSpec(engine="paced"), lambda _output: None)


def test_facts_say_that_nothing_is_computed() -> None:
    facts, _ = make(SPEC, lambda _output: None).facts()
    assert facts["engine"] == "paced"
    assert "no token is computed" in facts["device"]


def test_ranks_that_do_not_come_or_leave_are_named(ports: Callable[[], range]) -> None:
    meetings = [f"127.0.0.1:{port}" for port in ports()[:3]]
    with pytest.raises(RanksApart, match=r"ranks \[1\] did not come"):
        Group(meetings[0], 0, 2, NS_PER_S // 10)
    with pytest.raises(RanksApart, match="rank 0 does not listen"):
        Group(meetings[1], 1, 2, NS_PER_S // 10)
    with ThreadPoolExecutor(2) as both:
        meet = [both.submit(Group, meetings[2], rank, 2) for rank in (0, 1)]
        leader, other = (found.result() for found in meet)
    other.close()
    with pytest.raises(RanksApart, match="rank 1 of the instance: is gone"):
        leader.gather(None)
    leader.close()
