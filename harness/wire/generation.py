"""The messages of generation: engines on a node, the requests in them, and what they tell.

An *instance* is one engine over some of a node's GPUs, whose ranks are resident processes: one per
GPU. The coordinator owns the requests: every token it was told of is in its ledger, and what an
engine had not told when it died was never delivered. Telling goes one way only: an instance's
outputs are numbered events of its node, fetched by `Watch` in order, so that a repeated or lost
message neither doubles nor loses a token. `Withdrawn.upto` says which events an answer follows.

Stamps are on the agent's monotonic clock. Lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from harness.model.placement import Instance
from harness.model.profile import Profile
from harness.model.requests import Carried
from harness.model.shape import ModelShape
from harness.wire.messages import Message

Strategy = Literal["restart", "rebuild", "pool"]
"""How an engine changes: its processes are started anew; it is torn down and built in resident
processes; or it goes to sleep and another, built beforehand, wakes."""
Verb = Literal["abort", "export"]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine a fleet runs, and its limits: the same for all of its instances.

    `paced` needs `profile`; of its model's bytes, `bytes_scale` are really held and sent. `vllm`
    loads `model`, a directory on the node; "" makes a tiny random one there. `options` are passed
    to vLLM's engine as they are. 0 leaves a limit to the engine.
    """

    engine: Literal["paced", "vllm"]
    profile: Profile | None = None
    bytes_scale: float = 1e-3
    model: str = ""
    options: dict[str, Any] = {}
    sequences_max: int = 256
    step_max_tokens: int = 2048
    block_tokens: int = 0
    kv_max_tokens: int = 0
    """Per instance; 0: what its GPUs' memory holds."""
    length_max_tokens: int = 0
    seed: int = 0
    temperature: float = 0.0
    """vllm: 0 takes the likeliest token; else it is drawn, seeded by request and position."""
    speed: float = 1.0
    """paced: steps, and taking in weights, take 1 / speed of the profile's time."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Work on a stage: from the first rank that began to the last that ended."""

    stage: str
    begin_ns: int
    end_ns: int


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return one span a stage, from the first that began to the last that ended."""
    found: dict[str, Span] = {}
    for span in spans:
        before = found.get(span.stage, span)
        found[span.stage] = Span(
            stage=span.stage,
            begin_ns=min(before.begin_ns, span.begin_ns),
            end_ns=max(before.end_ns, span.end_ns),
        )
    return tuple(sorted(found.values(), key=lambda span: span.begin_ns))


# -- life of engines -------------------------------------------------------------------------


class OpenGeneration(Message, frozen=True, kw_only=True, tag="open_generation"):
    """Start one resident rank process per GPU; no engine is built yet. Answer: `GenerationOpen`.

    `address` is the node's on the data network: KV and weights are sent over it. `prebuild` lists
    layouts of this node whose engines are built and put to sleep for the strategy `pool`.
    """

    spec: EngineSpec
    gpus: int
    address: str
    prebuild: tuple[tuple[Instance, ...], ...] = ()


class GenerationOpen(Message, frozen=True, kw_only=True, tag="generation_open"):
    """Ranks are up. `facts`: engine, version, device; `warnings` such as an untried version."""

    pids: dict[int, int]
    facts: dict[str, str]
    warnings: tuple[str, ...] = ()
    shape: ModelShape | None = None
    """Of the model that will run."""


class Prepare(Message, frozen=True, kw_only=True, tag="prepare_layout"):
    """Could `instances` be all that runs here, reached by `strategy`? Nothing is changed.

    Answer: `Prepared`, or `Failure("Infeasible")` with every reason.
    """

    instances: tuple[Instance, ...]
    strategy: Strategy


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's memory as it would be: a row of the ledger. `basis`: ``modelled`` or ``measured``."""

    gpu: int
    total_bytes: int
    weights_bytes: int
    workspace_bytes: int
    asleep_bytes: int
    """What sleeping engines keep on it."""
    kv_bytes: int
    basis: str


class Prepared(Message, frozen=True, kw_only=True, tag="prepared_layout"):
    """It could, as things are now; nothing is reserved."""

    memory: tuple[Memory, ...]


class TearDown(Message, frozen=True, kw_only=True, tag="tear_down"):
    """End these instances, which hold no request any longer. Answer: `Torn`.

    `restart` ends the processes too; `pool` puts the engines to sleep. `force` kills the
    processes without asking them (they hang, or died): what they held is lost.
    """

    instances: tuple[str, ...]
    strategy: Strategy
    force: bool = False


class Torn(Message, frozen=True, kw_only=True, tag="torn_down"):
    """They are gone. Span: ``teardown``."""

    spans: tuple[Span, ...]


class Build(Message, frozen=True, kw_only=True, tag="build_engines"):
    """Build these instances on GPUs that are free, at weights `version`. Answer: `Built`.

    Missing rank processes are started first. On a `Failure` none of the instances is left.
    """

    instances: tuple[Instance, ...]
    strategy: Strategy
    version: int = 0
    source: str = ""
    """A safetensors file on the node that holds weights of that version; "": the first ones."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a built instance takes."""

    sequences_max: int
    step_max_tokens: int
    blocks: int
    block_tokens: int
    length_max_tokens: int
    vocab: int
    weights_bytes: int
    """Really held, by all of its ranks."""


class Built(Message, frozen=True, kw_only=True, tag="engines_built"):
    """They take requests. Spans, as far as they apply: ``processes groups weights kv_cache``."""

    spans: tuple[Span, ...]
    capacities: dict[str, Capacity]
    kv_peers: dict[str, tuple[str, ...]]
    """Per instance, ``HOST:PORT`` of each rank, in rank order, where KV can be sent to."""


