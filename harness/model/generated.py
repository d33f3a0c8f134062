"""Benches made from a few numbers: pods, ToRs, planes and trunks, all alike. Pure.

The form is RailOCS3's, the public fabric nearest to RFabric's: ToRs, aggregation switches of each
pod, core switches between pods. Without a core, all pods hang on the same aggregation switches,
unless these are regional. The k-th uplink of a ToR is on plane k, over again where there are more;
trunks go to the cores in turn.

ToRs (``tor0``...), switches (``agg0``..., ``core0``...) and nodes (``n0``...) count through all
pods (``pod0``...). ToRs of the same servers, one for each rail, are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from harness.errors import UsageError
from harness.model.bench import Bench, Electrical, EmulatedUnit, Node, Role, Switch, Tor
from harness.model.bench_rules import GPUS_MAX
from harness.model.ports import PORT_MAX
from harness.model.tor_rules import NODES_MAX, TORS_MAX, UPLINKS_MAX

World = Literal["simulated", "emulated"]
SIMULATED_TORS_MAX = 4096
"""A demand has a row and a column for each."""
SIMULATED_NODES_MAX = 16_384


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a bench is made from.

    `aggregation_planes` are those of a pod; without a core, of the whole bench. `roles` are those
    of the pods' nodes, one each.
    """

    roles: tuple[Role, ...]
    tors_per_pod: int
    nodes_per_tor: int
    gpus_per_node: int = 1
    nics_per_node: int = 1
    rails: int = 1
    """How many ToRs the NICs of a node are dealt to; the ToRs of a pod are so many for each group
    of `nodes_per_tor` nodes."""
    uplinks_per_tor: int
    aggregation_planes: int
    core_planes: int = 0
    trunks_per_pod: int = 0
    regional: bool = False
    """Aggregation switches are a pod's own though no core joins pods."""
    one_switch: bool = False
    """The nodes of all pods hang on the one ToR of the only pod that is there."""
    link_gbit_per_s: float = 400.0
    oversubscription: float = 4.0
    electrical: Electrical = "spine"
    forwarding: bool = False
    switching_ms: float = 10.0
    duplex: bool = True

    @property
    def pods(self) -> int:
        """How many pods there are."""
        return 1 if self.one_switch else len(self.roles)

    @property
    def tors(self) -> int:
        """How many ToRs there are."""
        return self.pods * self.tors_per_pod

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.tors // self.rails * self.nodes_per_tor

    @property
    def has_own_planes(self) -> bool:
        """Whether each pod has aggregation switches of its own."""
        return self.core_planes > 0 or self.regional


REFERENCE = Numbers(
    roles=("train", "generate"),
    tors_per_pod=8,
    nodes_per_tor=32,
    uplinks_per_tor=32,
    aggregation_planes=32,
    core_planes=8,
    trunks_per_pod=256,
)
"""RailOCS3 as its authors run it, 2 x 256 GPUs, by its rails: each has 32 servers of a pod on a ToR
of its own, and stands for nodes of one GPU here."""


def bench_of(numbers: Numbers, name: str = "generated", world: World = "simulated") -> Bench:
    """Return the bench of these numbers; raises `UsageError` naming the first that does not fit."""
    for problem in numbers_problems(numbers, world):
        raise UsageError(f"bench {name}: {problem}")
    launcher: Literal["namespaces", "manual"] = "namespaces" if world == "emulated" else "manual"
    return laid_out(numbers, Bench(name=name, world=world, launcher=launcher))


def laid_out(numbers: Numbers, bench: Bench) -> Bench:
    """Return the bench with all that these numbers, which must fit, say of it."""
    links = msgspec.structs.replace(
        bench.links,
        link_mbit_per_s=numbers.link_gbit_per_s * 1000,
        oversubscription=numbers.oversubscription,
        electrical=numbers.electrical,
        forwarding=numbers.forwarding,
    )
    return msgspec.structs.replace(
        bench,
        nodes={f"n{node}": _node(numbers, node) for node in range(numbers.nodes)},
        tors={f"tor{tor}": _tor(numbers, tor) for tor in range(numbers.tors)},
        switches=dict(_switches(numbers)),
        cables={**dict(_uplinks(numbers)), **dict(_trunks(numbers))},
        links=links,
    )


# -- what is on which port -------------------------------------------------------------------------


