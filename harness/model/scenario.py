"""The scenario file: what is asked. A question, shapes of circuits, steps and checks."""

from __future__ import annotations

from typing import Literal

from harness.model.bench import Strict

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
Engine = Literal["paced", "vllm"]
Dtype = Literal["float32", "float16", "bfloat16", "int32"]


class Shape(Strict, frozen=True, kw_only=True):
    """A named arrangement of circuits between ToRs, either by template or listed.

    `ring`: every ToR joined to its two neighbours, edges dealt to the switches in turn, starting
    with the switch at index `rotate`. `pairs`: round `rotate` of a 1-factorisation on every
    switch (disjoint pairs). `dark`: no circuit. `circuits` lists them outright:
    ``["tor0-tor1@agg0"]``. An edge that no switch can serve stays electrical, and the plan says so.
    """

    template: Literal["ring", "pairs", "dark", "listed"] = "listed"
    rotate: int = 0
    circuits: tuple[str, ...] = ()


class Collectives(Strict, frozen=True, kw_only=True, tag_field="do", tag="collectives"):
    """Time collectives over the path in force, as nccl-tests does.

    `group`: all nodes, every disjoint pair (`pairs`), or the ends of each circuit (`circuits`).
    `path` is a label in the metric's name and checked against the truth: ``electrical`` requires
    that no circuit is steered to, any other value names the shape that is up.
    """

    ops: tuple[Op, ...] = ("all_reduce",)
    sizes: tuple[str, ...] = ("1MiB",)
    dtype: Dtype = "float32"
    iterations: int = 20
    warmup: int = 5
    group: Literal["all", "pairs", "circuits"] = "all"
    verify: bool = True
    timeout_s: float = 60.0


class Shift(Strict, frozen=True, kw_only=True, tag_field="do", tag="shape"):
    """Bring a shape up (or take all circuits down) with no traffic running."""

    shape: str


class Reconfigure(Strict, frozen=True, kw_only=True, tag_field="do", tag="reconfigure"):
    """Change shape under traffic, `count` times, through `shapes` in turn.

    Traffic is one collective in a loop. With `ride_through` it is not drained, which shows what
    draining saves. With `groups = "rebuild"` communicators are destroyed before the switch and
    made anew after it. `window_ms` is the longest dark time that pays; a switch whose expected
    time exceeds it is not made, the traffic stays electrical, and the run says so (0: no limit).
    """

    shapes: tuple[str, ...]
    count: int = 10
    op: Op = "all_reduce"
    size: str = "1MiB"
    dtype: Dtype = "float32"
    ride_through: bool = False
    groups: Literal["keep", "rebuild"] = "keep"
    window_ms: float = 0.0
    rest_ms: float = 200.0
    """Traffic between two reconfigurations, from steady to the next intent."""
    steady_within_pct: float = 10.0
    timeout_s: float = 60.0


class Generation(Strict, frozen=True, kw_only=True):
    """What generates: the engine, the model, and how it is laid out over the nodes.

    `paced` takes `profile`, a latency profile, and really holds and sends `bytes_scale` of its
    model's weights and KV. `vllm` takes `model`, a directory on the nodes; "" makes a tiny random
    model there. Every node of a ``generate`` pod takes part, or those of `nodes`.
    """

    engine: Engine = "paced"
    layout: str
    """Instances x degrees over all nodes, such as ``"4xTP1"``: what is up first."""
    workload: str
    """Path of a workload file, relative to this file."""
    profile: str = ""
    """Path of a latency profile, relative to this file."""
    model: str = ""
    nodes: tuple[str, ...] = ()
    bytes_scale: float = 1e-3
    pool: tuple[str, ...] = ()
    """Layouts built beforehand, for switches with strategy ``pool``."""
    sequences_max: int = 256
    """Requests that one instance runs at once."""
    step_max_tokens: int = 2048
    kv_max_tokens: int = 0
    """Of one instance; 0: what its GPUs' memory holds."""
    vllm_options: dict[str, str | int | float | bool] = {}
    """Passed to vLLM's engine as they are."""
    prompts_per_gpu: float = 0.0
    """Of a workload that is generated, in each step; 0: as many as it says by itself."""
    temperature: float = 0.0
    """vllm: of sampling, seeded by request; 0 takes the likeliest token."""
    speed: float = 1.0
    """paced: how many times as fast as the profile says everything computes, and weights come from
    host memory. Bytes that are really copied or sent, and messages, are not any faster, so what
    they cost weighs more."""


