"""The names of metrics: one table that `run.json`, checks, reports and exports share. Pure.

A name is a base and, for all but totals, labels: ``reconfigure.dark_ms[step=3]``,
``collective.all_reduce.busbw_gb_per_s[path=ring,size=1048576,ranks=4]``. A person may leave labels
out and write a size as ``4MiB``; a pattern matches every metric that has its base and its labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from harness.model.scenario import Op
from harness.model.schema import did_you_mean
from harness.model.sizes import parse_size
from harness.model.streams import STAGES, SWITCH_STAGES

Statistic = Literal["p50", "max", "sum", "mean", "rate", "geometric"]
"""`rate`: the harmonic mean, which for rates of one size is size over mean time. `geometric`: the
geometric mean, as ratios are averaged. Times and rates of collectives are means because
nccl-tests' are; stages of switches are because means add up."""


@dataclass(frozen=True)
class Quantity:
    """What a metric's samples are, and which statistic is its headline `value`."""

    unit: str
    value: Statistic
    labels: tuple[str, ...]
    text: str
    interval: bool = False
    """`plus_minus` is half of the 95 % confidence interval of `value` over seeds, by Student's t:
    samples are means of whole repeats of a loop, for steps of one loop depend on each other."""


COLLECTIVE_LABELS = ("path", "size", "ranks", "group")
"""`group` only where it is not all ranks."""
STEP = ("step",)
SWITCH = ("step", "from", "to", "strategy")
"""Of a switch of layouts, such as ``[step=1,from=4xTP1,to=2xTP2,strategy=rebuild]``."""
MIGRATION = ("step", "by")
"""`by`: the request's KV was sent (``kv``) or computed anew (``recompute``)."""
GENERATE = ("step", "instance")
"""Over a whole step, or of one instance (``g0:0-1``) while it generated; never both."""
LOOP = ("step", "policy")
"""Of an rl step under one policy, such as ``[step=0,policy=static:8xTP1]``. `step` is the step's
place in the scenario, the same in all repeats: they are pooled."""
ANY_STEP = ("step", "policy")
"""The same of every kind of step; `policy` only of an rl step."""
GAIN = (*LOOP, "over")
"""`over`: the first policy of the step, or ``best_static``."""
PHASE = ("step", "axis", "op")
"""Of training: along which axis ranks communicated (``dp``, ``tp``, ``pp``, ``ep``), and how."""
KIND = (*LOOP, "kind")
"""`policy` is an arm, such as ``orchestrl@rfabric``; `kind` of its traffic: train, gather, sync."""
IN_A_STEP = (*LOOP, "phase")
"""`phase` of a step: train, gather (the trainer writes weights), sync (on the wire), load, step."""
FASTER = (*IN_A_STEP, "over")
"""`over`: the same policy over another network, ``POLICY@electrical`` or ``POLICY@ideal``."""

