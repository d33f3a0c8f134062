"""Traces written in a few words, and a bench of round numbers to replay them on.

Two GPUs a node, two nodes a ToR; 8000 Mbit/s a NIC, which is a byte per ns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Links, Node, Tor
from harness.model.load import load_calibration
from harness.model.simulation import Calibration, Figure
from harness.rlsim.traces.checks import checked
from harness.rlsim.traces.findings import replayed
from harness.rlsim.traces.ground import Ground
from harness.rlsim.traces.json_trace import parse
from harness.rlsim.traces.model import Trace
from harness.rlsim.traces.outcome import Outcome
from harness.rlsim.traces.replay import Replay

SCENARIOS = Path(__file__).parents[2] / "scenarios"
H800 = load_calibration(SCENARIOS / "calibrations" / "h800.toml")
MS = 10**6
NodeText = dict[str, Any]


def compute(id_: int, ns: int = 5, deps: tuple[int, ...] = (), **more: Any) -> NodeText:
    return {"kind": "compute", "id": id_, "duration_ns": ns, "data_deps": deps, **more}


def reduce(id_: int, size: int = 4, deps: tuple[int, ...] = (), **more: Any) -> NodeText:
    own = {"kind": "collective", "id": id_, "op": "all_reduce", "bytes": size}
    return {**own, "data_deps": deps, **more}


def send(id_: int, peer: int, size: int = 4, deps: tuple[int, ...] = (), **more: Any) -> NodeText:
    return {"kind": "send", "id": id_, "peer": peer, "bytes": size, "data_deps": deps, **more}


def recv(id_: int, peer: int, size: int = 4, deps: tuple[int, ...] = (), **more: Any) -> NodeText:
    return {"kind": "recv", "id": id_, "peer": peer, "bytes": size, "data_deps": deps, **more}


def trace(
    programs: dict[str, list[NodeText]], groups: dict[str, Any] | None = None, **head: Any
) -> Trace:
    file = {
        "schema": "rlsim-trace/1",
        "gpu": "h100",
        "groups": groups or {},
        "programs": [{"ranks": ranks, "nodes": nodes} for ranks, nodes in programs.items()],
        **head,
    }
    return parse(json.dumps(file).encode(), "t.json")


def bench(nodes: int = 4, **links: Any) -> Bench:
    return Bench(
        name="small",
        world="simulated",
        nodes={f"n{i}": Node(tor=f"t{i // 2}", emulated_gpus=2) for i in range(nodes)},
        tors={f"t{i}": Tor(uplinks=0) for i in range((nodes + 1) // 2)},
        links=Links(**({"link_mbit_per_s": 8000.0, "oversubscription": 1.0} | links)),
    )


def figures(backend: Any = "gloo", step_us: float = 0.0) -> Calibration:
    """Return figures that take nothing but the network's time, and so much for each step."""

    def exactly(value: float) -> Figure:
        return Figure(value=value, source="test")

    network = replace(
        H800.network,
        link_share=exactly(1.0),
        electrical_share=exactly(1.0),
        latency_us=exactly(0.0),
    )
    gloo = replace(
        H800.collectives, backend=backend, step_us=exactly(step_us), copy_ns_per_kb=exactly(0.0),
        gpu="",
    )  # fmt: skip
    return replace(H800, network=network, collectives=gloo)


def ground(of: Bench | None = None, by: Calibration | None = None, **more: Any) -> Ground:
    found = of or bench()
    return Ground(found, topology_of(found), by or figures(), **more)


def run(of: Trace, on: Ground | None = None) -> tuple[Replay, Outcome]:
    return replayed(checked(of), on or ground(), keep_spans=True)
