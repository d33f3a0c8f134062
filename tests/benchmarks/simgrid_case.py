"""Flows that all begin at once, in SimGrid: ``/usr/bin/python3 simgrid_case.py < CASES``.

Run by the Python that Debian's `simgrid` is installed for, so it imports nothing of ours. Reads a
JSON list of cases ``{"capacities": [bytes/s], "paths": [[link]], "sizes": [bytes]}``; writes a line
for each: when flows end (s of its clock), and the real s that platform, beginning of flows and
simulation took. An engine lives as long as its process, so each case has a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

import simgrid

MODEL = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "maxmin/precision:1e-9",
    "surf/precision:1e-12",
)
"""Plain max-min: no headers, no windows, no cost of acknowledgements."""


def platform(case: dict[str, list[Any]]) -> list[tuple[Any, Any]]:
    """Build links, and a pair of hosts for each flow: routes belong to pairs."""
    zone = simgrid.NetZone.create_full_zone("all")
    links = [zone.create_link(f"l{i}", value) for i, value in enumerate(case["capacities"])]
    few = math.isqrt(len(case["paths"])) + 1
    hosts = [zone.create_host(f"h{i}", 1e9) for i in range(few + 1)]
    pairs = []
    for flow, path in enumerate(case["paths"]):
        source, by = divmod(flow, few)
        pairs.append((hosts[source], hosts[(source + 1 + by) % (few + 1)]))
        ends = [host.netpoint for host in pairs[-1]]
        zone.add_route(*ends, None, None, [simgrid.LinkInRoute(links[i]) for i in path], False)
    zone.seal()
    return pairs


def simulate(case: dict[str, list[Any]]) -> dict[str, Any]:
    begin = time.perf_counter()
    engine = simgrid.Engine(["case", "--log=root.thres:error", *(f"--cfg={key}" for key in MODEL)])
    pairs = platform(case)
    marks, flows = [], []

    def send() -> None:
        marks.append(time.perf_counter())
        for (source, target), size in zip(pairs, case["sizes"], strict=True):
            flows.append(simgrid.Comm.sendto_async(source, target, size))
        marks.append(time.perf_counter())
        simgrid.Comm.wait_all(flows)
        marks.append(time.perf_counter())

    simgrid.Actor.create("sender", pairs[0][0], send)
    engine.run()
    return {
        "end_s": [flow.finish_time for flow in flows],
        "platform_s": marks[0] - begin,
        "begin_s": marks[1] - marks[0],
        "simulate_s": marks[2] - marks[1],
    }


def main() -> None:
    for case in json.load(sys.stdin):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                json.dump(simulate(case), out)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as result:
            sys.stdout.write(result.read() + "\n")
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
