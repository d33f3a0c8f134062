"""What a simulated bench takes its times from: figures fitted to runs, or stated with a source.

A figure is a value, half of its 95 % confidence interval, and where it comes from. `fitted` says
over which loads figures were fitted: a simulation beyond says so. `harness calibrate RUN` writes
such a file from journals; the one for hardware that nobody here has is stated figure by figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Literal

from harness.model.bench import Strict

Backend = Literal["gloo", "nccl"]
LOADS = ("ranks", "nodes", "size_bytes", "link_mbit_per_s")
"""What figures may depend on in ways that were not fitted."""


class Figure(Strict, frozen=True, kw_only=True):
    """One number: `plus_minus` is half of its 95 % confidence interval, in its own unit."""

    value: float
    plus_minus: float = 0.0
    source: str = ""


class Network(Strict, frozen=True, kw_only=True):
    """What crosses the network, as senders and receivers see it."""

    link_share: Figure
    """Of a port's or a circuit's nominal rate, what payload gets."""
    electrical_share: Figure
    """The same of the electrical path's."""
    latency_us: Figure
    """Of a first byte from a node to another, one way."""
    burst_kb: Figure = Figure(value=0.0, source="none is stated")
    """A link that was idle lets so much pass at once, 1000 bytes of it: a shaper's bucket."""


class Control(Strict, frozen=True, kw_only=True):
    """What the coordinator's own ways take."""

    message_us: Figure
    """An order to an agent and its answer, beside what is done in between."""
    steer_us: Figure
    """One ToR takes a set of routes."""
    read_ms: Figure
    """A switch's map is read."""
    switch_ms: Figure
    """A switch takes a change and reads it back, beyond the time that its mirrors move."""
    light_ms: Figure
    """From mirrors at rest to light that is told; over a serial line, of each look beside bytes."""
    hand_ms: Figure = Figure(value=0.0, source="none is stated")
    """From a decision to its first command: each of the units that change at once takes so much."""
    serial_ms: Figure = Figure(value=0.0, source="none is stated")
    """A switch answers so much later over a serial line, beside the bytes that pass it."""
    ssh_ms: Figure = Figure(value=0.0, source="none is stated")
    """The same over an SSH session, whatever passes it."""


class Collectives(Strict, frozen=True, kw_only=True):
    """Beyond what the network takes. `nccl` tunes itself by the tables of `harness.rlsim`."""

    backend: Backend
    step_us: Figure
    """gloo: one step of an algorithm, among nodes."""
    copy_ns_per_kb: Figure
    """gloo: a rank copies and adds up what it sends, 1000 bytes of it."""
    gpu: str = ""
    """nccl: the kind of GPU that it joins, such as ``h800``, where nothing else says which."""


class Generation(Strict, frozen=True, kw_only=True):
    """Stages of a change of engines, of one node's instances, and what engines do beside."""

    processes_s: Figure
    """Ranks are started anew (strategy restart)."""
    teardown_s: Figure
    groups_s: Figure
    weights_fixed_s: Figure
    weights_gb_per_s: Figure
    """Of what is really copied (scaled)."""
    kv_cache_s: Figure
    kv_fixed_s: Figure = Figure(value=0.0, source="none is stated")
    """KV is sent from engine to engine: ranks find each other, whatever its size."""
    kv_gb_per_s: Figure
    """The same: what hosts can do, beside the network."""
    step_share: Figure
    """Steps really take this much of the profile's time."""


class Training(Strict, frozen=True, kw_only=True):
    """A paced step beside its profile and the network."""

    compute_share: Figure
    """Computing really takes this much of the profile's time."""
    phase_us: Figure
    """What a rank takes before each communication, beside what it computes."""
    step_fixed_s: Figure
    """A step begins and ends."""


class Sync(Strict, frozen=True, kw_only=True):
    """New weights, of what is really moved (scaled)."""

    gather_fixed_s: Figure
    gather_gb_per_s: Figure
    """A writer takes all shards and writes the file, beside the network."""
    carry_fixed_s: Figure
    carry_gb_per_s: Figure
    """A porter passes buckets on: what a host can do, beside the network."""
    bucket_us: Figure
    """One more bucket, of one hop."""
    load_fixed_s: Figure
    load_gb_per_s: Figure
    """An engine copies its shard from the node's file."""


class Range(Strict, frozen=True, kw_only=True):
    """Loads that figures were fitted on."""

    low: float
    high: float


class Calibration(Strict, frozen=True, kw_only=True):
    """A whole file. `runs`: those that it was fitted on, none where it is stated.

    `one_machine`: they were of an emulated bench, whose hosts share the cores and the disk of one
    machine: what several write at once takes as long as one after the other.
    """

    name: str
    date: str
    runs: tuple[str, ...] = ()
    one_machine: bool = False
    network: Network
    control: Control
    collectives: Collectives
    generation: Generation
    training: Training
    sync: Sync
    fitted: dict[str, Range] = {}
    """By load: ``ranks``, ``nodes``, ``size_bytes``, ``link_mbit_per_s``."""


def figures(calibration: Calibration) -> Iterator[tuple[str, Figure]]:
    """Yield every figure with its dotted name, in the order of the file."""
    for table in calibration.__struct_fields__:
        part = getattr(calibration, table)
        for name in getattr(part, "__struct_fields__", ()):
            if isinstance(figure := getattr(part, name), Figure):
                yield f"{table}.{name}", figure


def beyond(calibration: Calibration, loads: Iterable[tuple[str, float]]) -> list[str]:
    """Return what these (load, value) lie beyond, each in words; none: all were fitted on."""
    told = []
    for load, value in loads:
        fitted = calibration.fitted.get(load)
        if fitted is not None and not fitted.low <= value <= fitted.high:
            told.append(f"{load} {value:g} (fitted on {fitted.low:g} to {fitted.high:g})")
    return told


# -- what must hold --------------------------------------------------------------------------------


def calibration_problems(calibration: Calibration) -> Iterator[str]:
    """Yield what is wrong with a file, each with its key."""
    for name, figure in figures(calibration):
        least = "more than 0" if _divides(name) else "0 or more"
        too_low = figure.value <= 0 if least == "more than 0" else figure.value < 0
        if too_low or not isfinite(figure.value):
            yield f"{name}.value = {figure.value:g}: expected {least}"
        if figure.plus_minus < 0:
            yield f"{name}.plus_minus = {figure.plus_minus:g}: expected 0 or more"
        if not calibration.runs and not figure.source:
            yield f"{name}.source: say where {figure.value:g} comes from, for no run is named"
    if calibration.collectives.gpu and calibration.collectives.backend != "nccl":
        yield "collectives.gpu: only NCCL differs by GPU; leave it out"
    for load, fitted in calibration.fitted.items():
        if load not in LOADS:
            yield f"fitted.{load}: expected one of {', '.join(LOADS)}"
        if fitted.low > fitted.high:
            yield f"fitted.{load}: low = {fitted.low:g} is above high = {fitted.high:g}"


def _divides(name: str) -> bool:
    """Whether a figure is a rate or a share: nothing goes on with none of it."""
    return name.endswith(("_per_s", "_share"))