class CloseGeneration(Message, frozen=True, kw_only=True, tag="close_generation"):
    """End all engines and ranks and see them gone. Answer: `Done`."""


# -- requests ----------------------------------------------------------------------------------


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be continued: where it stands, its tokens, and KV sent ahead, if any.

    `prompt` and `output` are token ids; both are empty for the paced engine, which only counts.
    """

    carried: Carried
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    kv_transfer: str = ""
    """Id of the transfer that brought its KV; "" recomputes."""


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Queue requests. Answer: `Submitted`."""

    instance: str
    works: tuple[Work, ...]


class Submitted(Message, frozen=True, kw_only=True, tag="submitted"):
    """`refused`: why, by id; the others are in. `with_kv`: those that continue from sent KV."""

    refused: dict[str, str]
    with_kv: tuple[str, ...] = ()


class Admission(Message, frozen=True, kw_only=True, tag="admission"):
    """Let waiting requests of these instances in, or not (those that run go on). Answer: `Done`."""

    instances: tuple[str, ...]
    open: bool


class Withdraw(Message, frozen=True, kw_only=True, tag="withdraw"):
    """End requests here: `ids` of one instance, or all of several (no `ids`). `Withdrawn`.

    Each leaves with all of its partial output; one that has just finished is not in the answer,
    but among the events. `to` (with ``export``): send their KV to these ranks first, as transfer
    `transfer`; one whose KV cannot be sent leaves without.
    """

    instances: tuple[str, ...]
    ids: tuple[str, ...] = ()
    verb: Verb = "abort"
    to: KvTarget | None = None


class KvTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV goes: the receiving instance, and ``HOST:PORT`` of each of its ranks."""

    transfer: str
    instance: Instance
    peers: tuple[str, ...]


class Withdrawn(Message, frozen=True, kw_only=True, tag="withdrawn"):
    """What left. Events up to `upto` hold all output that it had produced here.

    `sent_bytes` by id: KV really sent; those not in it must be recomputed. Spans: ``withdraw``,
    and ``kv_send``.
    """

    upto: int
    left: tuple[Carried, ...]
    sent_bytes: dict[str, int]
    spans: tuple[Span, ...]


class UpdateWeights(Message, frozen=True, kw_only=True, tag="update_weights"):
    """Load weights `version`, then produce tokens with them. Answer: `WeightsUpdated`.

    `source`: a safetensors file on the node, as `harness.wire.weights` brings it. Every rank
    verifies the checksum of what it copies. Running requests go on; with `drop_kv` their KV is
    computed anew. Prefix caches are emptied in either case: new requests share nothing with old
    weights. On a `Failure` the instances named in it hold no valid weights, and are dead.
    """

    instances: tuple[str, ...]
    version: int
    source: str = ""
    drop_kv: bool = True


class WeightsUpdated(Message, frozen=True, kw_only=True, tag="weights_updated"):
    """All ranks have them. Span: ``weights``. `moved_bytes` were really copied."""

    spans: tuple[Span, ...]
    moved_bytes: int


# -- what is told ------------------------------------------------------------------------------


class Output(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens of one request from one instance; an end without tokens has `count` 0.

    They are positions `start` .. `start + count - 1` of its response.
    """

    instance: str
    id: str
    start: int
    count: int
    first_ns: int
    """End of the step that gave the first of them."""
    last_ns: int
    ids: tuple[int, ...] = ()
    ended: Literal["", "finished", "aborted", "exported"] = ""
    version: int = 0
    """Weights that produced the last of them."""
    cached_tokens: int = 0
    """With the first output after a submit: tokens whose KV was there already."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One instance now; totals since it was built."""

    t_ns: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    generated_tokens: int
    """By the engine's own count, independent of the outputs."""
    prefilled_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    first_token_ns: int = 0
    """Of the first token since it was built; 0: none yet."""
    last_token_ns: int = 0
    prefilling: int = 0
    late_ns: int = 0
    """paced: how late steps ended against the profile, in all."""
    beyond: tuple[str, ...] = ()
    """paced: in which ways step times are extrapolated."""


class Watch(Message, frozen=True, kw_only=True, tag="watch_generation"):
    """Tell events after `after`, at the latest after `wait_ns`. Answer: `Happened`.

    Events up to `after` are forgotten. One coordinator watches a node, one watch at a time.
    """

    after: int
    wait_ns: int


class Happened(Message, frozen=True, kw_only=True, tag="generation_happened"):
    """Events after the watch's `after`, up to `upto`, in order; and every instance's state.

    `dead` says, by instance, why: a rank's death, a failed step. The dead stay until torn down.
    """

    upto: int
    outputs: tuple[Output, ...]
    stats: dict[str, Stats]
    dead: dict[str, str]


# -- calibration -------------------------------------------------------------------------------


class MeasureSteps(Message, frozen=True, kw_only=True, tag="measure_steps"):
    """Time steps of an instance that holds no request. Answer: `StepTimes`.

    `batch` sequences, each of a context of `context_tokens`, decode `steps` times; with batch 0,
    a prompt of `prefill_tokens` is prefilled in one step, `steps` times.
    """

    instance: str
    batch: int
    context_tokens: int
    prefill_tokens: int
    steps: int


class StepTimes(Message, frozen=True, kw_only=True, tag="step_times"):
    """Each step's time, in order."""

    times_ns: tuple[int, ...]


GenerationBody = (
    OpenGeneration | GenerationOpen | Prepare | Prepared | TearDown | Torn | Build | Built
    | CloseGeneration | Submit | Submitted | Admission | Withdraw | Withdrawn
    | UpdateWeights | WeightsUpdated | Watch | Happened | MeasureSteps | StepTimes
)  # fmt: skip
