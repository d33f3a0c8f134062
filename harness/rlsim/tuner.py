"""Which algorithm and protocol NCCL takes: that of which it thinks that it takes the least time.

The shape is that of NCCL's ``src/graph/tuning.cc`` (`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`):
latency + bytes / bandwidth, the least of all. Constants: ``data/nccl-<version>-tuning.toml``.
Not in it: CollNet (SHARP in the network), PAT (one GPU per node), PCIe without NVLink. All-to-all
and send-receive are point to point: NCCL has nothing to choose there. GB/s and us, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from harness.errors import UsageError
from harness.model.bench import Strict
from harness.model.scenario import Op

DATA = Path(__file__).parent / "data"
NEWEST = "2.27"

Algorithm = Literal["ring", "tree", "nvls", "nvls_tree", "hierarchical", "pairwise"]
Protocol = Literal["ll", "ll128", "simple"]
Architecture = Literal["ampere", "hopper", "blackwell"]
Cpu = Literal["intel", "amd"]
Triple = tuple[float, float, float]
"""By protocol, or on one node, on two, on more."""

HIERARCHICAL: Algorithm = "hierarchical"
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
TUNED: tuple[Algorithm, ...] = ("ring", "tree", "nvls", "nvls_tree")
"""What NCCL chooses among, in its order: of two alike it takes the first."""

Name = TypeVar("Name", bound=str)


class Tuning(Strict, frozen=True, kw_only=True):
    """One release's constants; what each means stands in the file."""

    version: str
    source: str
    base_us: dict[Algorithm, Triple]
    nvlink_us: dict[Algorithm, Triple]
    network_us: dict[Algorithm, Triple]
    overhead_us: dict[Cpu, float]
    ll_one_node_gb_per_s: dict[Architecture, float]
    ll_nodes_gb_per_s: dict[Cpu, tuple[float, float]]
    ring_ll128_gb_per_s: dict[Architecture, Triple]
    tree_ll128_gb_per_s: dict[Architecture, Triple]
    tree_gb_per_s: dict[Architecture, Triple]
    nvls_tree_gb_per_s: dict[Architecture, Triple]
    nvls_share: dict[Architecture, float]
    shares: dict[str, float]
    tree_dip: dict[Protocol, tuple[float, ...]]


@cache
def tuning(version: str = NEWEST) -> Tuning:
    """Return the constants of a release that we have."""
    path = DATA / f"nccl-{version}-tuning.toml"
    if not path.exists():
        known = sorted(p.name.split("-")[1] for p in DATA.glob("nccl-*-tuning.toml"))
        raise UsageError(f"NCCL {version}: there is a tuning of {', '.join(known)} only")
    return msgspec.toml.decode(path.read_bytes(), type=Tuning)


class Group(NamedTuple):
    """A group as a tuner sees it: how many ranks, on how many nodes, on the emptiest of them."""

    ranks: int
    nodes: int = 1
    fewest: int = 0

    @property
    def scale(self) -> int:
        """Return the place in a list of one node, two, more."""
        return min(self.nodes, 3) - 1


class Wiring(NamedTuple):
    """What NCCL finds on a node: its graph over NVLink, and the network of the node."""

    architecture: Architecture
    graph_gb_per_s: float
    """Bus bandwidth of all channels of a ring over NVLink."""
    channels: int
    network_gb_per_s: float = 0.0
    """Of all NICs of a node, one way."""
    cpu: Cpu = "intel"


class Allowed(NamedTuple):
    """What may be taken, as NCCL_ALGO and NCCL_PROTO say it."""

    algorithms: tuple[Algorithm, ...] = TUNED
    protocols: tuple[Protocol, ...] = PROTOCOLS


class Choice(NamedTuple):
    """What is taken, and how long NCCL thinks that it takes."""

    algorithm: Algorithm
    protocol: Protocol
    estimate_us: float


