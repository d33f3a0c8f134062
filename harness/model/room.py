"""Whether a node's GPUs hold what is to run on them: every row of the ledger, and every reason.

What is asleep stays taken. The agents of a bench and those of a simulated one keep the same ledger;
`agents.generation.memory` says what real GPUs, and nodes without one, have. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from harness.errors import UsageError
from harness.model.batching import Limits
from harness.model.layout import (
    BLOCK_TOKENS,
    Gpu,
    Layout,
    infeasible,
    kv_bytes_per_gpu_token,
    kv_capacity_tokens,
    weight_bytes_per_gpu,
)
from harness.model.placement import Instance
from harness.model.profile import Profile, gpu_of
from harness.model.shape import ModelShape


class Row(NamedTuple):
    """A GPU's memory as it would be; `basis`: ``modelled`` or ``measured``."""

    gpu: int
    total_bytes: int
    weights_bytes: int
    workspace_bytes: int
    asleep_bytes: int
    kv_bytes: int
    basis: str


@dataclass(frozen=True)
class Room:
    """What the ledger knows of a node: a model, GPUs that are alike, and who sleeps on them.

    `tp_only` says why the engine splits by TP alone; "" where it does not.
    """

    shape: ModelShape
    gpu: Gpu
    gpus: int
    asleep_bytes: Mapping[int, int]
    kv_max_tokens: int
    basis: str
    tp_only: str = ""

    def rows(self, instances: Sequence[Instance]) -> tuple[Row, ...]:
        """Return the row of each GPU that is used, as it would be."""
        return tuple(self._row(item, gpu) for item in instances for gpu in sorted(item.gpus))

    def _row(self, instance: Instance, gpu: int) -> Row:
        layout = instance.layout
        weights_bytes = weight_bytes_per_gpu(layout, self.shape)
        asleep_bytes = self.asleep_bytes.get(gpu, 0)
        taken_bytes = weights_bytes + self.gpu.workspace_bytes + asleep_bytes
        kv_bytes = max(0, self.gpu.memory_bytes - taken_bytes)
        if self.kv_max_tokens:
            of_group = -(-self.kv_max_tokens // layout.dp)
            kv_bytes = min(kv_bytes, of_group * kv_bytes_per_gpu_token(layout, self.shape))
        return Row(
            gpu=gpu,
            total_bytes=self.gpu.memory_bytes,
            weights_bytes=weights_bytes,
            workspace_bytes=self.gpu.workspace_bytes,
            asleep_bytes=asleep_bytes,
            kv_bytes=kv_bytes,
            basis=self.basis,
        )

    def problems(self, instances: Sequence[Instance]) -> list[str]:
        """Return every reason why these instances cannot be what runs here; none: they can."""
        reasons = place_problems(instances, self.gpus)
        for layout in dict.fromkeys(instance.layout for instance in instances):
            reasons += infeasible(layout, self.shape, self.gpu, self.gpus, self.gpus)
            if self.tp_only and max(layout.pp, layout.ep, layout.dp) > 1:
                reasons.append(f"{layout}: {self.tp_only}")
        if reasons:
            return reasons
        for instance in instances:
            block_bytes = BLOCK_TOKENS * kv_bytes_per_gpu_token(instance.layout, self.shape)
            reasons += [
                f"GPU {row.gpu}: engines asleep keep {row.asleep_bytes / 1e9:.1f} GB, which leaves "
                f"no room for KV beside {instance.name}'s weights of "
                f"{row.weights_bytes / 1e9:.1f} GB in {row.total_bytes / 1e9:.1f} GB"
                for row in self.rows([instance])
                if row.asleep_bytes and row.kv_bytes < block_bytes
            ]
        return reasons


def place_problems(instances: Sequence[Instance], gpus: int) -> list[str]:
    """Return what is wrong with the instances' places: GPUs that are not here, or wanted twice."""
    reasons, taken = [], dict[int, str]()
    for instance in instances:
        if len(instance.gpus) != instance.layout.gpus:
            reasons.append(
                f"{instance.name}: {instance.layout} takes {instance.layout.gpus} GPUs, "
                f"not the {len(instance.gpus)} that it names"
            )
        for gpu in instance.gpus:
            if not 0 <= gpu < gpus:
                reasons.append(f"{instance.name}: there is no GPU {gpu}, of {gpus} on this node")
            elif (other := taken.setdefault(gpu, instance.name)) != instance.name:
                reasons.append(f"GPU {gpu} is wanted by {other} and by {instance.name}")
    return reasons


class Crew(Protocol):
    """Whoever makes up an instance; `dead` says why it is no more, "" while it lives."""

    @property
    def instance(self) -> Instance:
        """Which one."""

    @property
    def dead(self) -> str:
        """Why."""


def unpooled(
    instances: Iterable[Instance], asleep: Mapping[Instance, Crew], up: Mapping[str, Crew]
) -> list[str]:
    """Return why these cannot be woken, one by one; none: they sleep, or are up by their name."""
    there = sorted(f"{item.name} as {item.layout}" for item in asleep) or ["none"]
    reasons = []
    for instance in instances:
        crew = asleep.get(instance) or up.get(instance.name)
        if crew is None or crew.instance != instance:
            reasons.append(
                f"no engine of {instance.name} as {instance.layout} sleeps here; "
                f"there is {', '.join(there)}"
            )
        elif crew.dead:
            reasons.append(f"{instance.name} has died: {crew.dead}")
    return reasons


def limits_of(
    profile: Profile,
    layout: Layout,
    *,
    sequences_max: int,
    step_max_tokens: int,
    kv_max_tokens: int = 0,
    block_tokens: int = 0,
    length_max_tokens: int = 0,
) -> Limits:
    """Return what an instance of `layout` takes; 0 leaves a limit to the model and its GPUs.

    Raises `UsageError` with every reason if there can be none.
    """
    shape, gpu = profile.shape, gpu_of(profile)
    if reasons := infeasible(layout, shape, gpu, layout.gpus, layout.gpus):
        raise UsageError("; ".join(reasons))
    kv_tokens, of_block = kv_capacity_tokens(layout, shape, gpu), block_tokens or BLOCK_TOKENS
    return Limits(
        sequences_max=sequences_max,
        step_max_tokens=step_max_tokens,
        blocks=min(kv_tokens, kv_max_tokens or kv_tokens) // of_block,
        block_tokens=of_block,
        length_max_tokens=length_max_tokens or shape.length_max_tokens,
    )