QUANTITIES: dict[str, Quantity] = {
    "reconfigure.dark_ms": Quantity(
        "ms", "p50", STEP, "last good to first good packet on a circuit that moves"
    ),
    "reconfigure.cost_ms": Quantity("ms", "p50", STEP, "intent to steady"),
    "reconfigure.device_ms": Quantity("ms", "p50", STEP, "waiting for switches and their light"),
    "reconfigure.link_ms": Quantity("ms", "p50", STEP, "from light to the expected far end"),
    "reconfigure.communicator_ms": Quantity("ms", "p50", STEP, "the traffic's own time"),
    "reconfigure.overhead_ms": Quantity(
        "ms", "p50", STEP, "ours: cost less device, link and communicator"
    ),
    "reconfigure.kept_lost": Quantity("", "sum", STEP, "packets lost on circuits that stay"),
    "reconfigure.refused": Quantity("", "sum", STEP, "changes not made: they would not have paid"),
    "switch.total_ms": Quantity("ms", "mean", SWITCH, "intent to steady"),
    "switch.blackout_ms": Quantity(
        "ms", "p50", SWITCH, "last token before to first token after, where it changed"
    ),
    "switch.residual_ms": Quantity(
        "ms", "mean", SWITCH, "total less all stages: messages, and waiting for nobody's work"
    ),
    "switch.before_tokens_per_s": Quantity(
        "tokens/s", "p50", SWITCH, "up to 2 s before the intent"
    ),
    "switch.during_tokens_per_s": Quantity("tokens/s", "p50", SWITCH, "intent to steady"),
    "switch.after_tokens_per_s": Quantity("tokens/s", "p50", SWITCH, "up to 2 s after steady"),
    "switch.carried": Quantity("", "sum", SWITCH, "requests that lived through a switch"),
    "switch.recomputed_tokens": Quantity(
        "tokens", "sum", SWITCH, "context computed anew after switches"
    ),
    "switch.switched": Quantity("", "sum", SWITCH, "switches made"),
    "switch.refused": Quantity("", "sum", SWITCH, "switches refused; nothing had changed"),
    "switch.rolled_back": Quantity("", "sum", SWITCH, "switches that failed and were undone"),
    "switch.lost": Quantity("", "sum", SWITCH, "switches that failed and could not be undone"),
    "migration.ms": Quantity("ms", "p50", MIGRATION, "withdrawn to the first token at the target"),
    "migration.expected_ms": Quantity("ms", "p50", MIGRATION, "the same, as it was forecast"),
    "migration.send_ms": Quantity("ms", "p50", MIGRATION, "sending KV"),
    "migration.gb_per_s": Quantity("GB/s", "rate", MIGRATION, "KV over the time to send it"),
    "migration.kv": Quantity("", "sum", STEP, "requests moved with their KV"),
    "migration.recomputed": Quantity("", "sum", STEP, "requests moved, KV computed anew"),
    "migration.failed": Quantity("", "sum", STEP, "requests that did not get to their target"),
    "generate.tokens_per_s": Quantity("tokens/s", "mean", GENERATE, "tokens over time"),
    "generate.tokens": Quantity("tokens", "sum", STEP, "tokens delivered"),
    "generate.requests": Quantity("", "sum", STEP, "requests that ended"),
    "generate.refused": Quantity("", "sum", STEP, "requests that could run nowhere"),
    "generate.lost": Quantity("", "sum", STEP, "tokens produced and not delivered"),
    "generate.doubled": Quantity("", "sum", STEP, "tokens delivered twice"),
    "generate.preemptions": Quantity("", "sum", STEP, "requests put off for want of KV blocks"),
    "generate.kv_use_pct": Quantity("%", "mean", ("instance",), "KV blocks in use"),
    "generate.waiting": Quantity("", "mean", ("instance",), "requests queued in an instance"),
    "generate.given_up": Quantity("", "sum", (), "instances that died or stalled"),
    "bench.cpu_waited_pct": Quantity(
        "%", "mean", ANY_STEP, "of a step's time, that in which a task waited for a CPU"
    ),
    "clock.bound_us": Quantity("us", "max", ("agent",), "bound of the clock offset"),
    "collective.wrong": Quantity("", "sum", (), "wrong elements over all verified rows"),
}
"""Metrics with a fixed base; those of each operation and of each stage are added below."""

