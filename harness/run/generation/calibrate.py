"""Calibration: how long steps take on one node, for each layout that an instance can have there.

One instance at a time, alone on the node: prepared (an impossible layout is left out with its
reason), built in the resident processes, measured point by point, torn down. Every point is
recorded as it is measured, with all of its steps; the result is a latency profile. It is the one
that was known before, if any, with tables of what was measured.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from harness.clock import NS_PER_S
from harness.errors import HarnessError, StepFailed, UsageError
from harness.model.calibration import (
    STEPS_MIN,
    Grid,
    Point,
    Room,
    fitting,
    point_of,
    table_of,
    with_tables,
)
from harness.model.layout import (
    Layout,
    kv_bytes_per_gpu_token,
    weight_bytes_per_gpu,
)
from harness.model.placement import Instance, place
from harness.model.profile import Figure, GpuFigures, Profile, Source, Table
from harness.model.shape import ModelShape
from harness.run.session import Session
from harness.tasks import to_the_end
from harness.wire.asks import CommandFailed
from harness.wire.generation import (
    Build,
    Built,
    Capacity,
    CloseGeneration,
    EngineSpec,
    GenerationOpen,
    MeasureSteps,
    Memory,
    OpenGeneration,
    Prepare,
    Prepared,
    StepTimes,
    TearDown,
    Torn,
)
from harness.wire.messages import Done, Message

R = TypeVar("R", bound=Message)

CLOSE_NS = 30 * NS_PER_S
PREFILLS_SHARE = 2
"""A prompt is prefilled this many times less often than a batch decodes: it takes longer."""
BURST_STEPS = 32
CONTEXT_MIN_TOKENS = 2
"""Of a sequence that decodes: a prompt of one token, and one that it produced."""
CANNOT = ("Infeasible", "UsageError", "Refused")
"""Failures that speak of a layout, not of the bench."""
TOLD_MAX = 4


@dataclass(frozen=True, kw_only=True)
class CalibrationAsked:
    """What is to be measured: on `node`, `layouts` of one instance (none named: TP 1, 2, 4 ..).

    `known` is the profile to start from, `origin` begins the description of the new source.
    """

    spec: EngineSpec
    node: str
    gpus: int
    """Real or emulated; 0: what its agent finds."""
    layouts: tuple[Layout, ...]
    grid: Grid
    steps: int
    timeout_ns: int
    """Of each command: starting processes, building an engine, measuring a point."""
    origin: str
    known: Profile | None = None


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The profile; its new tables; and per layout what was left out, and what is doubtful."""

    profile: Profile
    tables: tuple[Table, ...]
    left_out: Mapping[str, tuple[str, ...]]
    doubts: Mapping[str, tuple[str, ...]]


@dataclass
class _Found:
    """What is known of the node after its layouts were measured."""

    tables: list[Table] = field(default_factory=list)
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    memory_bytes: int = 0
    workspace_bytes: int = 0
    basis: str = ""


async def calibrate(session: Session, asked: CalibrationAsked) -> Calibrated:
    """Measure; raises `UsageError` where no layout can be, and what the node's failures are."""
    bench, node = session.bench, asked.node
    gpus = asked.gpus or bench.hellos[node].gpus
    if not gpus:
        raise UsageError(f"{node} has no GPU; on a CPU say how many stand for one: emulated_gpus")
    opening = OpenGeneration(spec=asked.spec, gpus=gpus, address=bench.topology.nodes[node].address)
    async with _closing(session, node):
        opened = await bench.ask(node, opening, GenerationOpen, asked.timeout_ns)
        return await _Calibration(session, asked, opened, gpus).run()


@asynccontextmanager
async def _closing(session: Session, node: str) -> AsyncIterator[None]:
    """End the node's engines when the body is left; what ended the body outranks a failure here."""
    try:
        yield
    except BaseException:
        with suppress(HarnessError):
            await to_the_end(session.bench.ask(node, CloseGeneration(), Done, CLOSE_NS))
        raise
    await session.bench.ask(node, CloseGeneration(), Done, CLOSE_NS)


