"""Benches made from a few numbers: pods, ToRs, planes and trunks, all alike. Pure.

The form is RailOCS3's, the public fabric nearest to RFabric's: ToRs, aggregation switches of each
pod, core switches between pods. Without a core, all pods hang on the same aggregation switches. The
k-th uplink of a ToR is on plane k, over again where there are more; trunks go to the cores in turn.

ToRs (``tor0``...), switches (``agg0``..., ``core0``...) and nodes (``n0``...) count through all
pods (``pod0``...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.errors import UsageError
from harness.fabric.topology import TORS_MAX
from harness.model.bench import Bench, EmulatedUnit, Links, Node, Switch, Tor
from harness.model.bench_rules import GPUS_MAX
from harness.model.ports import PORT_MAX
from harness.model.tor_rules import UPLINKS_MAX

Role = Literal["train", "generate"]
NODES_MAX = 245
"""Addresses of a ToR's /24, from .10 on."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a bench is made from. A node has one data port, on one ToR.

    `aggregation_planes` are those of a pod; without a core, of the whole bench. `roles` are those
    of the pods' nodes, one each.
    """

    roles: tuple[Role, ...]
    tors_per_pod: int
    nodes_per_tor: int
    gpus_per_node: int = 1
    uplinks_per_tor: int
    aggregation_planes: int
    core_planes: int = 0
    trunks_per_pod: int = 0
    link_gbit_per_s: float = 400.0
    oversubscription: float = 4.0
    switching_ms: float = 10.0
    duplex: bool = True

    @property
    def pods(self) -> int:
        """How many pods there are."""
        return len(self.roles)


REFERENCE = Numbers(
    roles=("train", "generate"),
    tors_per_pod=8,
    nodes_per_tor=32,
    uplinks_per_tor=32,
    aggregation_planes=32,
    core_planes=8,
    trunks_per_pod=256,
)
"""RailOCS3 as its authors run it: 2 x 256 GPUs, one ToR for each rail of 32 servers in a pod."""


def bench_of(
    numbers: Numbers, name: str = "generated", world: Literal["simulated", "emulated"] = "simulated"
) -> Bench:
    """Return the bench of these numbers; raises `UsageError` naming the first that does not fit."""
    for problem in _problems(numbers):
        raise UsageError(f"bench {name}: {problem}")
    pod_of = [k // numbers.tors_per_pod for k in range(numbers.pods * numbers.tors_per_pod)]
    return Bench(
        name=name,
        world=world,
        launcher="namespaces" if world == "emulated" else "manual",
        nodes={
            f"n{tor * numbers.nodes_per_tor + k}": Node(
                tor=f"tor{tor}", pod=numbers.roles[pod], emulated_gpus=numbers.gpus_per_node
            )
            for tor, pod in enumerate(pod_of)
            for k in range(numbers.nodes_per_tor)
        },
        tors={
            f"tor{tor}": Tor(uplinks=numbers.uplinks_per_tor, driver="netlink", pod=f"pod{pod}")
            for tor, pod in enumerate(pod_of)
        },
        switches=dict(_switches(numbers)),
        cables={**dict(_uplinks(numbers)), **dict(_trunks(numbers))},
        links=Links(
            link_mbit_per_s=numbers.link_gbit_per_s * 1000,
            oversubscription=numbers.oversubscription,
        ),
    )


# -- what is on which port -------------------------------------------------------------------------


def _own_planes(numbers: Numbers) -> bool:
    """Whether each pod has aggregation switches of its own."""
    return numbers.core_planes > 0


def _uplinks_per_plane(numbers: Numbers) -> int:
    """Return how many uplinks land on one aggregation switch."""
    pods = 1 if _own_planes(numbers) else numbers.pods
    return pods * numbers.tors_per_pod * numbers.uplinks_per_tor // numbers.aggregation_planes


def _switches(numbers: Numbers) -> Iterator[tuple[str, Switch]]:
    pods = numbers.pods if _own_planes(numbers) else 1
    trunks = numbers.trunks_per_pod // numbers.aggregation_planes
    for k in range(pods * numbers.aggregation_planes):
        yield f"agg{k}", _switch(numbers, "aggregation", _uplinks_per_plane(numbers) + trunks)
    for k in range(numbers.core_planes):
        yield f"core{k}", _switch(numbers, "core", _trunks_per_core(numbers))


def _trunks_per_core(numbers: Numbers) -> int:
    return numbers.pods * numbers.trunks_per_pod // numbers.core_planes


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
    planes, own = numbers.aggregation_planes, _own_planes(numbers)
    per_plane = numbers.uplinks_per_tor // planes
    for tor in range(numbers.pods * numbers.tors_per_pod):
        pod, seat = divmod(tor, numbers.tors_per_pod) if own else (0, tor)
        for uplink in range(numbers.uplinks_per_tor):
            turn, plane = divmod(uplink, planes)
            port = seat * per_plane + turn + 1
            yield f"tor{tor}:u{uplink + 1}", f"agg{pod * planes + plane}:{port}"


def _trunks(numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Yield the rows of the trunks, dealt to the cores in turn."""
    cores, planes = numbers.core_planes, numbers.aggregation_planes
    per_plane = numbers.trunks_per_pod // planes
    for number in range(numbers.pods * numbers.trunks_per_pod):
        plane, seat = divmod(number, per_plane)
        port = _uplinks_per_plane(numbers) + seat + 1
        yield f"agg{plane}:{port}", f"core{number % cores}:{number // cores + 1}"


# -- what must hold --------------------------------------------------------------------------------


def _problems(numbers: Numbers) -> Iterator[str]:
    """Yield what is wrong, the plainest first."""
    yield from _sizes(numbers)
    yield from _tiers(numbers)
    yield from _shares(numbers)


def _sizes(numbers: Numbers) -> Iterator[str]:
    if not 1 <= numbers.pods <= TORS_MAX or set(numbers.roles) - {"train", "generate"}:
        yield 'roles: expected "train" or "generate" for each pod, one pod or more'
    for key, most in (
        ("tors_per_pod", TORS_MAX // max(1, numbers.pods)),
        ("nodes_per_tor", NODES_MAX),
        ("gpus_per_node", GPUS_MAX),
        ("uplinks_per_tor", UPLINKS_MAX),
        ("aggregation_planes", UPLINKS_MAX),
    ):
        if not 1 <= getattr(numbers, key) <= most:
            yield f"{key} = {getattr(numbers, key)}: expected 1 to {most}"
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
    ports = 2 * (_uplinks_per_plane(numbers) + numbers.trunks_per_pod // numbers.aggregation_planes)
    if numbers.core_planes:
        ports = max(ports, 2 * _trunks_per_core(numbers))
    if ports > PORT_MAX:
        yield f"a switch would have {ports} ports, {PORT_MAX} are the most; use more planes"
