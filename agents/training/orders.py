"""The line between an agent and a rank of training: orders, answers, and what is told unasked.

Orders are done one at a time, in turn. `Join` comes first. Where the wire has a message for it
(`TrainStep`, `PlanStep`, `KeepTrainer`), that is the order. `Told` is unasked, and always before
the answer to the step that it belongs to. Pure.
"""

from __future__ import annotations

import msgspec

from agents.frames import Frame
from agents.pipe import Doing, WhereAreYou
from harness.model.training.trainer import TrainerSpec
from harness.wire.messages import Done, Failure, Message
from harness.wire.training import KeepTrainer, PhaseHappened, PlanStep, StepPlan, TrainStep


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """Meet the other ranks, make the groups and the trainer. Answer: `Joined`.

    `local` counts the node's ranks: which of its GPUs is this one's. Rank 0 makes the store.
    """

    spec: TrainerSpec
    rank: int
    local: int
    world_size: int
    store: str
    interface: str
    attempt: int
    timeout_ns: int
    tells: bool
    """Whether this rank tells its phases."""


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    """In all groups; see `harness.wire.training.TrainingOpen`."""

    facts: dict[str, str]
    parameters: int
    weights_bytes: int


class Learned(Message, frozen=True, kw_only=True, tag="learned"):
    """This rank's part of a step; `dp` says which shard of the samples it had."""

    dp: int
    tokens: int
    micro_batches: int
    begin_ns: int
    end_ns: int
    compute_ns: int
    communicate_ns: int
    figures: dict[str, float]


class Publish(Message, frozen=True, kw_only=True, tag="publish"):
    """Gather the weights of `version` at the ranks `writers`; these write them to `path`.

    It is "" for all others. Answer: `Published`.
    """

    version: int
    path: str
    writers: tuple[int, ...]


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """Given away, or written: then of so many bytes, with this CRC-32."""

    begin_ns: int
    end_ns: int
    bytes: int
    checksum: int


class Told(Message, frozen=True, kw_only=True, tag="told"):
    """Phases that began or ended."""

    phases: tuple[PhaseHappened, ...]


Body = (
    Join | Joined | TrainStep | Learned | PlanStep | StepPlan | Publish | Published
    | KeepTrainer | Told | WhereAreYou | Doing | Done | Failure
)  # fmt: skip

FRAMES = msgspec.msgpack.Decoder(Frame[Body])
