"""The messages of training: ranks of one torch process group over the train pod, step by step.

Every node that trains has rank processes, one per GPU (or one on a node without). All of them get
the same `TrainStep`; each takes its shard. What a step will communicate is known beforehand as a
list of *phases*; while it runs, each phase that begins or ends is an event, fetched by
`WatchTraining` in order. Stamps are on the agent's monotonic clock, lengths in tokens.
"""

from __future__ import annotations

import msgspec

from harness.model.scenario import Op
from harness.model.training.axes import Axis
from harness.model.training.phase import Phase
from harness.model.training.trainer import TrainerSpec
from harness.wire.generation import Span
from harness.wire.messages import Message


class OpenTraining(Message, frozen=True, kw_only=True, tag="open_training"):
    """Start `ranks` of `world_size` here; meet at `store` (``HOST:PORT``). `TrainingOpen`.

    Rank 0's node makes the store. `attempt` counts openings in one run: it keeps their keys apart.
    `address` is the node's on the data network, `interface` its name.
    """

    spec: TrainerSpec
    ranks: tuple[int, ...]
    world_size: int
    store: str
    address: str
    interface: str
    attempt: int = 0
    timeout_ns: int


class TrainingOpen(Message, frozen=True, kw_only=True, tag="training_open"):
    """All ranks are in all groups. `facts`: backend, device, what carries which parallelism."""

    pids: dict[int, int]
    facts: dict[str, str]
    parameters: int
    """Of the model."""
    weights_bytes: int
    """Of its file of weights: really written and sent."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A response to learn from. Ids are empty in `paced` mode, which needs only the counts."""

    id: str
    group: str
    prompt_tokens: int
    response_tokens: int
    reward: float
    advantage: float
    version_first: int
    version_last: int
    prompt: tuple[int, ...] = ()
    response: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Of the response's tokens as they were drawn, at the trainer's temperature; (): not known."""


class TrainStep(Message, frozen=True, kw_only=True, tag="train_step"):
    """Learn from `samples`: weights of `version` become those of `version` + 1. `Trained`.

    Asked again for the same version, it is answered from memory. A rank that dies is
    ``Failure("RankDied")``; the others are ended, and training must be opened anew.
    """

    version: int
    samples: tuple[Sample, ...]


class Trained(Message, frozen=True, kw_only=True, tag="trained"):
    """The optimizer's step was made. Spans, as far as they apply: ``compute``, ``communicate``.

    `figures`: loss, grad_norm, clipped (share of tokens), and the like; from rank 0's node only.
    """

    version: int
    tokens: int
    micro_batches: int
    spans: tuple[Span, ...]
    figures: dict[str, float] = {}


class PlanStep(Message, frozen=True, kw_only=True, tag="plan_step"):
    """Which phases will a step of these lengths have? `tokens` by sample. Answer: `StepPlan`."""

    tokens: tuple[int, ...]


class StepPlan(Message, frozen=True, kw_only=True, tag="step_plan"):
    """They come in this order."""

    phases: tuple[Phase, ...]


class PublishWeights(Message, frozen=True, kw_only=True, tag="publish_weights"):
    """Write the weights, whole, to a file in some nodes' memory. Answer: `WeightsPublished`.

    Asked of every node that trains, for shards are gathered: at the ranks `writers`, of which a
    node has one at most. They write the same, byte for byte: a safetensors file with the names
    that Hugging Face's model has (`real`), or ``layer.N`` (`paced`).
    """

    version: int
    writers: tuple[int, ...] = (0,)


class WeightsPublished(Message, frozen=True, kw_only=True, tag="weights_published"):
    """`path` is "" where no writer is. Spans: ``gather``, ``write``."""

    version: int
    path: str
    bytes: int
    checksum: int
    """CRC-32 (zlib) of the file."""
    spans: tuple[Span, ...]


class KeepTrainer(Message, frozen=True, kw_only=True, tag="keep_trainer"):
    """Write (or, with `load`, read) all training state at folder `path` on each node. `Done`.

    `instead_of`, a folder that was written before, is deleted once `path` is whole; "" is none.
    """

    path: str
    load: bool = False
    instead_of: str = ""


class WatchTraining(Message, frozen=True, kw_only=True, tag="watch_training"):
    """Tell phases after `after`, at the latest after `wait_ns`. Answer: `TrainingHappened`."""

    after: int
    wait_ns: int


class PhaseHappened(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A phase as rank `rank`, the lowest of this node, saw it; `index` in the step's plan."""

    version: int
    index: int
    name: str
    op: Op
    axis: Axis
    bytes: int
    begin_ns: int
    end_ns: int
    """0: it has begun, and not ended yet."""
    rank: int


class TrainingHappened(Message, frozen=True, kw_only=True, tag="training_happened"):
    """Events after the watch's `after`, up to `upto`. `dead` says by rank why."""

    upto: int
    phases: tuple[PhaseHappened, ...]
    dead: dict[int, str]


class CloseTraining(Message, frozen=True, kw_only=True, tag="close_training"):
    """End all ranks and see them gone. Answer: `Done`."""


TrainingBody = (
    OpenTraining | TrainingOpen | TrainStep | Trained | PlanStep | StepPlan | PublishWeights
    | WeightsPublished | KeepTrainer | WatchTraining | TrainingHappened | CloseTraining
)  # fmt: skip
