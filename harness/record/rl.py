"""What the RL loop came to, for a reader: policies side by side, and what each did step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.model.documents import Decision, LoopStep, LoopSummary, Metric, RunSummary
from harness.model.metrics import metric_name, parse_metric
from harness.model.policies import BEST_STATIC
from harness.record.figures import DASH, figure, with_interval
from harness.record.section import Section

Metrics = Mapping[str, Metric]
Labels = Mapping[str, object]

POLICY_UNITS = (
    "samples/s, over: mean of n seeds ± half of the 95 % confidence interval (Student's t). over:",
    "ratio of samples/s with the same requests, geometric mean. step: s. forecast: how far off, of",
    "tokens left, median. switches: taken/refused/wasted; moves: of requests; in all repeats.",
    "idle: % of the time, the generation pool's/the training pool's.",
)
STEP_UNITS = (
    "s since the first step began. running: requests in engines, from a batch's begin to its end,",
    "and the most at once; queued: the most without a seat. 90 %, 100 %: so much of the batch had",
    "ended. took: from the end of the step before. age: samples by versions, 0/1/...",
)
STEPS = (
    *("step", "layout", "running", "most", "queued", "begun", "90 %", "100 %"),
    *("trained", "synced", "took", "age", "reward"),
)
DECISIONS = (
    *("policy", "at", "layout", "better", "outcome", "times", "stay", "change", "cost", "why"),
)
DECISION_UNITS = (
    "at, stay, change, cost: s. stay: expected to the end of all requests as it is; change: in the",
    "better layout, without the cost of the switch. times: in a row; figures of the last.",
)
SYNCS = ("policy", "n", "failed", "gathered", "rpc", "wire", "loaded", "total", "GB/s", "seen %")
SYNC_UNITS = (
    "means, ms: the trainer writes; asking and answering; first bucket to last one verified;",
    "engines load; all of it. GB/s: bytes, counted once however many receive them, over wire.",
    "seen: of a step, the next one's samples were there, and only the sync was waited for.",
)
PHASES = (
    *("axis", "op", "n", "bytes", "took", "p95", "skew", "GB/s", "gap announced", "gap", "off %"),
)
PHASE_UNITS = (
    "ms. took: from when its last rank came; skew: how long after its first one. gap: since the",
    "end of the communication before, in the same step on the same node, as it was and as it was",
    "announced; off: median of how far apart. bytes: of one rank.",
)
REWARDS = ("policy", "n", "first", "last", "rise", "by step")
BARS = " ▁▂▃▄▅▆▇█"


def rl_sections(summary: RunSummary) -> Iterator[Section]:
    """Yield the parts of the report that are about the RL loop; none where nothing trained."""
    metrics = summary.metrics
    for step in sorted({loop.step for loop in summary.loops}):
        loops = [loop for loop in summary.loops if loop.step == step]
        yield _policies(metrics, step, loops)
        yield from _timelines(loops)
        yield from _decisions(loops)
        yield from _rewards(metrics, loops)
        yield from _syncs(metrics, loops)
    if rows := list(_phases(metrics)):
        title = "Communications of training: as announced, and as they were"
        yield Section(title, PHASE_UNITS, PHASES, rows, (0, 1))


def _get(metrics: Metrics, base: str, labels: Labels) -> Metric | None:
    return metrics.get(metric_name(base, labels))


def _value(metrics: Metrics, base: str, labels: Labels) -> str:
    """Write a metric's value, with its confidence interval if it has one."""
    metric = _get(metrics, base, labels)
    return with_interval(metric.value, metric.plus_minus) if metric else DASH


def _count(metrics: Metrics, base: str, labels: Labels) -> str:
    metric = _get(metrics, base, labels)
    return f"{metric.value:,.0f}" if metric else DASH


# -- policies side by side ---------------------------------------------------------------------


def _policies(metrics: Metrics, step: int, loops: Sequence[LoopSummary]) -> Section:
    """One row for each policy, in the order they ran; gains over the first and the best static."""
    first = loops[0].policy
    ran = [loop.policy for loop in loops]
    bases = [first, *([BEST_STATIC] if BEST_STATIC in ran and first != BEST_STATIC else [])]
    over = [base for base in bases if len(ran) > 1]
    shared = any(_get(metrics, "rl.oracle_share_pct", _labels(loop)) for loop in loops)
    columns = (
        *("policy", "n", "samples/s", "step"),
        *(f"over {base}" for base in over),
        *(("% of oracle's",) if shared else ()),
        *("forecast", "switches", "moves", "idle"),
    )
    rows = [_policy(metrics, _labels(loop), over, shared=shared) for loop in loops]
    return Section(f"RL step {step}: policies", POLICY_UNITS, columns, rows)


def _labels(loop: LoopSummary) -> dict[str, object]:
    return {"step": loop.step, "policy": loop.policy}


def _policy(
    metrics: Metrics, labels: dict[str, object], over: Iterable[str], *, shared: bool
) -> tuple[str, ...]:
    speed = _get(metrics, "rl.samples_per_s", labels)
    switches = (f"rl.switches_{what}" for what in ("taken", "refused", "wasted"))
    idle = (_get(metrics, f"rl.{pool}_bubble_pct", labels) for pool in ("generation", "training"))
    forecast = _value(metrics, "forecast.error_pct", labels)
    return (
        str(labels["policy"]),
        str(speed.n) if speed else "0",
        _value(metrics, "rl.samples_per_s", labels),
        _value(metrics, "rl.step_s", labels),
        *(_value(metrics, "rl.gain", labels | {"over": base}) for base in over),
        *((_value(metrics, "rl.oracle_share_pct", labels),) if shared else ()),
        forecast if forecast == DASH else f"{forecast} %",
        "/".join(_count(metrics, base, labels) for base in switches),
        _count(metrics, "rl.moves", labels),
        "/".join(f"{pool.value:.0f}" if pool else DASH for pool in idle),
    )