RL_QUANTITIES: dict[str, Quantity] = {
    "rl.samples_per_s": Quantity("1/s", "mean", LOOP, "samples trained on over time", True),
    "rl.tokens_per_s": Quantity("tokens/s", "mean", LOOP, "their tokens over time", True),
    "rl.gain": Quantity("", "geometric", GAIN, "samples/s over another's, seed by seed", True),
    "rl.oracle_share_pct": Quantity(
        "%", "mean", LOOP, "gain over best static, as a share of the oracle's", True
    ),
    "rl.step_s": Quantity("s", "mean", LOOP, "end of one training step to that of the next"),
    "sync.visible_pct": Quantity(
        "%", "mean", LOOP, "of a step: it was trained, the next one's samples there, weights not"
    ),
    "rl.batch_s": Quantity("s", "mean", LOOP, "first request of a batch to its last sample"),
    "rl.tail_s": Quantity("s", "mean", LOOP, "90 % of a batch to its last sample"),
    "rl.train_s": Quantity("s", "mean", LOOP, "training on a batch"),
    "rl.reward": Quantity("", "mean", LOOP, "mean reward of a training step's samples"),
    "rl.reward_first": Quantity("", "mean", LOOP, "that of the first step", True),
    "rl.reward_last": Quantity("", "mean", LOOP, "that of the last step", True),
    "rl.reward_rise": Quantity("", "mean", LOOP, "last less first", True),
    "rl.staleness_max": Quantity("", "max", LOOP, "versions between a sample and its use"),
    "rl.mixed": Quantity("", "sum", LOOP, "samples with tokens of several versions"),
    "rl.dropped": Quantity("", "sum", LOOP, "samples that got too old, and were made anew"),
    "rl.switches_taken": Quantity("", "sum", LOOP, "switches of layouts made"),
    "rl.switches_refused": Quantity("", "sum", LOOP, "planned and not made: not worth it"),
    "rl.switches_wasted": Quantity("", "sum", LOOP, "made, and slower than staying"),
    "rl.moves": Quantity("", "sum", LOOP, "requests moved off instances that were behind"),
    "rl.generation_bubble_pct": Quantity("%", "mean", LOOP, "generating nodes with nothing to do"),
    "rl.training_bubble_pct": Quantity("%", "mean", LOOP, "training nodes with nothing to do"),
    "forecast.error_pct": Quantity("%", "p50", LOOP, "of the tokens left in a batch"),
    "forecast.longest_error_pct": Quantity("%", "p50", LOOP, "of the longest response's rest"),
    "forecast.covered_pct": Quantity("%", "mean", LOOP, "requests within their 80 % interval"),
    "forecast.total_covered_pct": Quantity("%", "mean", LOOP, "totals within theirs"),
    "planner.solve_ms": Quantity("ms", "p50", LOOP, "the planner's own time"),
    "sync.s": Quantity("s", "mean", LOOP, "weights gathered, sent, and in all engines"),
    "sync.gather_ms": Quantity("ms", "mean", LOOP, "the trainer writes them"),
    "sync.rpc_ms": Quantity("ms", "mean", LOOP, "asking and answering"),
    "sync.wire_ms": Quantity("ms", "mean", LOOP, "first bucket sent to last one verified"),
    "sync.load_ms": Quantity("ms", "mean", LOOP, "engines load them"),
    "sync.gb_per_s": Quantity("GB/s", "rate", LOOP, "bytes, counted once, over wire time"),
    "sync.failed": Quantity("", "sum", LOOP, "attempts that failed"),
    "train.phase_ms": Quantity("ms", "mean", PHASE, "a communication, from its last rank on"),
    "train.skew_ms": Quantity("ms", "mean", PHASE, "its last rank came so long after its first"),
    "train.phase_bytes": Quantity("bytes", "mean", PHASE, "its size, as nccl-tests counts it"),
    "train.phase_gb_per_s": Quantity("GB/s", "rate", PHASE, "size over time"),
    "train.gap_ms": Quantity("ms", "mean", PHASE, "since the end of the one before, as it was"),
    "train.expected_gap_ms": Quantity("ms", "mean", PHASE, "the same, as announced"),
    "train.gap_error_pct": Quantity("%", "p50", PHASE, "how far one is off the other"),
}
"""Those of the RL loop. A policy's are never added up with another's."""

FABRIC_QUANTITIES: dict[str, Quantity] = {
    "fabric.changes": Quantity("", "sum", LOOP, "changes of circuits made, degraded ones too"),
    "fabric.change_ms": Quantity("ms", "p50", LOOP, "decided to the last route"),
    "fabric.device_ms": Quantity("ms", "p50", LOOP, "of it, switches and their light"),
    "fabric.degraded": Quantity("", "sum", LOOP, "changes of which a part stayed electrical"),
    "fabric.failed": Quantity("", "sum", LOOP, "changes that could not begin"),
    "fabric.kept": Quantity("", "sum", LOOP, "decisions to leave circuits as they are"),
    "fabric.dropped": Quantity("", "sum", LOOP, "decided, and its window was over"),
    "fabric.broken": Quantity("", "sum", LOOP, "parts that broke, or ToRs that did not steer"),
    "fabric.solve_ms": Quantity("ms", "p50", LOOP, "the controller's own time for a decision"),
    "fabric.took_ms": Quantity("ms", "mean", KIND, "traffic of a kind under way, work in it too"),
    "fabric.announced_bytes": Quantity("bytes", "mean", KIND, "what was to cross ToRs"),
    "fabric.measured_over_announced": Quantity("", "mean", KIND, "counted at ToRs, over that"),
    "fabric.circuits_share_pct": Quantity("%", "mean", KIND, "of the bytes counted, by circuits"),
    "fabric.predicted_error_pct": Quantity(
        "%", "p50", KIND, "how far the time was off, where a decision was about this kind alone"
    ),
    "fabric.phase_ms": Quantity("ms", "mean", IN_A_STEP, "of a training step's parts", True),
    "fabric.gain": Quantity(
        "", "geometric", FASTER, "that network's time over this one's, step by step", True
    ),
}
"""Those of circuits that follow the work. Intervals of phases and gains are over the steps of all
repeats; arms are compared step by step, by repeat and index."""

