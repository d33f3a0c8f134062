"""A latency profile: how long one step of one model on one kind of GPU takes, for each layout.

One file per (model, GPU), with three ways to know a step time, the better one first:

- ``[[tables]]``: a measured grid (batch x context), interpolated;
- ``[[coefficients]]``: a line fitted to measurements, ``fixed + batch + KV + prefill``;
- ``[roofline]``: derived from the shape and public figures, for layouts that nobody measured.

Every number names a source, and ``[sources]`` says what that is and its date. The same profile
paces the emulated accelerator and feeds the simulator: one profile, two clocks. `costs_of` gives
the step times of one layout, `load_ns` how long its weights take to come. Schema and choice only;
pure. `harness.model.load` reads files.
"""

from __future__ import annotations

import msgspec

from harness.errors import UsageError
from harness.model.layout import Gpu, Layout, weight_bytes_per_gpu
from harness.model.roofline import Rates, RooflineCosts
from harness.model.shape import ModelShape
from harness.model.steptime import FittedCosts, StepCosts, TableCosts


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where numbers come from: what a reader would look up, and the date it was so."""

    what: str
    date: str


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number; its unit ends its key."""

    value: float
    source: str


class GpuFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU: capacity, and peaks by its data sheet; `link` and `host` are one way, per GPU.

    Only a roofline needs the peaks. `host` is what it takes in from host memory, over PCIe.
    """

    name: str
    memory_gb: Figure
    workspace_gb: Figure
    bandwidth_gb_per_s: Figure | None = None
    peak_tflop_per_s: Figure | None = None
    link_gb_per_s: Figure | None = None
    host_gb_per_s: Figure | None = None


class Roofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the peaks that are reached, and overheads; latencies by the size of the group."""

    weights_share: Figure
    kv_share: Figure
    gemm_share: Figure
    attention_share: Figure
    link_share: Figure
    step_overhead_us: Figure
    layer_overhead_us: Figure
    sequence_us: Figure
    hop_us: Figure
    expert_imbalance: Figure
    batch_max: Figure
    prefill_max_tokens: Figure
    all_reduce_us: dict[str, Figure] = {}
    all_to_all_us: dict[str, Figure] = {}


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line fitted to one instance of one layout, and the range it was fitted on."""

    fixed_us: float
    sequence_us: float
    kv_token_ns: float
    prefill_token_us: float
    batch_max: int
    kv_max_tokens: int
    prefill_max_tokens: int
    source: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps measured on one instance of one layout: shape (batch, context), and prefill alone.

    `context_tokens` is the mean length of the sequences in the batch.
    """

    batch: tuple[int, ...]
    context_tokens: tuple[int, ...]
    step_us: tuple[tuple[float, ...], ...]
    prefill_tokens: tuple[int, ...]
    prefill_us: tuple[float, ...]
    source: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is known of one model on one kind of GPU."""

    model: str
    gpu: GpuFigures
    shape: ModelShape
    sources: dict[str, Source]
    roofline: Roofline | None = None
    coefficients: tuple[Coefficients, ...] = ()
    tables: tuple[Table, ...] = ()


def gpu_of(profile: Profile) -> Gpu:
    """Return what a layout needs to know of the profile's GPU."""
    gpu = profile.gpu
    return Gpu(gpu.name, round(gpu.memory_gb.value * 1e9), round(gpu.workspace_gb.value * 1e9))


def costs_of(profile: Profile, layout: Layout) -> StepCosts:
    """Return the step times of one instance of `layout`, from the best that is known of it.

    Raises `UsageError` where the profile knows nothing of such an instance.
    """
    degrees = (layout.tp, layout.pp, layout.ep, layout.dp)
    for table in profile.tables:
        if (table.tp, table.pp, table.ep, table.dp) == degrees:
            return TableCosts(
                batches=table.batch,
                contexts_tokens=table.context_tokens,
                step_us=table.step_us,
                prefills_tokens=table.prefill_tokens,
                prefill_us=table.prefill_us,
            )
    for fit in profile.coefficients:
        if (fit.tp, fit.pp, fit.ep, fit.dp) == degrees:
            return FittedCosts(
                fixed_us=fit.fixed_us,
                sequence_us=fit.sequence_us,
                kv_token_ns=fit.kv_token_ns,
                prefill_token_us=fit.prefill_token_us,
                batch_max=fit.batch_max,
                kv_max_tokens=fit.kv_max_tokens,
                prefill_max_tokens=fit.prefill_max_tokens,
            )
    return RooflineCosts(layout, profile.shape, _rates(profile, layout))


