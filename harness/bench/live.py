"""The live world: agents on servers, physical switches. Nothing is built; only joined.

The coordinator listens where the bench file says; agents come to it. ``launcher = "manual"`` prints
the line to paste on each node; ``"local"`` starts all agents on this machine, for a bench whose
nodes are this server's GPUs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.bench.children import Children, agent_argv
from harness.bench.credentials import secret_variables
from harness.bench.leases import held
from harness.bench.running import Places, RunningBench, join
from harness.clock import Clock
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.wire import keys
from harness.wire.link import Link

ANY_PORT = "127.0.0.1:0"
"""Where agents that are started on this machine meet us when the bench file does not say."""


@asynccontextmanager
async def open_live(
    bench: Bench,
    topology: Topology,
    places: Places,
    clock: Clock,
    *,
    keys_folder: Path | None,
    tell: Callable[[str], None],
) -> AsyncIterator[RunningBench]:
    """Listen, wait for every node's agent, open every switch and ToR; close all on every way out.

    Without `keys_folder`, agents that are started here get keys that end with the run.
    """
    children = Children(places.logs, None, secret_variables(bench))

    async with AsyncExitStack() as stack:
        steered = {name: tor for name, tor in bench.tors.items() if topology.tors[name].steered}
        stack.enter_context(held({**bench.switches, **steered}, f"run {places.run.name}"))
        folder = keys_folder or Path(stack.enter_context(TemporaryDirectory(prefix="harness-")))
        if keys_folder is None:
            keys.make_folder(folder, tuple(topology.nodes))
        stack.callback(children.end)
        joined = join(
            bench,
            topology,
            places,
            switches=bench.switches,
            tors=steered,
            agents=tuple(topology.nodes),
            keys_folder=folder,
            bind=bench.listen or ANY_PORT,
            children=children,
            start_agents=partial(_start_agents, bench, folder, children, tell),
            clock=clock,
        )
        yield await stack.enter_async_context(joined)


def _start_agents(
    bench: Bench, keys_folder: Path, children: Children, tell: Callable[[str], None], link: Link
) -> None:
    for name, node in bench.nodes.items():
        argv = agent_argv(name, link.address, keys_folder)
        if bench.launcher == "local":
            children.start(f"agent-{name}", [sys.executable, *argv])
        else:
            tell(f"on {node.host or name}, paste:  python {shlex.join(argv)}")
