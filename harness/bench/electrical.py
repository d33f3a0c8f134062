"""The electrical path of an emulated network while it is in use: its rates, and links that go down.

`ElectricalPath` needs no more than the network's prefix, so that any process with rights over the
namespaces may use one: a bench for its arm without oversubscription, a test that cuts a cable.
Raises `OSError` where the network is gone. Calls take milliseconds.
"""

from __future__ import annotations

from functools import partial

import msgspec

from drivers.interfaces import Interfaces, TokenBucket
from drivers.netlink import run_in
from harness.bench.namespaces import bring_up
from harness.bench.wiring import ELECTRICAL_DEVICE, Port, Room, electrical_room, room_name
from harness.errors import UsageError
from harness.fabric.topology import Topology
from harness.model.bench import Links


class ElectricalPath:
    """The electrical path of the network under `prefix`; `links` as its bench file says."""

    def __init__(self, topology: Topology, links: Links, prefix: str) -> None:
        self._topology, self._links, self._prefix = topology, links, prefix

    def oversubscribe(self, oversubscription: float | None) -> None:
        """Let every ToR's path carry its hosts' rates divided by this; None: as the file says.

        Packets that wait are kept. 1 is a fabric that blocks nobody. Raises `UsageError` unless it
        is more than 0.
        """
        if oversubscription is None:
            oversubscription = self._links.oversubscription
        if not oversubscription > 0:
            raise UsageError(f"oversubscription: {oversubscription:g}; expected more than 0")
        room = self._room(oversubscription)
        for tor, port in zip(self._topology.tors, room.ports, strict=True):
            assert port.bucket, f"{port.name} has no rate"
            own = room_name(self._prefix, tor)
            run_in(own, partial(_shape, [(ELECTRICAL_DEVICE, port.bucket)]))
        run_in(room.netns, partial(_shape, [(p.name, p.bucket) for p in room.ports if p.bucket]))

    def plug(self, tor: str, *, plugged: bool) -> None:
        """Pull the electrical link of `tor` out, or plug it in again; both ends see it.

        As any link it takes a moment to come up, after this returns.
        """
        room = self._room(self._links.oversubscription)
        port = dict(zip(self._topology.tors, room.ports, strict=True))[tor]
        run_in(room.netns, partial(_plug, room, port, plugged))

    def _room(self, oversubscription: float) -> Room:
        links = msgspec.structs.replace(self._links, oversubscription=oversubscription)
        return electrical_room(self._topology, links, self._prefix)


def _shape(buckets: list[tuple[str, TokenBucket]]) -> None:
    with Interfaces() as interfaces:
        for name, bucket in buckets:
            interfaces.shape(name, bucket)


def _plug(room: Room, port: Port, plugged: bool) -> None:
    with Interfaces() as interfaces:
        if plugged:
            bring_up(interfaces, room, port)
        else:
            interfaces.down(port.name)
