"""Steering: how long one apply takes, read-back included, by each ToR driver; needs root.

Over SSH it is compared, in turns, with a bare ``ip -batch`` that is started here for the same
routes. An FRR is measured where one is installed. Each apply moves all routes to another uplink.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from drivers.catalog import open_tor
from drivers.tor.base import Delta, Hop, Route, Tor
from drivers.tor.linux import SHOW, batch
from harness.record.samples import percentile
from tests.emulated.tor_bench import FRR, HOPS, frr, namespace, served

ROUTES = (1, 8)
COUNT_LOCAL, COUNT_SSH, COUNT_FRR = 2_000, 300, 40
Routes = frozenset[Route]


def run() -> dict[str, object]:
    """Return all figures, in ms."""
    figures: dict[str, object] = {"load": os.getloadavg()[0]}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        netns = stack.enter_context(namespace())
        local = open_tor("netlink", f"netns://{netns}", name="tor0", exchange_timeout_ns=1)
        stack.callback(local.close)
        for n in ROUTES:
            figures[f"netlink_{n}"] = _applies(local, _sets(n), COUNT_LOCAL)
        figures["netlink_8_by_2_hops"] = _applies(local, _sets(8, both=True), COUNT_LOCAL)
        local.apply(frozenset())
        remote = stack.enter_context(served(folder, netns)).open()
        stack.callback(remote.close)
        for n in ROUTES:
            figures |= _beside_bare(remote, netns, n)
    if FRR.exists():
        figures |= _frr()
    return figures


def table(figures: dict[str, object]) -> str:
    """Return the figures as lines of text."""
    lines = []
    for name, row in figures.items():
        parts = row.items() if isinstance(row, dict) else [("", row)]
        lines.append(f"{name:24} " + "  ".join(f"{key} {value:.3f}" for key, value in parts))
    return "\n".join(lines)


def _sets(count: int, *, both: bool = False) -> tuple[Routes, Routes]:
    """Return two sets of routes to `count` prefixes, over one uplink and over another."""
    one, two = (HOPS[:2], HOPS[1:]) if both else (HOPS[:1], HOPS[1:2])
    return _routes(count, one), _routes(count, two)


def _routes(count: int, hops: Sequence[Hop]) -> Routes:
    return frozenset(Route(f"198.19.{i}.0/24", tuple(hops)) for i in range(1, count + 1))


def _applies(tor: Tor, sets: tuple[Routes, Routes], count: int) -> dict[str, float]:
    tor.apply(sets[1])
    return _spread([_timed_ms(lambda i=i: tor.apply(sets[i % 2])) for i in range(count)])


def _beside_bare(tor: Tor, netns: str, count: int) -> dict[str, object]:
    """Time an apply, and a bare ``ip -batch`` of the same lines, in turns."""
    one, two = _sets(count)
    tor.apply(one)
    tor.apply(two)
    lines = "\n".join([*batch(Delta.between(one, two)), " ".join(SHOW), ""])
    argv = ["ip", "-n", netns, "-json", "-batch", "-"]

    def bare() -> None:
        subprocess.run(argv, input=lines, text=True, capture_output=True, check=True)

    ours, theirs = [], []
    for _ in range(COUNT_SSH):
        ours.append(_timed_ms(lambda: tor.apply(one)))
        tor.apply(two)
        theirs.append(_timed_ms(bare))
    return {f"linux_ssh_{count}": _spread(ours), f"bare_ip_batch_{count}": _spread(theirs)}


def _frr() -> dict[str, object]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        netns = stack.enter_context(namespace(electrical=False))
        pathspace = stack.enter_context(frr(netns))
        tor = stack.enter_context(served(folder, netns, frr=pathspace)).open("frr-ssh")
        stack.callback(tor.close)
        return {f"frr_ssh_{n}": _applies(tor, _sets(n), COUNT_FRR) for n in ROUTES}


def _timed_ms(act: Callable[[], object]) -> float:
    begun_ns = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - begun_ns) / 1e6


def _spread(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {"p50_ms": percentile(ordered, 50), "p99_ms": percentile(ordered, 99)}