def allowed(algorithms: str = "", protocols: str = "") -> Allowed:
    """Return what texts in the style of NCCL_ALGO and NCCL_PROTO allow; an empty one allows all.

    ``ring,tree`` names what may be taken, ``^tree`` what may not, in any case. `hierarchical` is
    ours: NCCL never takes it by itself. Raises `UsageError` on a name that is none.

    >>> allowed("^NVLS,NVLSTree", "Simple")
    Allowed(algorithms=('ring', 'tree'), protocols=('simple',))
    """
    known = {a.replace("_", ""): a for a in (*TUNED, HIERARCHICAL)}
    return Allowed(
        _listed("NCCL_ALGO", algorithms, known, TUNED),
        _listed("NCCL_PROTO", protocols, {p: p for p in PROTOCOLS}, PROTOCOLS),
    )


def _listed(
    variable: str, text: str, known: Mapping[str, Name], usual: tuple[Name, ...]
) -> tuple[Name, ...]:
    names = [name.strip().lower().replace("_", "") for name in text.removeprefix("^").split(",")]
    if names == [""]:
        return usual
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{variable} = {text}: {unknown[0]!r} is none of {', '.join(known)}")
    named = {known[name] for name in names}
    if text.startswith("^"):
        return tuple(name for name in usual if name not in named)
    return tuple(name for name in known.values() if name in named)


# -- the choice ------------------------------------------------------------------------------------


def steps(op: Op, ranks: int) -> int:
    """Return how many steps a ring (of a broadcast: a chain) of so many takes."""
    return 2 * (ranks - 1) if op == "all_reduce" else ranks - 1


