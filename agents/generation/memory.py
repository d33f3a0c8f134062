"""Whether a node's GPUs hold what is to run on them: the ledger of their memory, and every reason.

What a GPU has is the profile's (paced), its device's (vLLM), or an equal share of the node's memory
(vLLM on CPU). What is asleep stays taken. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.model.generation_rules import CPU_TAKES_TP_ONLY
from harness.model.layout import (
    BLOCK_TOKENS,
    Gpu,
    infeasible,
    kv_bytes_per_gpu_token,
    weight_bytes_per_gpu,
)
from harness.model.placement import Instance
from harness.model.profile import Profile, gpu_of
from harness.model.shape import ModelShape
from harness.wire.generation import EngineSpec, Memory

_UTILIZATION = 0.92
"""The share of a GPU that vLLM takes, unless its options say otherwise."""


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

    def ledger(self, instances: Sequence[Instance]) -> tuple[Memory, ...]:
        """Return the row of each GPU that is used, as it would be."""
        return tuple(self._row(item, gpu) for item in instances for gpu in sorted(item.gpus))

    def _row(self, instance: Instance, gpu: int) -> Memory:
        layout = instance.layout
        weights_bytes = weight_bytes_per_gpu(layout, self.shape)
        asleep_bytes = self.asleep_bytes.get(gpu, 0)
        taken_bytes = weights_bytes + self.gpu.workspace_bytes + asleep_bytes
        kv_bytes = max(0, self.gpu.memory_bytes - taken_bytes)
        if self.kv_max_tokens:
            of_group = -(-self.kv_max_tokens // layout.dp)
            kv_bytes = min(kv_bytes, of_group * kv_bytes_per_gpu_token(layout, self.shape))
        return Memory(
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
                for row in self.ledger([instance])
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


def paced_room(
    profile: Profile, spec: EngineSpec, gpus: int, asleep_bytes: Mapping[int, int]
) -> Room:
    """Return the room on emulated GPUs: the profile's, in bytes of its model, not the scaled."""
    return Room(
        shape=profile.shape,
        gpu=gpu_of(profile),
        gpus=gpus,
        asleep_bytes={gpu: round(kept / spec.bytes_scale) for gpu, kept in asleep_bytes.items()},
        kv_max_tokens=spec.kv_max_tokens,
        basis="modelled",
    )


def gpu_room(
    shape: ModelShape, spec: EngineSpec, gpus: int, asleep_bytes: Mapping[int, int], gpu_bytes: int
) -> Room:
    """Return the room on real GPUs of `gpu_bytes` each, of which vLLM takes a share."""
    share = float(spec.options.get("gpu_memory_utilization", _UTILIZATION))
    return Room(
        shape=shape,
        gpu=Gpu("the GPU", gpu_bytes, round(gpu_bytes * (1 - share))),
        gpus=gpus,
        asleep_bytes=asleep_bytes,
        kv_max_tokens=spec.kv_max_tokens,
        basis="measured",
    )


def cpu_room(shape: ModelShape, spec: EngineSpec, gpus: int, host_bytes: int) -> Room:
    """Return the room of vLLM on CPU: each rank's equal share of the node's memory."""
    return Room(
        shape=shape,
        gpu=Gpu("a rank's share of the node's memory", host_bytes // max(1, gpus), 0),
        gpus=gpus,
        asleep_bytes={},
        kv_max_tokens=spec.kv_max_tokens,
        basis="modelled",
        tp_only=CPU_TAKES_TP_ONLY,
    )
