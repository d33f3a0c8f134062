"""Traces replayed: times that can be reckoned by hand, and an end that always says what it is."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trace_bench import (
    H800,
    MS,
    SCENARIOS,
    bench,
    compute,
    figures,
    ground,
    recv,
    reduce,
    run,
    send,
    trace,
)

from harness.errors import UsageError
from harness.model.load import load_bench
from harness.rlsim.collectives import nccl, time_ns
from harness.rlsim.traces.findings import replayed
from harness.rlsim.traces.ground import ground_of
from harness.rlsim.traces.meetings import lay
from harness.rlsim.traces.outcome import Outcome, lines
from harness.rlsim.traces.reading import read
from harness.rlsim.traces.standing import deadlock
from harness.rlsim.traces.timeline import chunks
from harness.rlsim.traces.wires import NOWHERE, Wires

KB = 1000


def ended_ms(outcome: Outcome) -> float:
    assert outcome.end == "finished"
    assert not outcome.blocked
    assert not outcome.not_run
    return outcome.makespan_ms


# -- one rank --------------------------------------------------------------------------------------


def test_a_gpu_works_on_one_node_at_a_time_first_the_one_that_is_listed_first() -> None:
    nodes = [compute(1, 3 * MS), compute(2, 2 * MS), compute(3, 4 * MS, on="cpu")]
    replay, outcome = run(trace({"0": nodes}))
    assert ended_ms(outcome) == 5
    assert replay.spans is not None
    spans = {span.place: (span.begin_ns, span.end_ns) for span in replay.spans}
    assert spans == {0: (0, 3 * MS), 1: (3 * MS, 5 * MS), 2: (0, 4 * MS)}


def test_memory_is_moved_beside_the_kernels() -> None:
    load = {"kind": "memory", "id": 2, "to": "load", "bytes": 6000.0 * KB}
    (_, outcome) = run(trace({"0": [compute(1, 3 * MS), load]}, gpu_memory_gb_per_s=1.0))
    assert ended_ms(outcome) == 6
    assert outcome.ranks[0].compute_ms == 6


def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    nodes = [
        {"kind": "compute", "id": 1, "flops": 2e9, "bytes": 1e6},
        {"kind": "compute", "id": 2, "flops": 1e9, "bytes": 5e6},
    ]
    _, outcome = run(trace({"0": nodes}, gpu_tflop_per_s=1.0, gpu_memory_gb_per_s=1.0))
    assert ended_ms(outcome) == 2 + 5


def test_labels_and_kernels_of_no_time_take_none_and_are_counted() -> None:
    chain = [{"kind": "mark", "id": i, "data_deps": [i - 1] if i else []} for i in range(3000)]
    _, outcome = run(trace({"0": [*chain, compute(9000, 0), compute(9001, MS, (2999,))]}))
    assert ended_ms(outcome) == 1
    assert "3000 nodes are labels and take no time" in outcome.notes
    assert "1 of 2 compute nodes state a duration of 0" in outcome.notes


# -- between ranks ---------------------------------------------------------------------------------


def test_a_send_takes_what_its_bytes_take_and_both_ends_wait_for_it() -> None:
    programs = {
        "0": [compute(1, MS), send(2, 2, 2000 * KB, (1,))],
        "1": [compute(8, 0)],
        "2": [recv(9, 0, 2000 * KB), compute(10, MS, (9,))],
    }
    _, outcome = run(trace(programs))
    assert ended_ms(outcome) == 1 + 2 + 1
    sender, bystander, receiver = outcome.ranks
    assert (sender.end_ms, sender.compute_ms, sender.exposed_ms, sender.idle_ms) == (3, 1, 2, 1)
    assert (receiver.waiting_ms, receiver.exposed_ms, receiver.compute_ms) == (1, 2, 1)
    assert (bystander.end_ms, bystander.idle_ms) == (0, 4)
    (row,) = outcome.communications
    assert (row.op, row.group, row.count, row.mean_us) == ("send_recv", "", 1, 2000)
    assert row.busbw_gb_per_s == 1


def test_flows_share_a_nic_fairly_and_leave_it_to_each_other() -> None:
    # ranks 0 and 1 share the NIC of n0; 2 MB and 1 MB at a byte per ns together
    programs = {
        "0": [send(1, 4, 2000 * KB)],
        "1": [send(1, 5, 1000 * KB)],
        "2-3": [compute(1, 0)],
        "4": [recv(1, 0, 2000 * KB)],
        "5": [recv(1, 1, 1000 * KB)],
    }
    _, outcome = run(trace(programs))
    assert [outcome.ranks[rank].end_ms for rank in (1, 0)] == [2, 3]


def test_what_is_under_way_is_slowed_by_what_comes_later() -> None:
    programs = {
        "0": [send(1, 4, 2000 * KB)],
        "1": [compute(1, MS), send(2, 5, 500 * KB, (1,))],
        "2-3": [compute(1, 0)],
        "4": [recv(1, 0, 2000 * KB)],
        "5": [recv(1, 1, 500 * KB)],
    }
    _, outcome = run(trace(programs))
    assert [outcome.ranks[rank].end_ms for rank in (1, 0)] == [2, 2.5]


def test_an_oversubscribed_path_is_shared_by_all_that_leave_their_tor() -> None:
    programs = {
        "0": [send(1, 4, 1000 * KB)], "2": [send(1, 6, 1000 * KB)], "1,3,5,7": [compute(1, 0)],
        "4": [recv(1, 0, 1000 * KB)], "6": [recv(1, 2, 1000 * KB)],
    }  # fmt: skip
    assert ended_ms(run(trace(programs))[1]) == 1
    narrow = ground(bench(oversubscription=4.0))
    assert ended_ms(run(trace(programs), narrow)[1]) == 4


def test_communication_hides_behind_what_computes() -> None:
    nodes = [compute(1, MS), reduce(2, 1000 * KB, (1,), group="dp"), compute(3, 5 * MS, (1,))]
    of = trace({"0,2": nodes, "1,3": [compute(1, 0)]}, {"dp": {"ranks": [[0, 2]]}})
    _, outcome = run(of)
    assert ended_ms(outcome) == 6
    assert outcome.ranks[0].exposed_ms == outcome.ranks[0].waiting_ms == 0


def test_a_straggler_is_waited_for_by_all_others() -> None:
    of = trace({"0-3": [compute(1, 2 * MS), reduce(2, 0, (1,))]})
    _, outcome = run(of, ground(speeds={"n1": 0.5}))
    assert [rank.waiting_ms for rank in outcome.ranks] == [2, 2, 0, 0]
    assert ended_ms(outcome) == 4
    assert "speeds: n1 0.5 times that of the trace" in outcome.basis


def test_collectives_of_one_group_go_one_after_the_other_those_of_others_at_once() -> None:
    groups = {"a": {"ranks": [[0, 2]]}, "b": {"ranks": [[0, 2]]}}
    both = [reduce(1, 1000 * KB, group="a"), reduce(2, 1000 * KB, group="a")]
    rest = {"1,3": [compute(1, 0)]}
    of_one, of_two = (
        run(trace({"0,2": [both[0], {**both[1], "group": group}], **rest}, groups))[0]
        for group in ("a", "b")
    )
    assert sorted(of_one.times_ns.values()) == [(0, MS), (MS, 2 * MS)]
    assert sorted(of_two.times_ns.values()) == [(0, 2 * MS)] * 2, "at once they share the NICs"


def test_a_collective_of_no_bytes_takes_its_latency_only() -> None:
    of = trace({"0-3": [reduce(1, 0)]})
    _, outcome = run(of, ground(by=figures(step_us=10.0)))
    assert ended_ms(outcome) == 6 * 10 / 1000  # gloo: 2 (n - 1) steps
    assert outcome.communications[0].busbw_gb_per_s == 0


def test_a_collective_among_one_rank_takes_no_time() -> None:
    _, outcome = run(trace({"0": [reduce(1, 4 * KB), reduce(2, 4 * KB, (1,))]}))
    assert ended_ms(outcome) == 0
    assert outcome.communications[0].algorithm == "none"


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_alone_on_the_network_a_collective_takes_what_its_model_says(op: Any) -> None:
    sim = load_bench(SCENARIOS / "benches" / "sim-64.toml")
    size = 2**26
    of = trace({"0-15": [{"kind": "collective", "id": 1, "op": op, "bytes": size}]}, gpu="h800")
    on = ground(sim, figures("nccl"))
    _, outcome = run(of, on)
    seats = [(rank.node, rank.gpu) for rank in outcome.ranks]
    alone = time_ns(op, size, seats, nccl("h800", nics=8, nic_gb_per_s=50.0))
    assert outcome.makespan_ms * MS == pytest.approx(alone, rel=1e-6)


# -- ends ------------------------------------------------------------------------------------------


def test_where_no_way_leads_the_end_says_who_is_blocked_and_by_what() -> None:
    cut = ground(bench(electrical="none"))
    of = trace(
        {"0": [compute(1, MS), send(2, 4, deps=(1,)), compute(3, MS, (2,))],
         "1-3": [compute(1, 3 * MS)],
         "4": [recv(7, 0, name="rows"), compute(8, MS, (7,))]}
    )  # fmt: skip
    _, outcome = run(of, cut)
    assert outcome.end == "blocked"
    (blocked,) = outcome.blocked
    assert blocked.nodes == ("node 2", "node 7 'rows'")
    assert blocked.because == "no way leads from rank 0 (GPU 0 of n0) to rank 4 (GPU 0 of n2)"
    assert outcome.not_run == {0: 2, 4: 2}
    assert outcome.makespan_ms == 3
    text = "\n".join(lines(outcome))
    assert "BLOCKED after 3.000 ms: 4 of 8 nodes did not end, on 2 of 5 ranks" in text
    assert "no way leads" in text


def test_even_unchecked_a_replay_ends_and_names_who_did_not_come() -> None:
    of = trace({"0": [reduce(1), reduce(2)], "1": [reduce(1), compute(2), compute(3, 5, (3,))]})
    laid = lay(of)
    _, outcome = replayed(laid, ground())
    assert outcome.end == "blocked"
    assert outcome.not_run == {0: 1, 1: 1}


def test_ranks_beyond_the_gpus_of_the_bench_are_named() -> None:
    of = trace({"0-9": [compute(1)]})
    with pytest.raises(UsageError, match=r"10 ranks, but the bench has 8 GPUs.*from 8 on"):
        run(of)
    with pytest.raises(UsageError, match=r"0 GPUs on its 0 nodes of pod 'generate'"):
        run(of, ground(pod="generate"))


def test_nccl_needs_to_know_its_gpus() -> None:
    of = trace({"0-1": [reduce(1)]}, gpu="")
    with pytest.raises(UsageError, match="--gpu h100"):
        run(of, ground(by=figures("nccl")))
    assert "collectives: nccl on h800" in str(run(of, ground(by=H800))[1].basis)
    with pytest.raises(UsageError, match="nobody measured collectives on 't4'"):
        run(trace({"0-1": [reduce(1)]}, gpu="t4"), ground(by=H800))


# -- circuits --------------------------------------------------------------------------------------


def test_circuits_carry_what_goes_between_the_tors_that_they_join() -> None:
    at = SCENARIOS / "benches" / "emulated-4.toml"
    h800 = SCENARIOS / "calibrations" / "h800.toml"
    ring = ground_of(at, h800, circuits="ring")
    assert len(ring.lit) == len(ring.topology.tors)
    dark, lit = (
        Wires(ring.topology, figures().network, links) for links in (frozenset(), ring.lit)
    )
    first, second, third = ([*ring.topology.nodes.values()][k].nics[0] for k in range(3))
    assert dark.path(first, second) != lit.path(first, second)
    assert dark.path(first, third) == lit.path(first, third), "no circuit leads there: electrical"
    rates = lit.capacities_bytes_per_s()
    assert min(rates[list(lit.path(first, second))]) > min(rates[list(dark.path(first, second))])


def test_where_hosts_forward_circuits_lead_on() -> None:
    at = SCENARIOS / "benches" / "emulated-4.toml"
    h800 = SCENARIOS / "calibrations" / "h800.toml"
    ring = ground_of(at, h800, circuits="ring")
    nodes = [*ring.topology.nodes.values()]
    for forwarding, links in ((True, 6), (False, 3)):
        rates = ring.topology.rates
        changed = type(rates)(rates.link_mbit_per_s, 4.0, "none", forwarding)
        topology = type(ring.topology)(
            ring.topology.tors, ring.topology.nodes, ring.topology.uplinks, ring.topology.ours,
            rates=changed,
        )  # fmt: skip
        path = Wires(topology, figures().network, ring.lit).path(nodes[0].nics[0], nodes[2].nics[0])
        assert len(path) == links
        assert (NOWHERE in path) == (not forwarding)


# -- all of it -------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> dict[str, list[dict[str, Any]]]:
    """Draw what four ranks do in one order of their own: kernels, and groups that all enter."""
    words = draw(st.lists(st.sampled_from("kkkabc"), min_size=1, max_size=12))
    programs = {}
    for rank in range(4):
        nodes: list[dict[str, Any]] = []
        for i, word in enumerate(words):
            deps = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
            if word == "k":
                nodes.append(compute(i, draw(st.integers(0, 3 * MS)), deps))
            else:
                nodes.append(reduce(i, 100 * KB * (i % 4), deps, group=word))
        programs[str(rank)] = nodes
    return programs


GROUPS = {"a": {"size": 2}, "b": {"size": 2, "stride": 2}, "c": {"size": 4}}


@given(steps())
@settings(max_examples=40, deadline=None)
def test_whatever_is_sound_ends_and_every_ns_of_every_rank_is_accounted_for(
    programs: dict[str, list[dict[str, Any]]],
) -> None:
    of = trace(programs, GROUPS)
    assume(not list(deadlock(lay(of))))  # orders of two ranks may contradict each other
    replay, outcome = run(of)
    makespan_ms = ended_ms(outcome)
    assert replay.spans is not None
    assert len(replay.spans) == of.nodes, "every node ran, once"
    ends = {(span.rank, of.programs[span.rank].nodes[span.place].id): span for span in replay.spans}
    for rank, nodes in programs.items():
        for node in nodes:
            span = ends[int(rank), node["id"]]
            before = [ends[int(rank), id_].end_ns for id_ in node["data_deps"]]
            assert span.begin_ns >= max(before, default=0)
            if node["kind"] == "compute":
                assert span.end_ns - span.begin_ns == node["duration_ns"]
    for times in outcome.ranks:
        parts = times.compute_ms, times.exposed_ms, times.waiting_ms, times.idle_ms
        assert sum(parts) == pytest.approx(makespan_ms)
        assert min(parts) >= 0
        assert times.end_ms <= makespan_ms
        own = sum(n["duration_ns"] for n in programs[str(times.rank)] if n["kind"] == "compute")
        assert times.compute_ms == pytest.approx(own / MS)


@pytest.mark.parametrize("name", ["overlap", "pipeline", "experts"])
def test_the_same_trace_gives_the_same_bytes(name: str) -> None:
    on = ground_of(SCENARIOS / "benches" / "sim-64.toml")
    first, second = (run(read(SCENARIOS / "traces" / f"{name}.json"), on) for _ in range(2))
    assert msgspec.json.encode(first[1]) == msgspec.json.encode(second[1])
    assert "".join(chunks(first[0])) == "".join(chunks(second[0]))


def test_a_timeline_has_every_node_once_and_no_two_at_once_on_a_track() -> None:
    on = ground_of(SCENARIOS / "benches" / "sim-64.toml")
    of = read(SCENARIOS / "traces" / "pipeline.json")
    replay, _ = run(of, on)
    events = json.loads("".join(chunks(replay)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == of.nodes
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"rank {rank} (n0, GPU {rank})" for rank in range(4)
    }
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        at = (event["ts"], event["ts"] + event["dur"])
        tracks.setdefault((event["pid"], event["tid"]), []).append(at)
    for track in tracks.values():
        track.sort()
        for (_, end), (begin, _) in pairwise(track):
            assert begin >= end - 1e-6
