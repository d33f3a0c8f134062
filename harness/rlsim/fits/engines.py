"""What generation says: stages of switches of layouts, KV that is sent, and how long steps take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from harness.errors import UsageError
from harness.model.layout import Layout, parse_layout
from harness.model.profile import costs_of
from harness.model.steptime import StepCosts, step_ns
from harness.rlsim.fits.control import MESSAGE
from harness.rlsim.fits.held import Held
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Figures, Model, Row
from harness.rlsim.fits.syncs import IDLE_S, copies
from harness.rlsim.fits.wires import Loads, Networks

TABLE = "generation."
TEARDOWN, WEIGHTS = TABLE + "teardown_s", TABLE + "weights_fixed_s"
WEIGHTS_RATE, SHARE = TABLE + "weights_gb_per_s", TABLE + "step_share"
KV, KV_RATE = TABLE + "kv_fixed_s", TABLE + "kv_gb_per_s"
ALONE = {
    "processes": TABLE + "processes_s",
    "groups": TABLE + "groups_s",
    "kv_cache": TABLE + "kv_cache_s",
}
"""Stages that one figure says all of."""

Stamped = Mapping[str, Any]


def rows(measured: Measured) -> Iterator[Row]:
    """Yield all of it."""
    yield from _switches(measured)
    yield from _sent(measured)
    yield from _steps(measured)


# -- switches of layouts ---------------------------------------------------------------------------


def _switches(measured: Measured) -> Iterator[Row]:
    """Yield the stages of each; nodes do them side by side, unless they switch one by one."""
    held = Held()
    for event in measured.events:
        if event.stream == "engine":
            held.take(event.data)
        elif event.stream == "parallelism" and event.data["outcome"] == "switched":
            yield from _stages(measured, event.data, held)


def _stages(measured: Measured, row: Stamped, held: Held) -> Iterator[Row]:
    waves = len(row["nodes"]) if row["order"] == "rolling" else 1
    models: dict[str, tuple[Model, tuple[str, ...]]] = {
        stage: (_alone(figure, waves), (figure,)) for stage, figure in ALONE.items()
    }
    models["prepare"] = (lambda figures: figures[MESSAGE] / 1e6, (MESSAGE,))
    models["teardown"] = (
        lambda figures: waves * (figures[MESSAGE] / 1e6 + figures[TEARDOWN]),
        (MESSAGE, TEARDOWN),
    )
    sizes_bytes = [held.of_rank_bytes(node) for node in row["nodes"]]
    if waves == 1:
        sizes_bytes = [max(sizes_bytes, default=0)]
    copying = copies(measured, sizes_bytes, WEIGHTS, WEIGHTS_RATE)
    models["weights"] = (copying, (WEIGHTS, WEIGHTS_RATE))
    alike = tuple(round(size_bytes, -4) for size_bytes in sizes_bytes)
    for stage, (model, needs) in models.items():
        if took_ms := row["stages"].get(stage):
            key = (waves, alike if stage == "weights" else ())
            yield Row(f"switch.{stage}", measured.name, key, took_ms / 1e3, needs, model)


def _alone(figure: str, waves: int) -> Model:
    return lambda figures: waves * figures[figure]


# -- KV from engine to engine ----------------------------------------------------------------------


def _sent(measured: Measured) -> Iterator[Row]:
    """Yield each KV that was sent; hosts and the network work at once."""
    networks = Networks(measured)
    for t_ns, row in measured.stamped("migration"):
        size_bytes, send_ms = row["sent_bytes"], row["send_ms"]
        if row["by"] != "kv" or row["outcome"] != "moved" or not size_bytes or not send_ms:
            continue
        source, target = (row[end].partition(":")[0] for end in ("source", "target"))
        wires = networks.during("", t_ns, t_ns)
        if wires is None or measured.has_rails:
            continue
        if loads := wires.loads([(source, target, size_bytes)]):
            yield _one_sent(measured, size_bytes, send_ms / 1e3, loads)


def _one_sent(measured: Measured, size_bytes: int, took_s: float, loads: Loads) -> Row:
    def model(figures: Figures) -> float:
        flowing_s = loads.takes_s(figures, IDLE_S)
        return figures[KV] + max(size_bytes / 1e9 / figures[KV_RATE], flowing_s)

    needs = (KV, KV_RATE, *loads.needs)
    return Row("kv", measured.name, (size_bytes, loads), took_s, needs, model)


# -- steps -----------------------------------------------------------------------------------------


class _Looks(NamedTuple):
    """What is known of an instance between looks at it."""

    layout: Layout
    kv_tokens: int
    """Of its whole cache."""


def _steps(measured: Measured) -> Iterator[Row]:
    """Yield how many times the profile's time steps took, while as many requests ran throughout."""
    engine = measured.scenario.generation
    if measured.profile is None or engine is None or engine.engine != "paced":
        return
    instances: dict[str, _Looks] = {}
    last: dict[str, Stamped] = {}
    costs: dict[Layout, StepCosts | None] = {}
    for event in measured.events:
        row = event.data
        if event.stream == "engine":
            layout = parse_layout(f"1x{row['layout']}")
            instances[row["instance"]] = _Looks(layout, row["blocks"] * row["block_tokens"])
            last.pop(row["instance"], None)
        elif event.stream == "progress" and row["instance"] in instances:
            name = row["instance"]
            looks = instances[name]
            if looks.layout not in costs:
                costs[looks.layout] = _costs(measured, looks.layout)
            found = costs[looks.layout]
            if found is not None and (before := last.get(name)):
                ratio = _ratio(before, row, looks, found) * engine.speed
                if ratio:
                    model, key = _share, str(looks.layout)
                    yield Row("decode", measured.name, key, ratio, (SHARE,), model)
            last[name] = row


def _share(figures: Figures) -> float:
    return figures[SHARE]


def _costs(measured: Measured, layout: Layout) -> StepCosts | None:
    assert measured.profile is not None
    try:
        return costs_of(measured.profile, layout)
    except UsageError:
        return None


def _ratio(before: Stamped, row: Stamped, looks: _Looks, costs: StepCosts) -> float:
    """Return measured over expected time of a token; 0 where it was not decoding only."""
    running, tokens = row["running"], row["generated_tokens"]
    steady = running and running == before["running"] and not (row["waiting"] or before["waiting"])
    took_ns = row["t1_ns"] - row["t0_ns"]
    if not steady or tokens < 4 * running or row["preemptions"] or took_ns <= 0:
        return 0.0
    used_pct = (before["kv_use_pct"] + row["kv_use_pct"]) / 2
    kv_tokens = round(used_pct / 100 * looks.kv_tokens)
    return float(took_ns / (tokens / running * step_ns(costs, running, kv_tokens)))