class _Calibration:
    """One calibration, with the node's engines open."""

    def __init__(
        self, session: Session, asked: CalibrationAsked, opened: GenerationOpen, gpus: int
    ) -> None:
        self._session, self._asked, self._opened, self._gpus = session, asked, opened, gpus
        self._shape = _shape(asked, opened)
        self._found = _Found()

    async def run(self) -> Calibrated:
        """Measure every layout and put the profile together."""
        for text in self._opened.warnings:
            self._note(text, "warning")
        found = self._found
        for layout in self._asked.layouts or _powers_of_two(self._gpus):
            name = str(layout)
            try:
                await self._layout(layout)
            except UsageError as error:
                found.left_out[name] = (str(error), *found.left_out.get(name, ()))
            for text in (*found.left_out.get(name, ()), *_shortly(found.doubts.get(name, ()))):
                self._note(f"{name}: {text}", "warning")
        if not found.tables:
            reasons = "; ".join(f"{name}: {texts[0]}" for name, texts in found.left_out.items())
            raise UsageError(f"no layout could be measured on {self._asked.node}: {reasons}")
        profile = with_tables(self._known(), found.tables, self._source())
        return Calibrated(
            profile=profile,
            tables=profile.tables[: len(found.tables)],
            left_out=found.left_out,
            doubts=found.doubts,
        )

    async def _layout(self, layout: Layout) -> None:
        """Build an instance, measure it and tear it down. `UsageError`: it cannot be."""
        (instance,) = place(layout, {self._asked.node: self._gpus})[self._asked.node]
        memory, capacity = await self._build(instance)
        self._weigh(layout, memory, capacity)
        gone = TearDown(instances=(instance.name,), strategy="rebuild")
        try:
            await self._table(layout, instance, capacity)
        except UsageError:
            await self._ask(gone, Torn)
            raise
        await self._ask(gone, Torn)

    async def _table(self, layout: Layout, instance: Instance, capacity: Capacity) -> None:
        room = Room(
            sequences_max=capacity.sequences_max,
            step_max_tokens=capacity.step_max_tokens,
            length_max_tokens=capacity.length_max_tokens,
            blocks=capacity.blocks,
            block_tokens=capacity.block_tokens,
        )
        grid, left = fitting(self._asked.grid, room, min(self._asked.steps, BURST_STEPS))
        self._found.left_out[str(layout)] = tuple(left)
        decode, prefill = await self._measure(instance, grid)
        table, doubts = table_of(layout, grid, decode, prefill, "")
        self._found.tables.append(table)
        self._found.doubts[str(layout)] = tuple(doubts)

    async def _build(self, instance: Instance) -> tuple[tuple[Memory, ...], Capacity]:
        prepare = Prepare(instances=(instance,), strategy="rebuild")
        prepared = await self._ask(prepare, Prepared)
        built = await self._ask(Build(instances=(instance,), strategy="rebuild"), Built)
        capacity, facts = built.capacities[instance.name], self._opened.facts
        self._session.record.event(
            "engine",
            {
                "instance": instance.name,
                "node": self._asked.node,
                "gpus": list(instance.gpus),
                "layout": str(instance.layout).removeprefix("1x"),
                "engine": facts.get("engine", ""),
                "version": facts.get("version", ""),
                "device": facts.get("device", ""),
                "blocks": capacity.blocks,
                "block_tokens": capacity.block_tokens,
                "weights_bytes": capacity.weights_bytes,
            },
        )
        return prepared.memory, capacity

    async def _measure(
        self, instance: Instance, grid: Grid
    ) -> tuple[dict[tuple[int, int], Point], dict[int, Point]]:
        """Measure every point; a first one, unrecorded, is for what only the first step takes."""
        steps = self._asked.steps
        await self._times(instance, grid.batch[0], grid.context_tokens[0], 0, STEPS_MIN)
        decode = {
            (batch, tokens): await self._point(instance, batch, tokens, 0, steps)
            for batch in grid.batch
            for tokens in grid.context_tokens
        }
        prompts = max(STEPS_MIN, steps // PREFILLS_SHARE)
        await self._times(instance, 0, 0, grid.prefill_tokens[0], 1)
        prefill = {
            tokens: await self._point(instance, 0, 0, tokens, prompts)
            for tokens in grid.prefill_tokens
        }
        return decode, prefill

    async def _point(
        self, instance: Instance, batch: int, context: int, prefill: int, steps: int
    ) -> Point:
        """Measure one point and record it.

        Contexts grow while they decode, so they begin half of a burst's steps before the context.
        """
        times_ns: list[int] = []
        while len(times_ns) < steps:
            burst = min(BURST_STEPS, steps - len(times_ns))
            begin = context - burst // 2 if batch else 0
            times_ns += await self._times(instance, batch, begin, prefill, burst)
        point = point_of(times_ns)
        self._session.record.event(
            "calibration",
            {
                "layout": str(instance.layout),
                "batch": batch,
                "context_tokens": context,
                "prefill_tokens": prefill,
                "step_us": point.us,
                "spread_pct": point.spread_pct,
                "times_ns": times_ns,
            },
        )
        return point

    async def _times(
        self, instance: Instance, batch: int, context: int, prefill: int, steps: int
    ) -> tuple[int, ...]:
        measure = MeasureSteps(
            instance=instance.name,
            batch=batch,
            context_tokens=max(context, CONTEXT_MIN_TOKENS) if batch else 0,
            prefill_tokens=prefill,
            steps=steps,
        )
        times_ns = (await self._ask(measure, StepTimes)).times_ns
        if len(times_ns) < steps:
            what = f"batch {batch} at {context} tokens" if batch else f"prefill {prefill}"
            raise StepFailed(f"{instance.name}: {what}: {len(times_ns)} of {steps} steps were made")
        return times_ns

    async def _ask(self, body: Message, reply: type[R]) -> R:
        """Ask the node; raises `UsageError` where it says that this layout cannot."""
        node, bench = self._asked.node, self._session.bench
        try:
            return await bench.ask(node, body, reply, self._asked.timeout_ns)
        except CommandFailed as error:
            if (failure := error.failures[node]).error in CANNOT:
                raise UsageError(failure.text) from error
            raise

    def _weigh(self, layout: Layout, memory: tuple[Memory, ...], capacity: Capacity) -> None:
        """Account for a GPU's memory: what is not of weights and KV is workspace, at most."""
        weights = weight_bytes_per_gpu(layout, self._shape)
        kv_tokens = capacity.blocks * capacity.block_tokens // layout.dp
        held = weights + kv_tokens * kv_bytes_per_gpu_token(layout, self._shape)
        found = self._found
        total = max((row.total_bytes for row in memory), default=0)
        found.basis = next((row.basis for row in memory), "what its engines held")
        found.memory_bytes = max(found.memory_bytes, total, held)
        found.workspace_bytes = max(found.workspace_bytes, total - held)

    # -- the profile --------------------------------------------------------------------

    def _known(self) -> Profile:
        """Return what the new tables are added to."""
        if self._asked.known is not None:
            return self._asked.known
        found, facts, node = self._found, self._opened.facts, self._asked.node
        model = facts.get("model") or self._asked.spec.model or "tiny random model"
        date = self._date()
        what = f"{node}: memory of a GPU, {found.basis}; workspace is what weights and KV leave"
        return Profile(
            model=model.rstrip("/").rpartition("/")[2],
            gpu=GpuFigures(
                name=facts.get("device", "unknown"),
                memory_gb=Figure(found.memory_bytes / 1e9, "node"),
                workspace_gb=Figure(found.workspace_bytes / 1e9, "node"),
            ),
            shape=msgspec.structs.replace(self._shape, source="config"),
            sources={
                "config": Source(what=f"config.json of {model}", date=date),
                "node": Source(what=what, date=date),
            },
        )

    def _source(self) -> Source:
        facts = self._opened.facts
        engine = " ".join(facts.get(key, "") for key in ("engine", "version")).strip()
        host = self._session.bench.hellos[self._asked.node].host
        what = (
            f"{self._asked.origin}; {engine} on {facts.get('device', 'an unknown device')}, "
            f"node {self._asked.node} ({host}), medians of {self._asked.steps} steps"
        )
        return Source(what=what, date=self._date())

    def _date(self) -> str:
        return self._session.bench.clock.wall().date().isoformat()

    def _note(self, text: str, level: str) -> None:
        row = {"level": level, "who": self._asked.node, "text": text}
        self._session.record.event("note", row)


def _powers_of_two(gpus: int) -> tuple[Layout, ...]:
    return tuple(Layout(tp=1 << power) for power in range(gpus.bit_length()))


def _shortly(texts: Sequence[str]) -> Sequence[str]:
    """Return so many as a reader would read; the profile has all of them."""
    more = len(texts) - TOLD_MAX
    return [*texts[:TOLD_MAX], f"{more} more such points, see the profile"] if more > 1 else texts


def _shape(asked: CalibrationAsked, opened: GenerationOpen) -> ModelShape:
    """Return the model's shape, which must be that of the profile to start from."""
    if opened.shape is None:
        raise HarnessError(f"{asked.node} did not tell the shape of the model that it runs")
    real = opened.shape
    known = asked.known.shape if asked.known else real
    if _split(real) != _split(known):
        raise UsageError(
            f"--profile is of another model than {asked.spec.model or 'the tiny one that is run'}: "
            f"{_split(known)} is not {_split(real)} (layers, hidden, heads, KV heads, vocabulary)"
        )
    return known


def _split(shape: ModelShape) -> tuple[int, ...]:
    return (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.vocab)
