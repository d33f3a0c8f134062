"""An instance as the coordinator sees it: where it is, what it takes, how it fares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.model.placement import Instance
from harness.scheduling.watchdog import Life
from harness.wire.generation import Built, Capacity, Stats


@dataclass(eq=False)
class Place:
    """One built instance. `serial` counts builds: an instance of the same name is another place.

    `wanted` says whether the router is to send requests here. `dead` says why it is given up; ""
    while it lives. `stats` have their stamps on the coordinator's clock; None until first told.
    """

    node: str
    instance: Instance
    capacity: Capacity
    kv_peers: tuple[str, ...]
    serial: int
    sampled: Stats
    """As of the last row of progress."""
    rated: Stats
    """As of when the service rate was taken last."""
    stats: Stats | None = None
    wanted: bool = False
    admitting: bool = True
    """Whether the engine lets waiting requests in."""
    dead: str = ""
    loading: bool = False
    """Whether it is being given new weights, and so need not get any further."""
    arriving: set[str] = field(default_factory=set)
    """Requests on their way here: sent, and not answered yet."""
    leaving: set[str] = field(default_factory=set)
    """Requests that are being withdrawn: they end here because they were asked to."""
    moving: dict[str, int] = field(default_factory=dict)
    """Requests that are being moved here, and their known tokens: room is kept for them."""
    sent_since: int = 0
    """Requests sent that `stats` may not count yet."""
    tokens_per_s: float = 0.0
    """Its service rate lately; 0: not known."""
    built_in_round: int = 0
    """Watch of its node in which it was built: what that one tells may be of its predecessor."""
    life: Life | None = None

    @property
    def name(self) -> str:
        """The instance's name in the fleet."""
        return self.instance.name

    @property
    def accepting(self) -> bool:
        """Whether the router may send requests here."""
        return self.wanted and not self.dead

    @property
    def length_max_tokens(self) -> int:
        """The longest request it can hold: the last token of a response needs no KV."""
        capacity = self.capacity
        return min(capacity.length_max_tokens, capacity.blocks * capacity.block_tokens + 1)


def built_place(node: str, instance: Instance, built: Built, serial: int, now_ns: int) -> Place:
    """Return the place of an instance that has just been built."""
    nothing = nothing_yet(now_ns)
    return Place(
        node=node,
        instance=instance,
        capacity=built.capacities[instance.name],
        kv_peers=built.kv_peers.get(instance.name, ()),
        serial=serial,
        sampled=nothing,
        rated=nothing,
    )


def nothing_yet(t_ns: int) -> Stats:
    """Return the stats of an instance that has just been built."""
    return Stats(
        t_ns=t_ns,
        running=0,
        waiting=0,
        kv_blocks_used=0,
        kv_blocks=0,
        generated_tokens=0,
        prefilled_tokens=0,
        cached_tokens=0,
        preemptions=0,
        steps=0,
    )


def by_node(places: Iterable[Place]) -> dict[str, tuple[str, ...]]:
    """Return the names of these places by node."""
    names: dict[str, tuple[str, ...]] = {}
    for place in places:
        names[place.node] = (*names.get(place.node, ()), place.name)
    return names


def engine_row(place: Place, facts: Mapping[str, str]) -> dict[str, object]:
    """Return the row of an instance that has been built, with what its node says of the engine."""
    capacity = place.capacity
    return {
        "instance": place.name,
        "node": place.node,
        "gpus": list(place.instance.gpus),
        "layout": str(place.instance.layout).removeprefix("1x"),
        "blocks": capacity.blocks,
        "block_tokens": capacity.block_tokens,
        "weights_bytes": capacity.weights_bytes,
        **{key: facts.get(key, "") for key in ("engine", "version", "device")},
    }
