"""Which nodes generate, and which GPUs of theirs make up each instance of a layout. Pure.

An instance never spans nodes. Nodes are filled in their order and GPUs in theirs, so the same
layout on the same nodes always gives the same instances, and a TP group sits on neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.errors import UsageError
from harness.model.bench import Bench
from harness.model.layout import Layout, Mix
from harness.model.scenario import Generation, Training


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


def trainers_of(training: Training, bench: Bench) -> dict[str, int]:
    """Return how many ranks each node that trains can have: one per GPU, real or emulated, or one.

    These are the nodes that the scenario names, or else those of ``train`` pods.
    """
    return {
        name: node.gpus or node.emulated_gpus or 1
        for name, node in bench.nodes.items()
        if (name in training.nodes if training.nodes else node.pod == "train")
    }


def place(layout: Layout | Mix, gpus_of: Mapping[str, int]) -> dict[str, tuple[Instance, ...]]:
    """Return each node's instances; nodes that get none are in it, empty.

    `gpus_of` is in the order of nodes. Of a mix, the largest instances are placed first, so that
    the smaller ones fill what is left. Raises `UsageError` where it does not fit.
    """
    mix = Mix((layout,)) if isinstance(layout, Layout) else layout
    free = dict.fromkeys(gpus_of, 0)
    placed: dict[str, tuple[Instance, ...]] = dict.fromkeys(gpus_of, ())
    for part in sorted(mix, key=lambda part: -part.gpus_per_instance):
        wanted, left = part.gpus_per_instance, part.instances
        for node, gpus in gpus_of.items():
            here = min(left, (gpus - free[node]) // wanted)
            left -= here
            firsts = range(free[node], free[node] + here * wanted, wanted)
            placed[node] += tuple(_instance(part, node, range(i, i + wanted)) for i in firsts)
            free[node] += here * wanted
        if left:
            there = ", ".join(f"{n} has {gpus}" for n, gpus in gpus_of.items()) or "no node"
            raise UsageError(
                f"{mix} does not fit: instances of {wanted} GPUs, none across nodes; {there}"
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