def latency_us(op: Op, algorithm: Algorithm, group: Group, within: float, between: float) -> float:
    """Return the latency of all steps, of which one takes so long within a node, and between."""
    depth = max(0, group.nodes.bit_length() - 1)
    match algorithm:
        case "tree":
            return 2 * ((group.ranks // group.nodes - 1) * within + depth * between)
        case "nvls" | "nvls_tree":
            return within + 2 * depth * between
    inter = steps(op, group.nodes)
    return (steps(op, group.ranks) - inter) * within + inter * between


@dataclass(frozen=True)
class Tuner:
    """NCCL on one kind of node."""

    wiring: Wiring
    constants: Tuning

    def choose(self, op: Op, size_bytes: float, group: Group, may: Allowed | None = None) -> Choice:
        """Return what NCCL takes. Raises `UsageError` where nothing that is allowed can do `op`."""
        if op in ("all_to_all", "send_recv"):
            return Choice("pairwise", "simple", 0.0)
        algorithms, protocols = may or Allowed()
        found = [
            Choice(a, p, self._estimate_us(op, a, p, size_bytes, group))
            for a in algorithms
            for p in protocols
            if self._can(op, a, group) and (p == "simple" or not a.startswith("nvls"))
        ]
        if not found:
            raise UsageError(
                f"no {op} of {group.ranks} ranks on {group.nodes} nodes of"
                f" {self.wiring.architecture} by {', '.join(algorithms) or 'no algorithm'}"
                f" with {', '.join(protocols) or 'no protocol'}: allow more"
            )
        return min(found, key=lambda choice: choice.estimate_us)

    def between_us(self, algorithm: Algorithm, protocol: Protocol, group: Group) -> float:
        """Return what a step from node to node takes; GPUs alone on their nodes hide none of it."""
        alone = algorithm == "ring" and group.ranks == group.nodes
        by_protocol = self.constants.network_us["tree" if alone else algorithm]
        return by_protocol[PROTOCOLS.index(protocol)]

    def posting_us(self, protocol: Protocol, group: Group) -> float:
        """Return what any step of a ring over nodes takes at least; 0 on one node."""
        if group.nodes == 1:
            return 0.0
        return self.constants.overhead_us[self.wiring.cpu] * (3 if protocol == "simple" else 1)

    def _can(self, op: Op, algorithm: Algorithm, group: Group) -> bool:
        """Whether NCCL has `algorithm` of `op` here. NVLS needs two GPUs of each node."""
        match algorithm:
            case "ring":
                return True
            case "tree":
                return op == "all_reduce"
            case "nvls" | "nvls_tree":
                has = self.wiring.architecture in self.constants.nvls_share and group.fewest > 1
                return has and op == "all_reduce" and (algorithm == "nvls") == (group.nodes == 1)
        return False

    def _estimate_us(
        self, op: Op, algorithm: Algorithm, protocol: Protocol, size_bytes: float, group: Group
    ) -> float:
        constants, place = self.constants, PROTOCOLS.index(protocol)
        within = constants.nvlink_us[algorithm][place]
        between = self.between_us(algorithm, protocol, group)
        if op == "broadcast":  # its chunks follow each other: NCCL counts one hop
            latency, factor = between if group.nodes > 1 else within, 1.0
        else:
            if algorithm == "ring":
                within = max(within, self.posting_us(protocol, group))
            latency = latency_us(op, algorithm, group, within, between)
            factor = group.ranks / steps(op, group.ranks)
        latency += constants.base_us[algorithm][place]
        if algorithm == "tree":
            factor = 0.5 * _dip(constants.tree_dip[protocol], size_bytes)
        each = size_bytes / (self.wiring.channels * group.ranks)
        if (algorithm, protocol, op) == ("ring", "simple", "all_reduce") and each >= 64:
            latency *= constants.shares["plateau"] if group.nodes > 1 else 1.0
        return latency + size_bytes / (1000 * factor * self._bus(algorithm, protocol, group))

    def _bus(self, algorithm: Algorithm, protocol: Protocol, group: Group) -> float:
        """Return the bus bandwidth of all channels, as NCCL refines it."""
        bus = self.wiring.graph_gb_per_s
        if group.nodes > 1:
            # over two nodes a tree sends each byte out of a node once, a ring almost twice
            more = 2 if algorithm != "ring" and group.nodes == 2 else 1
            bus = min(bus, more * self.wiring.network_gb_per_s)
        match algorithm:
            case "ring":
                return self._ring(bus, protocol, group)
            case "tree":
                return self._tree(bus, protocol, group)
        # NVLS sends out and gets back at once all but what a GPU keeps for itself
        share = self.constants.nvls_share[self.wiring.architecture]
        nvls = self.wiring.graph_gb_per_s * share * 2 * (group.fewest - 1) / group.fewest
        if algorithm == "nvls":
            return nvls
        return min(nvls, bus, self._most(self.constants.nvls_tree_gb_per_s, group))

    def _ring(self, bus: float, protocol: Protocol, group: Group) -> float:
        share = self.constants.shares
        if protocol == "ll":
            return min(bus * share["ring_ll"], self._ll_most(group))
        if protocol == "ll128":
            most = self._most(self.constants.ring_ll128_gb_per_s, group)
            return min(bus * share["ring_ll128"], most)
        return bus

    def _tree(self, bus: float, protocol: Protocol, group: Group) -> float:
        share = self.constants.shares
        bus = min(bus * share["tree"], self._most(self.constants.tree_gb_per_s, group))
        if protocol == "ll":
            return min(bus * share["tree_ll"], self._ll_most(group))
        if protocol == "ll128":
            bus *= share["tree_ll128_one_node" if group.nodes == 1 else "tree_ll128_nodes"]
            return min(bus, self._most(self.constants.tree_ll128_gb_per_s, group))
        return bus

    def _ll_most(self, group: Group) -> float:
        if group.nodes == 1:
            return self.constants.ll_one_node_gb_per_s[self.wiring.architecture]
        return self.constants.ll_nodes_gb_per_s[self.wiring.cpu][min(group.nodes, 3) - 2]

    def _most(self, of_a_channel: Mapping[Architecture, Triple], group: Group) -> float:
        """Return what all channels carry at most, by how many nodes there are."""
        return self.wiring.channels * of_a_channel[self.wiring.architecture][group.scale]


def _dip(shares: tuple[float, ...], size_bytes: float) -> float:
    place = int(size_bytes // 64).bit_length() - 1
    return shares[place] if 0 <= place < len(shares) else 1.0
