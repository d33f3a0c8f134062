"""How long a collective takes over NVLink: latency of its steps, and bytes over what is reached.

NCCL's own estimate (`harness.rlsim.tuner`) says what is taken, not how long it takes. That is
fitted per kind of GPU to measured tables, ``data/nvlink-gpus.toml``; of ring and LL, LL128 and
Simple each with its own figures, for p ranks, n bytes, s bytes sent by each rank::

    base + steps * (step + threads)  +  s / bus + (n / p) / own + ramp * sqrt(s)

`own`: a rank copies its own share too. `ramp`: pipelines fill, and rates grow with the size.
`threads`: below 8 bytes for each of 512 threads a step needs fewer of them, and less to join them.
Latencies in us, rates in GB/s (10^9), `ramp` in us for 1 MB (10^6), as the square root grows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.errors import UsageError
from harness.model.bench import Strict
from harness.model.busbw import factor
from harness.model.scenario import Op
from harness.rlsim.tuner import (
    DATA,
    NEWEST,
    PROTOCOLS,
    Algorithm,
    Architecture,
    Cpu,
    Group,
    Protocol,
    Triple,
    Tuner,
    Wiring,
    latency_us,
    tuning,
)

FILE: Path = DATA / "nvlink-gpus.toml"
THREAD_BYTES = 512 * 8
"""Of a rank's share: from here on LL keeps all its threads busy."""


class Links(Strict, frozen=True, kw_only=True):
    """One kind of GPU; what each figure means stands in the module and in the file."""

    source: str
    architecture: Architecture
    link_gb_per_s: float
    graph_gb_per_s: float
    channels: int
    base_us: Triple
    step_us: Triple
    threads_us: float
    bus_gb_per_s: Triple
    own_gb_per_s: Triple
    ramp_us: Triple
    nvls_us: float
    nvls_step_us: float
    nvls_gb_per_s: float
    nvls_ramp_us: float
    pair_us: float
    pair_step_us: float
    pair_gb_per_s: float
    pair_own_gb_per_s: float
    pair_ramp_us: float
    pair_ll_us: float
    pair_ll_gb_per_s: float


class Cut(Strict, frozen=True, kw_only=True):
    """A kind of GPU that is another one with fewer or slower links."""

    source: str
    like: str
    link_gb_per_s: float


class Time(NamedTuple):
    """Latency of the steps, and what the bytes take."""

    latency_us: float
    bytes_us: float

    @property
    def whole_us(self) -> float:
        """Return both."""
        return self.latency_us + self.bytes_us


@cache
def _kinds() -> dict[str, Links | Cut]:
    raw = msgspec.toml.decode(FILE.read_bytes(), type=dict[str, dict[str, object]])
    found: dict[str, Links | Cut] = {}
    for name, table in raw.items():
        kind: type[Links | Cut] = Cut if "like" in table else Links
        found[name] = msgspec.convert(table, kind)
    return found


def kind_of(gpu: str) -> str:
    """Return the kind that a name means; its own name where we know none.

    >>> kind_of("NVIDIA H100 80GB HBM3"), kind_of("a100_sxm"), kind_of("T4")
    ('h100', 'a100', 't4')
    """
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    return next((name for name in _kinds() if name in words), gpu.lower())


def links_of(gpu: str) -> Links:
    """Return the figures of a kind of GPU.

    Raises `UsageError` on one that nobody measured, naming those that are known.
    """
    found = _kinds().get(kind_of(gpu))
    if found is None:
        raise UsageError(f"nobody measured collectives on {gpu!r}; known: {', '.join(_kinds())}")
    if isinstance(found, Links):
        return found
    return slowed(links_of(found.like), found.link_gb_per_s, found.source)


def slowed(links: Links, link_gb_per_s: float, source: str) -> Links:
    """Return the same GPU with other links: what is sent is slower, latencies stay."""
    share = link_gb_per_s / links.link_gb_per_s
    ll, ll128, simple = links.bus_gb_per_s
    return msgspec.structs.replace(
        links,
        source=f"{source}; {links.source}",
        link_gb_per_s=link_gb_per_s,
        graph_gb_per_s=links.graph_gb_per_s * share,
        bus_gb_per_s=(ll * share, ll128 * share, simple * share),
        nvls_gb_per_s=links.nvls_gb_per_s * share,
        pair_gb_per_s=links.pair_gb_per_s * share,
    )


@dataclass(frozen=True)
class Node:
    """GPUs of one kind on NVLink, and NCCL as it is tuned there."""

    links: Links
    tuner: Tuner

    def time(
        self, op: Op, taken: tuple[Algorithm, Protocol], size_bytes: float, group: Group
    ) -> Time:
        """Return the time of all but the bytes from node to node: NVLink's part, every latency.

        `taken`: an algorithm that NCCL chooses, and its protocol.
        """
        algorithm, protocol = taken
        links, place = self.links, PROTOCOLS.index(protocol)
        between = self.tuner.between_us(algorithm, protocol, group)
        if algorithm.startswith("nvls"):
            us = size_bytes / (1000 * links.nvls_gb_per_s)
            us += links.nvls_ramp_us * sqrt(size_bytes / 1e6)
            within = links.nvls_us + links.nvls_step_us * (group.fewest - 1)
            return Time(latency_us(op, algorithm, group, within, between), us)
        share = size_bytes / group.ranks
        within = links.step_us[place]
        if protocol == "ll":
            within += links.threads_us * min(1.0, share / THREAD_BYTES)
        if algorithm == "ring":
            within = max(within, self.tuner.posting_us(protocol, group))
        latency = links.base_us[place] + latency_us(op, algorithm, group, within, between)
        # a chain of GPUs under a tree passes all of it up, and all of it down
        sent = size_bytes * (2 if algorithm == "tree" else factor(op, group.ranks))
        us = sent / (1000 * links.bus_gb_per_s[place]) + links.ramp_us[place] * sqrt(sent / 1e6)
        if op != "broadcast":
            us += share / (1000 * links.own_gb_per_s[place])
        return Time(latency, us)


def node_of(
    gpu: str, network_gb_per_s: float = 0.0, *, cpu: Cpu = "intel", version: str = NEWEST
) -> Node:
    """Return a node of GPUs of this kind, whose NICs carry so much together, each way."""
    links = links_of(gpu)
    wiring = Wiring(links.architecture, links.graph_gb_per_s, links.channels, network_gb_per_s, cpu)
    return Node(links, Tuner(wiring, tuning(version)))


def pairwise(
    peers: int, block_bytes: float, sent_bytes: float, own_bytes: float, links: Links
) -> tuple[Protocol, Time]:
    """Return how each rank sends a block to each of so many peers, `sent_bytes` over NVLink.

    LL while it is the faster one: its one channel for each peer is soon full, the same for one on
    another node, and half of what it sends are flags.
    """
    first = links.pair_step_us * peers
    ll_us = block_bytes / (1000 * links.pair_ll_gb_per_s)
    ll_us = max(ll_us, 2 * sent_bytes / (1000 * links.pair_gb_per_s))
    ll = Time(links.pair_ll_us + first, ll_us)
    us = sent_bytes / (1000 * links.pair_gb_per_s) + own_bytes / (1000 * links.pair_own_gb_per_s)
    simple = Time(links.pair_us + first, us + links.pair_ramp_us * sqrt(sent_bytes / 1e6))
    return ("ll", ll) if ll.whole_us < simple.whole_us else ("simple", simple)