class Generate(Strict, frozen=True, kw_only=True, tag_field="do", tag="generate"):
    """Generate a step of the workload; meanwhile switch layouts and move requests.

    The requests are those of `workload_step`, the first `requests_max` of them (0: all), at most
    `in_flight_max` at once (0: all). The layout is switched `count` times, through `layouts` in
    turn, and `migrations` requests are moved. While switches or migrations are still to come, the
    requests are repeated, so that each happens under load.
    """

    workload_step: int = 0
    requests_max: int = 0
    in_flight_max: int = 0
    layouts: tuple[str, ...] = ()
    count: int = 0
    """0 with `layouts`: once through them."""
    strategy: Literal["restart", "rebuild", "pool"] = "rebuild"
    requests: Literal["abort", "drain", "migrate"] = "abort"
    """What becomes of those that run: they leave with their partial output; or they end first; or,
    `order` being rolling, they move to instances of other nodes by `migrate_by`, as long as there
    are seats: the rest leaves.
    """
    order: Literal["at_once", "rolling"] = "at_once"
    """All nodes together, or node after node, the others generating."""
    rest_s: float = 2.0
    """Before the first switch, and from steady to the next."""
    migrations: int = 0
    migrate_by: Literal["auto", "kv", "recompute"] = "auto"
    """How requests move: `auto` takes what is expected to be faster, as measured so far."""
    migrate_every_ms: float = 100.0
    stall_s: float = 10.0
    """An instance that has running requests and produces no token for so long is given up."""
    stage_timeout_s: float = 120.0
    """Each stage of a switch; one that takes longer has failed, and the switch is rolled back."""
    timeout_s: float = 300.0


class Training(Strict, frozen=True, kw_only=True):
    """What trains, and on which data, tensor, pipeline and expert parallel degrees.

    `paced`: real collectives with `bytes_scale` of the bytes of the profile's model; computing
    takes the time that its GPU needs at `flops_share` of its peak. `real`: a small decoder, the one
    that the engine `vllm` makes itself (`model` = ""), learns the `task` by GRPO. Every node of a
    ``train`` pod takes part, or those of `nodes`, with one rank per GPU (or one on a node without).
    """

    mode: Literal["paced", "real"] = "paced"
    layout: str = "DP1"
    """Degrees of all ranks together, such as ``"DP2TP2"`` or ``"DP2PP2EP2"``."""
    profile: str = ""
    """paced: path of a latency profile, relative to this file; "": that of `[generation]`."""
    flops_share: float = 0.4
    bytes_scale: float = 1e-3
    micro_batch_tokens: int = 16384
    nodes: tuple[str, ...] = ()
    model: str = ""
    learning_rate: float = 6e-3
    clip: float = 0.2
    """real: how far a token's probability ratio may go from 1 before it teaches no more."""
    task: Literal["class_of_prompt"] = "class_of_prompt"


class Fabric(Strict, frozen=True, kw_only=True):
    """How circuits follow the work, where an rl step says ``fabrics``.

    Before each phase the controller is told who will send what to whom, and how long the uplinks
    will be idle before. `rule`: change circuits only where the change fits in the idle window
    (``window``, as published), or also where what it delays is less than what it saves (``gain``).
    """

    rule: Literal["window", "gain"] = "gain"
    gain_min_pct: float = 5.0
    """Of the time that the traffic would take: what a change must save at least."""
    rest_ms: float = 100.0
    """After a change, another one within this time must save twice as much."""
    settle_ms: float = 10.0
    """From steering away to going dark: what an uplink still holds gets out meanwhile."""
    layerwise: bool = True
    """Whether circuits may also change between the communications of one training step."""
    static: str = ""
    """The shape of the arm ``static``; "": planned once, for all traffic of a step together."""


