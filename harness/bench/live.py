"""The live world: agents on servers, physical switches. Nothing is built; only joined.

The coordinator listens where the bench file says; agents come to it. ``launcher = "manual"`` prints
the line to paste on each node; ``"local"`` starts all agents on this machine, for a bench whose
nodes are this server's GPUs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from harness.bench.children import Children, agent_argv
from harness.bench.running import Places, RunningBench, join
from harness.clock import Clock
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.wire.link import Link


@asynccontextmanager
async def open_live(
    bench: Bench,
    topology: Topology,
    places: Places,
    clock: Clock,
    *,
    keys_folder: Path,
    tell: Callable[[str], None],
) -> AsyncIterator[RunningBench]:
    """Listen, wait for every node's agent, open every switch; close all of it on every way out."""
    names = [switch.password_env for switch in bench.switches.values() if switch.password_env]
    children = Children(places.logs, None, names)

    def start_agents(link: Link) -> None:
        for name in topology.nodes:
            argv = agent_argv(name, link.address, keys_folder)
            if bench.launcher == "local":
                children.start(f"agent-{name}", [sys.executable, *argv])
            else:
                tell(f"on {bench.nodes[name].host or name}, paste:  python {shlex.join(argv)}")

    joined = join(
        bench,
        topology,
        places,
        specs=bench.switches,
        tors={},
        agents=tuple(topology.nodes),
        keys_folder=keys_folder,
        bind=bench.listen,
        children=children,
        start_agents=start_agents,
        clock=clock,
    )
    try:
        async with joined as running:
            yield running
    finally:
        children.end()