def load_ns(profile: Profile, layout: Layout, speed: float = 1.0) -> int:
    """Return how long a rank takes in its shard, all of it, `speed` times as fast; see `host_ns`.

    Each GPU has a PCIe link of its own: the ranks of a node load side by side.
    """
    return host_ns(profile, weight_bytes_per_gpu(layout, profile.shape), speed)


def host_ns(profile: Profile, size_bytes: float, speed: float = 1.0) -> int:
    """Return how long a GPU takes so much in from host memory; 0 where the profile has no rate."""
    rate = profile.gpu.host_gb_per_s
    return 0 if rate is None else round(size_bytes / rate.value / speed)  # 1 GB/s: a byte per ns


def _rates(profile: Profile, layout: Layout) -> Rates:
    """Return the roofline's figures as they hold for this layout, in SI units."""
    roof, gpu = profile.roofline, profile.gpu
    if roof is None:
        measured = [(m.tp, m.pp, m.ep, m.dp) for m in profile.tables]
        measured += [(m.tp, m.pp, m.ep, m.dp) for m in profile.coefficients]
        known = sorted({str(Layout(1, *degrees)) for degrees in measured})
        raise UsageError(
            f"the profile of {profile.model} on {gpu.name} has no figures for {layout}; "
            f"it has {', '.join(known) or 'none'}: add [[coefficients]] or [[tables]] of it"
        )
    exchanging = layout.tp * layout.dp if profile.shape.experts and layout.dp > 1 else 1
    bytes_per_s = _peak(profile, "bandwidth_gb_per_s") * 1e9
    flop_per_s = _peak(profile, "peak_tflop_per_s") * 1e12
    return Rates(
        weights_bytes_per_s=bytes_per_s * roof.weights_share.value,
        kv_bytes_per_s=bytes_per_s * roof.kv_share.value,
        gemm_flop_per_s=flop_per_s * roof.gemm_share.value,
        attention_flop_per_s=flop_per_s * roof.attention_share.value,
        link_bytes_per_s=_peak(profile, "link_gb_per_s") * 1e9 * roof.link_share.value,
        step_overhead_s=roof.step_overhead_us.value / 1e6,
        layer_overhead_s=roof.layer_overhead_us.value / 1e6,
        sequence_s=roof.sequence_us.value / 1e6,
        hop_s=roof.hop_us.value / 1e6,
        all_reduce_s=_latency_s(profile, "all_reduce_us", layout.tp),
        all_to_all_s=_latency_s(profile, "all_to_all_us", exchanging),
        expert_imbalance=roof.expert_imbalance.value,
        batch_max=int(roof.batch_max.value),
        prefill_max_tokens=int(roof.prefill_max_tokens.value),
    )


def _peak(profile: Profile, key: str) -> float:
    figure: Figure | None = getattr(profile.gpu, key)
    if figure is None:
        raise UsageError(f"the profile of {profile.model} has a roofline, but no gpu.{key}")
    return figure.value


def _latency_s(profile: Profile, key: str, ranks: int) -> float:
    """Return a collective's latency in a group of `ranks`; never guessed from another size."""
    if ranks == 1:
        return 0.0
    known: dict[str, Figure] = getattr(profile.roofline, key)
    if str(ranks) not in known:
        there = ", ".join(sorted(known, key=int)) or "none"
        raise UsageError(
            f"the profile of {profile.model} on {profile.gpu.name} has no roofline.{key} for a "
            f"group of {ranks} GPUs; there is {there}"
        )
    return known[str(ranks)].value / 1e6
