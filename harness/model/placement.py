"""Which nodes generate, and which GPUs of theirs make up each instance of a layout. Pure.

An instance never spans nodes. Nodes are filled in their order and GPUs in theirs, so the same
layout on the same nodes always gives the same instances, and a TP group sits on neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.errors import UsageError
from harness.model.bench import Bench
from harness.model.layout import Layout
from harness.model.scenario import Generation


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its name in the fleet ("g0:2-3"), its GPUs on the node, its degrees."""

    name: str
    gpus: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def layout(self) -> Layout:
        """The layout of this instance alone."""
        return Layout(1, self.tp, self.pp, self.ep, self.dp)


def gpus_of(generation: Generation, bench: Bench) -> dict[str, int]:
    """Return the GPUs, real or emulated, of each node that generates, in the bench's order.

    These are the nodes that the scenario names, or else those of ``generate`` pods; one that has
    no GPU is among them, with 0.
    """
    return {
        name: node.gpus or node.emulated_gpus
        for name, node in bench.nodes.items()
        if (name in generation.nodes if generation.nodes else node.pod == "generate")
    }


def place(layout: Layout, gpus_of: Mapping[str, int]) -> dict[str, tuple[Instance, ...]]:
    """Return each node's instances; nodes that get none are in it, empty.

    `gpus_of` is in the order of nodes. Raises `UsageError` where the layout does not fit.
    """
    wanted, left = layout.gpus_per_instance, layout.instances
    placed: dict[str, tuple[Instance, ...]] = {}
    for node, gpus in gpus_of.items():
        here = min(left, gpus // wanted)
        left -= here
        placed[node] = tuple(
            _instance(layout, node, range(i * wanted, (i + 1) * wanted)) for i in range(here)
        )
    if left:
        there = ", ".join(f"{node} has {gpus}" for node, gpus in gpus_of.items()) or "no node"
        raise UsageError(
            f"{layout} does not fit: instances of {wanted} GPUs, none across nodes; {there}"
        )
    return placed


def _instance(layout: Layout, node: str, gpus: range) -> Instance:
    span = f"{gpus[0]}-{gpus[-1]}" if len(gpus) > 1 else f"{gpus[0]}"
    return Instance(
        name=f"{node}:{span}",
        gpus=tuple(gpus),
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        dp=layout.dp,
    )
