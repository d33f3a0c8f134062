"""An instance as the coordinator sees it: where it is, what it takes, how it fares."""

from __future__ import annotations

from dataclasses import dataclass

from harness.model.placement import Instance
from harness.wire.generation import Capacity, Stats


@dataclass(eq=False)
class Place:
    """One built instance. `serial` counts builds: an instance of the same name is another place.

    `accepting` says whether the router may send requests here. `dead` says why it is given up; ""
    while it lives. `stats` have their stamps on the coordinator's clock; None until first told.
    """

    node: str
    instance: Instance
    capacity: Capacity
    kv_peers: tuple[str, ...]
    serial: int
    stats: Stats | None = None
    accepting: bool = False
    admitting: bool = True
    """Whether the engine lets waiting requests in."""
    dead: str = ""

    @property
    def name(self) -> str:
        """The instance's name in the fleet."""
        return self.instance.name