class Rl(Strict, frozen=True, kw_only=True, tag_field="do", tag="rl"):
    """Train for `steps` steps on what is generated meanwhile: once under each of `policies`.

    Batch k is the workload's step k (they are repeated in turn when there are more), and trains
    weights of version k into k + 1. It is generated as soon as weights of version k -
    `staleness_max` are up: 0 generates and trains in turn, 1 overlaps one step, n more.

    `order`: train the batches as they were asked (`in_order`), or whichever groups are complete
    first (`first_ready`). A group that would get older than `staleness_max` is waited for, or
    dropped and generated anew (`over_age`). When new weights come, running requests go on with
    their KV, go on with it computed anew, or end first under the old ones (`across_sync`).
    """

    steps: int = 4
    policies: tuple[str, ...] = ("orchestrl",)
    """``orchestrl``, ``proactive``, ``reactive``, ``oracle``, ``best_static``, or a layout:
    ``static:8xTP1``, ``static:4xTP1+1xTP4``; static policies assign requests when a batch begins,
    with ``/least_loaded`` behind them as instances have room."""
    fabrics: tuple[Literal["electrical", "static", "rfabric", "ideal"], ...] = ()
    """Each policy runs once over each: no circuit; circuits that stay; circuits that follow the
    work (``[fabric]``); or an electrical path without oversubscription, which only an emulated
    bench has. Its results are called ``orchestrl@rfabric``. Without, circuits stay as they are."""
    staleness_max: int = 1
    batches: Literal["overlap", "one_at_a_time"] = "overlap"
    """`one_at_a_time`: a batch begins only when the one before has ended, which is how one-step
    asynchronous training is published; `overlap` keeps engines busy through its tail."""
    prompts_per_step: int = 0
    """Of a batch; 0: as many as the workload's step has."""
    order: Literal["in_order", "first_ready"] = "in_order"
    over_age: Literal["wait", "drop"] = "wait"
    across_sync: Literal["continue", "recompute", "finish"] = "continue"
    sync: Literal["chain", "tree", "pairs"] = "chain"
    """How weights get to every node that generates: from the first node that trains to the first
    one and on along a chain or a tree, or in pairs, from every node that trains to one of them."""
    bucket: str = "4MiB"
    sync_retries: int = 2
    sync_timeout_s: float = 60.0
    replan_s: float = 2.0
    """Between two looks of the planner; it looks when a batch begins, too."""
    gain_min_pct: float = 5.0
    """Of the time that is left: what a switch must save beyond its cost."""
    balance_ms: float = 250.0
    moves_per_s_max: float = 2.0
    strategy: Literal["restart", "rebuild", "pool"] = "rebuild"
    switch_s: float = 0.0
    """What a switch costs before one was measured; 0: the planner's own guess."""
    stall_s: float = 10.0
    stage_timeout_s: float = 120.0
    train_timeout_s: float = 300.0
    checkpoint: bool = True
    """After every step; `harness run --resume RUN` goes on from the last one."""
    sync_faults: tuple[Literal["", "noop", "fail"], ...] = ()
    """By step: engines load the first weights again (`noop`), or the first transfer fails (`fail`).
    For tests; "" does nothing."""


class Check(Strict, frozen=True, kw_only=True):
    """A limit on a metric of the run. With `ratio_to`, on the ratio of two metrics' values."""

    metric: str
    stat: Literal["value", "p50", "p95", "p99", "min", "max"] = "value"
    ratio_to: str = ""
    at_least: float | None = None
    at_most: float | None = None


class Scenario(Strict, frozen=True, kw_only=True):
    """A whole scenario. `nccl_env` is limited to the allow-list of the collectives module."""

    question: str
    bench: str = ""
    """Path of the default bench file, relative to this file."""
    seed: int = 0
    repeats: int = 1
    timeout_s: float = 600.0
    shapes: dict[str, Shape] = {}
    fabric: Fabric = Fabric()
    generation: Generation | None = None
    training: Training | None = None
    steps: tuple[Collectives | Shift | Reconfigure | Generate | Rl, ...]
    checks: tuple[Check, ...] = ()
    nccl_env: dict[str, str] = {}