def _node(numbers: Numbers, node: int) -> Node:
    first = node // numbers.nodes_per_tor * numbers.rails
    nics, rails = numbers.nics_per_node, numbers.rails
    tors = tuple(f"tor{first + nic * rails // nics}" for nic in range(nics))
    return Node(
        tor=tors[0] if nics == 1 else "",
        rails=tors if nics > 1 else (),
        pod=numbers.roles[node * len(numbers.roles) // numbers.nodes],
        emulated_gpus=numbers.gpus_per_node,
    )


def _tor(numbers: Numbers, tor: int) -> Tor:
    uplinks = numbers.uplinks_per_tor
    return Tor(
        uplinks=uplinks,
        driver="netlink" if uplinks else "none",
        pod=f"pod{tor // numbers.tors_per_pod}",
    )


def _uplinks_per_plane(numbers: Numbers) -> int:
    """Return how many uplinks land on one aggregation switch."""
    pods = 1 if numbers.has_own_planes else numbers.pods
    uplinks = pods * numbers.tors_per_pod * numbers.uplinks_per_tor
    return uplinks // max(1, numbers.aggregation_planes)


def _trunks_per_plane(numbers: Numbers) -> int:
    return numbers.trunks_per_pod // max(1, numbers.aggregation_planes)


def _trunks_per_core(numbers: Numbers) -> int:
    return numbers.pods * numbers.trunks_per_pod // max(1, numbers.core_planes)


def _switches(numbers: Numbers) -> Iterator[tuple[str, Switch]]:
    pods = numbers.pods if numbers.has_own_planes else 1
    size = _uplinks_per_plane(numbers) + _trunks_per_plane(numbers)
    for k in range(pods * numbers.aggregation_planes):
        yield f"agg{k}", _switch(numbers, "aggregation", size)
    for k in range(numbers.core_planes):
        yield f"core{k}", _switch(numbers, "core", _trunks_per_core(numbers))


def _switch(numbers: Numbers, tier: Literal["aggregation", "core"], size: int) -> Switch:
    return Switch(
        driver="polatis-scpi",
        url="tcp://",
        ports=f"1-{2 * size}",
        tier=tier,
        circuits="duplex" if numbers.duplex else "simplex",
        switch_ms=numbers.switching_ms,
        emulate=EmulatedUnit(ports=size, switch_ms=numbers.switching_ms),
    )


def _uplinks(numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Yield the rows of the uplinks; ports of an aggregation switch count through its ToRs."""
    planes, own = numbers.aggregation_planes, numbers.has_own_planes
    for tor in range(numbers.tors):
        pod, seat = divmod(tor, numbers.tors_per_pod) if own else (0, tor)
        for uplink in range(numbers.uplinks_per_tor):
            turn, plane = divmod(uplink, planes)
            port = seat * (numbers.uplinks_per_tor // planes) + turn + 1
            yield f"tor{tor}:u{uplink + 1}", f"agg{pod * planes + plane}:{port}"


def _trunks(numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Yield the rows of the trunks, dealt to the cores in turn."""
    cores, per_plane = numbers.core_planes, _trunks_per_plane(numbers)
    for number in range(numbers.pods * numbers.trunks_per_pod):
        plane, seat = divmod(number, per_plane)
        port = _uplinks_per_plane(numbers) + seat + 1
        yield f"agg{plane}:{port}", f"core{number % cores}:{number // cores + 1}"


# -- what must hold --------------------------------------------------------------------------------


def numbers_problems(numbers: Numbers, world: World) -> Iterator[str]:
    """Yield what is wrong, the plainest first: not all of it makes sense where some is wrong."""
    yield from _sizes(numbers, world)
    yield from _tiers(numbers)
    yield from _shares(numbers)


def _sizes(numbers: Numbers, world: World) -> Iterator[str]:
    simulated = world == "simulated"
    tors_max = SIMULATED_TORS_MAX if simulated else TORS_MAX
    if not 1 <= len(numbers.roles) <= tors_max or set(numbers.roles) - {"train", "generate"}:
        yield 'roles: expected "train" or "generate" for each pod, one pod or more'
    planes_min = 1 if numbers.uplinks_per_tor else 0
    for key, least, most in (
        ("tors_per_pod", 1, tors_max // max(1, numbers.pods)),
        ("nodes_per_tor", 1, SIMULATED_NODES_MAX if simulated else NODES_MAX),
        ("gpus_per_node", 1, GPUS_MAX),
        ("nics_per_node", 1, GPUS_MAX if simulated else 1),
        ("rails", 1, max(1, numbers.nics_per_node)),
        ("uplinks_per_tor", 0, UPLINKS_MAX),
        ("aggregation_planes", planes_min, UPLINKS_MAX if planes_min else 0),
    ):
        if not least <= getattr(numbers, key) <= most:
            yield f"{key} = {getattr(numbers, key)}: expected {least} to {most}"
    for key in ("core_planes", "trunks_per_pod"):
        if getattr(numbers, key) < 0:
            yield f"{key} = {getattr(numbers, key)}: expected 0 or more"
    for key in ("link_gbit_per_s", "oversubscription", "switching_ms"):
        if not getattr(numbers, key) > 0:
            yield f"{key} = {getattr(numbers, key)}: expected more than 0"


def _tiers(numbers: Numbers) -> Iterator[str]:
    cores, trunks = numbers.core_planes, numbers.trunks_per_pod
    if bool(cores) != bool(trunks):
        yield (
            f"core_planes = {cores} with trunks_per_pod = {trunks}: a core needs trunks, and they "
            "need a core; set both, or both to 0"
        )
    if cores and numbers.pods < 2:
        yield f"core_planes = {cores}: a core joins pods, and there is one; use core_planes = 0"


def _shares(numbers: Numbers) -> Iterator[str]:
    """Yield what cannot be dealt out evenly, or to more ports than a switch can have."""
    for key, over in (
        ("nics_per_node", "rails"),
        ("tors_per_pod", "rails"),
        ("uplinks_per_tor", "aggregation_planes"),
        ("trunks_per_pod", "aggregation_planes"),
        ("trunks_per_pod", "core_planes"),
    ):
        number, parts = getattr(numbers, key), getattr(numbers, over)
        if parts and number % parts:
            near = max(1, round(number / parts)) * parts
            yield (
                f"{key} = {number} cannot be dealt evenly to {over} = {parts}; {key} = {near} can"
            )
    fibres = _uplinks_per_plane(numbers) + _trunks_per_plane(numbers)
    ports = 2 * max(fibres, _trunks_per_core(numbers))
    if ports > PORT_MAX:
        yield f"a switch would have {ports} ports, {PORT_MAX} are the most; use more planes"
