"""A run as a person sees it pass by."""

from __future__ import annotations

import io

import pytest

from harness.cli.progress import Progress
from harness.model.documents import SCHEMA, Descriptor, Document, Event, Field, Start, Stop

T0_NS = 5_000_000_000


def told(*documents: Document) -> list[str]:
    stream = io.StringIO()
    progress = Progress(stream)
    start = Start(
        schema=SCHEMA,
        run="r1",
        t_ns=T0_NS,
        wall="",
        world="emulated",
        scenario="s",
        bench="b",
        seed=0,
        versions={},
        notes=("switches are emulated",),
    )
    for document in (start, *documents):
        progress(document)
    return stream.getvalue().splitlines()[2:]


def event(stream: str, data: dict[str, object], at_ms: int = 1500) -> Event:
    return Event(stream=stream, seq=0, t_ns=T0_NS + at_ms * 1_000_000, data=data)


def test_what_a_reader_must_know_comes_first() -> None:
    stream = io.StringIO()
    Progress(stream)(
        Start(
            schema=SCHEMA,
            run="r1",
            t_ns=T0_NS,
            wall="",
            world="emulated",
            scenario="s",
            bench="quick",
            seed=0,
            versions={},
            notes=("control plane only: no packet moves",),
        )
    )
    assert stream.getvalue().splitlines() == [
        "   0.000 s  run r1 on bench quick",
        "   0.000 s  control plane only: no packet moves",
    ]


def test_a_simulation_has_no_name_of_its_own() -> None:
    start = Start(
        schema=SCHEMA,
        run="",
        t_ns=0,
        wall="",
        world="simulated",
        scenario="s",
        bench="sim-64",
        seed=0,
        versions={},
    )
    stream = io.StringIO()
    Progress(stream)(start)
    assert stream.getvalue() == "   0.000 s  simulation on bench sim-64\n"


def test_a_run_goes_on_when_who_watched_has_gone() -> None:
    class Gone(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError(text)

    stream = Gone()
    progress = Progress(stream)
    for _ in range(3):
        progress(event("note", {"level": "info", "who": "n0", "text": "hello"}))
    assert stream.writes == 1


def test_a_collective_is_told_with_its_bus_bandwidth() -> None:
    row = {
        "op": "all_reduce",
        "path": "ring",
        "size_bytes": 1_048_576,
        "ranks": 4,
        "group": "all",
        "dtype": "float32",
        "times_ns": [[8_000_000, 8_000_000]] * 4,
        "wrong": 0,
        "backend": "gloo",
    }
    (line,) = told(event("collective", row))
    # 1 MiB in 8 ms is 0.1311 GB/s; all-reduce over four ranks counts 2 * 3/4 of it
    assert "1,048,576 B" in line
    assert "8.000 ms" in line
    assert "0.1966 GB/s" in line
    assert line.endswith("ring  0 wrong")


def reconfiguration(**changes: object) -> dict[str, object]:
    return {
        "step": 1,
        "index": 2,
        "path_from": "ring",
        "path_to": "pairs",
        "mode": "drain",
        "groups": "keep",
        "dark_ms": 25.31,
        "cost_ms": 61.2,
        "device_ms": 27.0,
        "link_ms": 1.5,
        "communicator_ms": 31.0,
        "overhead_ms": 1.7,
        "moved": 2,
        "kept": 6,
        "refused_reason": "",
        "error": "",
    } | changes


def test_a_reconfiguration_is_one_line() -> None:
    (line,) = told(event("reconfigure", reconfiguration()))
    assert line == (
        "   1.500 s  reconfigure #3 ring -> pairs: dark 25.3, cost 61.2, device 27.0, link 1.5, "
        "communicator 31.0, overhead 1.7 ms; 2 moved, 6 kept"
    )


def test_what_was_not_measured_is_not_shown_as_a_number() -> None:
    (line,) = told(event("reconfigure", reconfiguration(dark_ms=None, mode="ride_through")))
    assert "dark" not in line
    assert "(ride through)" in line


def test_a_reconfiguration_that_does_not_pay_says_why() -> None:
    reason = "switching takes 25 ms, the window is 10 ms"
    (line,) = told(event("reconfigure", reconfiguration(refused_reason=reason)))
    assert line.endswith(f"not made, {reason}")


def test_a_stream_that_nobody_knows_is_told_with_its_units() -> None:
    descriptor = Descriptor(stream="weather", fields={"wind": Field(unit="m/s"), "sky": Field()})
    (line,) = told(descriptor, event("weather", {"wind": 3.14159, "sky": "[red]", "raw": [1]}))
    assert line.endswith("wind 3.142 m/s, sky [red]")


def test_the_end_says_how_and_why() -> None:
    stop = Stop(
        t_ns=T0_NS + 2_000_000_000,
        wall="",
        status="failed",
        exit_code=1,
        reason="reconfigure.dark_ms p50 28.1 is above 27",
        counts={},
    )
    assert told(stop) == ["   2.000 s  failed: reconfigure.dark_ms p50 28.1 is above 27"]


@pytest.mark.parametrize(
    ("stream", "data", "says"),
    [
        ("agent", {"agent": "n0", "host": "box", "pid": 7, "facts": {}}, "n0 is up: box, pid 7"),
        ("agent", {"agent": "n0", "host": "a model", "pid": 0, "facts": {}}, "n0 is up: a model"),
        ("tor", {"tor": "t0", "driver": "netlink", "url": ""}, "t0 is up: steered by netlink"),
        (
            "switch",
            {
                "switch": "agg0",
                "vendor": "Polatis",
                "model": "VST",
                "serial": "1",
                "firmware": "6",
                "url": "serial:///dev/pts/3",
            },
            "agg0 is up: Polatis VST 1, firmware 6, serial:///dev/pts/3",
        ),
        (
            "restore",
            {"switch": "agg0", "outcome": "failed", "difference": "1->17 missing"},
            "agg0: failed, 1->17 missing",
        ),
        ("note", {"level": "error", "who": "n1", "text": "rank 1 died"}, "n1: error: rank 1 died"),
    ],
)
def test_what_happens_to_the_bench_is_told(stream: str, data: dict[str, object], says: str) -> None:
    (line,) = told(event(stream, data))
    assert line.endswith(says)


def test_a_large_bench_is_told_in_a_few_lines() -> None:
    up = [{"agent": f"n{i}", "host": "a model", "pid": 0, "facts": {}} for i in range(300)]
    clocks = [{"agent": f"n{i}", "bound_ns": 0} for i in range(300)]
    lines = told(
        *(event("agent", data) for data in up),
        *(event("clock", data) for data in clocks),
        event("note", {"level": "info", "who": "n0", "text": "hello"}),
    )
    assert len(lines) == 16 + 2
    assert lines[-2].endswith("agent       and 284 more are up")


def test_a_switch_that_was_not_restored_is_told_among_hundreds_that_were() -> None:
    left = [{"switch": f"agg{i}", "outcome": "unchanged", "difference": ""} for i in range(300)]
    left[200] = {"switch": "agg200", "outcome": "failed", "difference": "1->17 missing"}
    stop = Stop(t_ns=T0_NS, wall="", status="infrastructure", exit_code=5, reason="", counts={})
    lines = told(*(event("restore", data) for data in left), stop)
    assert len(lines) == 16 + 3
    assert lines[16].endswith("agg200: failed, 1->17 missing")
    assert lines[17].endswith("and 283 more are as they were found")
