"""What syncs of weights say: gathering, the way from node to node bucket by bucket, loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.clock import NS_PER_S
from harness.model.profile import host_ns
from harness.model.scenario import Rl
from harness.model.sizes import parse_size
from harness.rlsim.fits.control import MESSAGE
from harness.rlsim.fits.held import Held
from harness.rlsim.fits.measured import Hops, Measured
from harness.rlsim.fits.row import Figures, Model, Row
from harness.rlsim.fits.wires import Loads, Networks, Wires
from harness.rlsim.parts import Parts

GATHER, GATHER_RATE = "sync.gather_fixed_s", "sync.gather_gb_per_s"
CARRY, CARRY_RATE, BUCKET = "sync.carry_fixed_s", "sync.carry_gb_per_s", "sync.bucket_us"
LOAD, LOAD_RATE = "sync.load_fixed_s", "sync.load_gb_per_s"

Stamped = Mapping[str, Any]
IDLE_S = 1.0
"""Links that nobody sent over were idle for longer than any burst takes to gather."""


def rows(measured: Measured) -> Iterator[Row]:
    """Yield the stages of syncs that succeeded at once."""
    if measured.loop is None or measured.has_rails:
        return
    networks, held = Networks(measured), Held()
    for event in measured.events:
        t_ns, row = event.t_ns, event.data
        if event.stream == "engine":
            held.take(row)
        if event.stream != "sync" or row["outcome"] != "synced" or row["attempt"]:
            continue
        begin_ns = t_ns - round(row["total_s"] * NS_PER_S)
        gathered_ns = begin_ns + round(row["gather_s"] * NS_PER_S)
        carried_ns = gathered_ns + round((row["wire_s"] or 0.0) * NS_PER_S)
        if wires := networks.during(row["policy"], begin_ns, gathered_ns):
            yield from _gathered(measured, row, wires)
        if wires := networks.during(row["policy"], gathered_ns, carried_ns):
            yield from _carried(measured, row, wires)
        yield from _asked(measured, row)
        if row["load_s"] and held.largest_bytes:
            yield _loaded(measured, row, held.largest_bytes)


def _gathered(measured: Measured, row: Stamped, wires: Wires) -> Iterator[Row]:
    """Shards go to all nodes that write; then these write the file."""
    ranks_of = measured.ranks_of
    size_bytes = float(row["bytes"])
    writers = list(ranks_of)[: row["sources"]]
    world = sum(map(len, ranks_of.values()))
    loads = wires.loads(
        (node, to, size_bytes * len(ranks) / world)
        for to in writers
        for node, ranks in ranks_of.items()
    )
    if loads is None:
        return

    written_bytes = size_bytes * (len(writers) if measured.one_machine else 1)

    def model(figures: Figures) -> float:
        sent_s = loads.takes_s(figures, IDLE_S)
        return figures[GATHER] + sent_s + written_bytes / 1e9 / figures[GATHER_RATE]

    needs = (GATHER, GATHER_RATE, *loads.needs)
    key = (round(size_bytes, -3), len(writers), loads_key(loads))
    yield Row("sync.gather", measured.name, key, row["gather_s"], needs, model)


def _carried(measured: Measured, row: Stamped, wires: Wires) -> Iterator[Row]:
    hops = _hops(measured, row)
    shares = wires.shared(hops)
    if not hops or shares is None or not row["wire_s"]:
        return
    size_bytes, buckets = row["bytes"], row["buckets"]
    parts = Parts.of(size_bytes, _bucket_bytes(measured, size_bytes, buckets))

    def model(figures: Figures) -> float:
        return wire_s(parts, buckets, hops, shares, figures)

    used = dict.fromkeys(name for loads in shares.values() for name in loads.needs)
    if len(hops) > row["sources"]:
        used |= {CARRY: None}
    needs = (CARRY_RATE, BUCKET, *used)
    key = (buckets, round(size_bytes, -3), hops, tuple(map(loads_key, shares.values())))
    yield Row(f"sync.wire.{row['path']}", measured.name, key, row["wire_s"], needs, model)


def wire_s(
    parts: Parts,
    buckets: int,
    hops: Hops,
    shares: Mapping[tuple[str, str], Loads],
    figures: Figures,
) -> float:
    """Return the time from a source's first byte to the end of the last hop.

    As `harness.bench.simulated.cargo` has it; a node sends on what it has. `shares`: by hop what a
    byte takes.
    """

    def host_s(size_bytes: float, buckets: int) -> float:
        return size_bytes / 1e9 / figures[CARRY_RATE] + buckets * figures[BUCKET] / 1e6

    def sent_s(size_bytes: float, hop: tuple[str, str], idle_s: float = 0.0) -> float:
        loads = shares[hop]
        return loads.takes_s(figures, idle_s, round(size_bytes)) if size_bytes else 0.0

    offered, begun = dict[str, float](), dict[str, float]()
    nearly, whole = dict[str, float](), dict[str, float]()
    before_s = host_s(parts.first + parts.between + parts.full, buckets - 1)
    for hop in hops:
        source, target = hop
        begin_s = offered[target] = 0.0
        if source in begun:  # it connects when it is offered the file, and sends what has come
            offered[target] = offered[source] + figures[CARRY]
            first_s = host_s(parts.first, 1 if parts.first else 0)
            begin_s = max(offered[target], begun[source] + first_s)
        begun[target] = begin_s + sent_s(parts.first, hop, IDLE_S)
        at_s = max(begun[target] + sent_s(parts.between, hop), nearly.get(source, 0.0))
        nearly[target] = at_s + sent_s(parts.full, hop)
        full_s = host_s(parts.full, 1 if parts.full else 0)
        ready_s = max(begun[target] + before_s, nearly[target] + full_s)
        at_s = max(nearly[target], whole.get(source, 0.0)) + sent_s(parts.last, hop)
        whole[target] = max(at_s, ready_s) + host_s(parts.last, 1)
    return max(whole.values())


def _hops(measured: Measured, row: Stamped) -> Hops:
    """Return who sent to whom; nothing where not all took part."""
    hops = measured.hops.get(row["path"], ())
    reached = {target for _, target in hops}
    sources = {source for source, _ in hops} - reached
    return hops if (len(sources), len(reached)) == (row["sources"], row["receivers"]) else ()


def _bucket_bytes(measured: Measured, size_bytes: int, buckets: int) -> int:
    """Return the size of a bucket: of loops with several, one that gives so many."""
    for step in measured.scenario.steps:
        bucket = parse_size(step.bucket) if isinstance(step, Rl) else 0
        if bucket and -(-size_bytes // bucket) == buckets:
            return bucket
    return -(-size_bytes // buckets)


def _asked(measured: Measured, row: Stamped) -> Iterator[Row]:
    """Asking to carry and to load is two messages; a connection is made before the first byte."""
    if measured.loop is None or measured.loop.across_sync == "finish" or not row["rpc_s"]:
        return

    def model(figures: Figures) -> float:
        return 2 * figures[MESSAGE] / 1e6 + figures[CARRY]

    yield Row("sync.rpc", measured.name, None, row["rpc_s"], (MESSAGE, CARRY), model)


def _loaded(measured: Measured, row: Stamped, size_bytes: int) -> Row:
    """Each rank copies what it holds, all at once; the largest takes longest."""
    model = copies(measured, [size_bytes], LOAD, LOAD_RATE)
    key = round(size_bytes, -4)
    return Row("sync.load", measured.name, key, row["load_s"], (LOAD, LOAD_RATE), model)


def copies(measured: Measured, sizes_bytes: Sequence[int], fixed: str, rate: str) -> Model:
    """Return the time of shards that are copied one after another, by names of two figures.

    As `harness.bench.simulated.engine_crew` has it: none takes less than its GPU would for all of
    what `sizes_bytes` are `bytes_scale` of.
    """
    engine, profile = measured.scenario.generation, measured.profile
    if engine is None or engine.engine != "paced" or profile is None:
        least_s = [0.0 for _ in sizes_bytes]
    else:
        wholes_bytes = [size_bytes / engine.bytes_scale for size_bytes in sizes_bytes]
        least_s = [host_ns(profile, whole, engine.speed) / NS_PER_S for whole in wholes_bytes]

    def model(figures: Figures) -> float:
        copying_s = (size_bytes / 1e9 / figures[rate] for size_bytes in sizes_bytes)
        return sum(figures[fixed] + max(pair) for pair in zip(least_s, copying_s, strict=True))

    return model


def loads_key(loads: Loads) -> tuple[float, float]:
    """Return what tells loads apart that differ by more than a few bytes."""
    return float(f"{loads.link_s:.4g}"), float(f"{loads.electrical_s:.4g}")