# -- step by step ------------------------------------------------------------------------------


def _timelines(loops: Iterable[LoopSummary]) -> Iterator[Section]:
    """Yield the steps of each policy's last repeat; what the columns mean is said once."""
    units: Sequence[str] = STEP_UNITS
    for loop in loops:
        most = max((most for step in loop.steps for most in step.running), default=0)
        rows = [_step(step, most) for step in loop.steps]
        title = f"Steps of {loop.policy}, repeat {loop.repeat + 1}"
        yield Section(title, units, STEPS, rows, (0, 1, 2))
        units = ()


def _step(step: LoopStep, most: int) -> tuple[str, ...]:
    return (
        str(step.index),
        " > ".join(step.layouts) or DASH,
        bars(step.running, most),
        _most(step.running),
        _most(step.queued),
        _seconds(step.begin_s),
        _seconds(step.tail_begin_s),
        _seconds(step.batch_end_s),
        f"{_seconds(step.train_begin_s)}-{_seconds(step.train_end_s)}",
        _seconds(step.sync_end_s),
        _seconds(step.step_s),
        "/".join(map(str, step.staleness)),
        figure(step.reward),
    )


def bars(values: Sequence[float], most: float) -> str:
    """Draw values as bars, the highest of all being `most`; what is not 0 is seen."""
    top = len(BARS) - 1
    return (
        "".join(
            BARS[max(1, round(top * value / most)) if value else 0] for value in values
        ).rstrip()
        or DASH
    )


def _most(values: Sequence[int]) -> str:
    return f"{max(values):,}" if values else DASH


def _seconds(value_s: float | None) -> str:
    return DASH if value_s is None else f"{value_s:.1f}"


def _decisions(loops: Sequence[LoopSummary]) -> Iterator[Section]:
    """Yield what planners took and refused, and why, in each policy's last repeat."""
    rows = [_decision(loop.policy, one) for loop in loops for one in loop.decisions]
    stayed = [f"{loop.policy} {loop.stayed}" for loop in loops if loop.stayed]
    if not rows and not stayed:
        return
    at_best = f"looks at which the layout in force was the best: {', '.join(stayed) or 'none'}"
    lines = (*(DECISION_UNITS if rows else ()), at_best)
    yield Section("Switches taken and refused", lines, DECISIONS, rows, (0, 2, 3, 4, 9))


def _decision(policy: str, one: Decision) -> tuple[str, ...]:
    seconds = (_seconds(value_s) for value_s in (one.stay_s, one.change_s, one.cost_s))
    at = _seconds(one.at_s)
    return policy, at, one.layout, one.best, one.outcome, str(one.count), *seconds, one.reason


def _rewards(metrics: Metrics, loops: Sequence[LoopSummary]) -> Iterator[Section]:
    learned = [loop for loop in loops if _get(metrics, "rl.reward_last", _labels(loop))]
    if learned:
        line = "mean over all samples of a step; n seeds; by step: of the last repeat, highest 1"
        rows = [_reward(metrics, loop) for loop in learned]
        yield Section("Reward", (line,), REWARDS, rows, (0, 5))


def _reward(metrics: Metrics, loop: LoopSummary) -> tuple[str, ...]:
    labels = _labels(loop)
    last = metrics[metric_name("rl.reward_last", labels)]
    found = (_value(metrics, f"rl.reward_{what}", labels) for what in ("first", "last", "rise"))
    by_step = [step.reward or 0.0 for step in loop.steps]
    return loop.policy, str(last.n), *found, bars(by_step, max(1.0, *by_step))


# -- weights and training ----------------------------------------------------------------------


def _syncs(metrics: Metrics, loops: Sequence[LoopSummary]) -> Iterator[Section]:
    rows = [_sync(metrics, loop) for loop in loops if _get(metrics, "sync.failed", _labels(loop))]
    if rows:
        yield Section("Weight syncs", SYNC_UNITS, SYNCS, rows)


def _sync(metrics: Metrics, loop: LoopSummary) -> tuple[str, ...]:
    labels = _labels(loop)
    made = _get(metrics, "sync.s", labels)
    return (
        loop.policy,
        str(made.n) if made else "0",
        _count(metrics, "sync.failed", labels),
        *(_value(metrics, f"sync.{part}_ms", labels) for part in ("gather", "rpc", "wire", "load")),
        figure(made.value * 1e3) if made else DASH,
        _value(metrics, "sync.gb_per_s", labels),
        _value(metrics, "sync.visible_pct", labels),
    )


def _phases(metrics: Metrics) -> Iterator[tuple[str, ...]]:
    """Yield a row for each axis and operation; of several rl steps, one after the other."""
    for name, took in metrics.items():
        base, labels = parse_metric(name)
        if base == "train.phase_ms":
            yield (
                labels["axis"],
                labels["op"],
                str(took.n),
                _count(metrics, "train.phase_bytes", labels),
                figure(took.value),
                figure(took.p95),
                _value(metrics, "train.skew_ms", labels),
                _value(metrics, "train.phase_gb_per_s", labels),
                _value(metrics, "train.expected_gap_ms", labels),
                _value(metrics, "train.gap_ms", labels),
                _value(metrics, "train.gap_error_pct", labels),
            )