OF_AN_OPERATION: dict[str, Quantity] = {
    "busbw_gb_per_s": Quantity(
        "GB/s", "rate", COLLECTIVE_LABELS, "bus bandwidth as nccl-tests defines it"
    ),
    "algbw_gb_per_s": Quantity("GB/s", "rate", COLLECTIVE_LABELS, "size over time"),
    "time_us": Quantity("us", "mean", COLLECTIVE_LABELS, "one iteration, mean of ranks"),
    "time_max_us": Quantity("us", "mean", COLLECTIVE_LABELS, "one iteration, slowest rank"),
    "wrong": Quantity("", "sum", COLLECTIVE_LABELS, "wrong elements"),
}

_NAME = re.compile(r"([a-z0-9_.]+)(?:\[([^\[\]]*)\])?", re.ASCII)


def quantities() -> dict[str, Quantity]:
    """Return every base a metric can have."""
    operations = {
        f"collective.{op}.{name}": quantity
        for op in get_args(Op)
        for name, quantity in OF_AN_OPERATION.items()
    }
    stages = {
        f"reconfigure.stage.{stage}_ms": Quantity(
            "ms", "p50", STEP, f"from the stage before it to {stage}"
        )
        for stage in STAGES[1:]
    }
    stages |= {
        f"switch.stage.{stage}_ms": Quantity("ms", "mean", SWITCH, f"in {stage}")
        for stage in SWITCH_STAGES
    }
    return QUANTITIES | RL_QUANTITIES | FABRIC_QUANTITIES | operations | stages


def metric_name(base: str, labels: Mapping[str, object] | None = None) -> str:
    """Write a metric's name."""
    if not labels:
        return base
    return f"{base}[{','.join(f'{key}={value}' for key, value in labels.items())}]"


def parse_metric(text: str) -> tuple[str, dict[str, str]]:
    """Split a name into base and labels; a size such as ``4MiB`` becomes bytes.

    Raises `ValueError`, saying what a name looks like.
    """
    found = _NAME.fullmatch(text)
    if not found:
        raise ValueError(f'{text!r} is not a metric, such as "reconfigure.dark_ms[step=1]"')
    labels: dict[str, str] = {}
    for pair in (found[2] or "").split(",") if found[2] else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value) or key in labels:
            raise ValueError(f"{text!r}: labels are written [name=value,...], each name once")
        labels[key] = str(parse_size(value)) if key == "size" else value
    return found[1], labels


def metric_problem(text: str) -> str | None:
    """Say why no run can ever have this metric, or None."""
    try:
        base, labels = parse_metric(text)
    except ValueError as error:
        return str(error)
    known = quantities()
    if base not in known:
        return f"no metric {base!r}{did_you_mean(base, known)}"
    for key in labels:
        if key not in known[base].labels:
            return f"{base} has no label {key!r}{did_you_mean(key, known[base].labels)}"
    return None


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern stands for: itself where it exists, else all it fits.

    Raises `ValueError` as `parse_metric`.
    """
    base, labels = parse_metric(pattern)
    exact = metric_name(base, labels)
    fits = []
    for name in names:
        if name == exact:
            return [name]
        other, have = parse_metric(name)
        if other == base and labels.items() <= have.items():
            fits.append(name)
    return fits
