"""What the ledger of a node's memory knows: `harness.model.room` for what an engine runs on.

What a GPU has is the profile's (paced), its device's (vLLM), or an equal share of the node's memory
(vLLM on CPU). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.model import room
from harness.model.generation_rules import CPU_TAKES_TP_ONLY
from harness.model.layout import Gpu
from harness.model.placement import Instance
from harness.model.profile import Profile, gpu_of
from harness.model.room import place_problems
from harness.model.shape import ModelShape
from harness.wire.generation import EngineSpec, Memory

__all__ = ["Room", "cpu_room", "gpu_room", "paced_room", "place_problems"]

_UTILIZATION = 0.92
"""The share of a GPU that vLLM takes, unless its options say otherwise."""


class Room(room.Room):
    """The same, as the coordinator is told of it."""

    def ledger(self, instances: Sequence[Instance]) -> tuple[Memory, ...]:
        """Return the row of each GPU that is used, as it would be."""
        return tuple(Memory(**row._asdict()) for row in self.rows(instances))


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
