"""Which uplink of a simulated bench hears which: the light of all units followed port by port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from harness.bench.simulated.mirrors import Mirrors
from harness.fabric.links import Uplink
from harness.fabric.topology import Topology

Port = tuple[str, int]
"""A switch and one of its ports."""
Heed = Callable[[Sequence[Uplink]], None]
"""Told whose light has just come to arrive elsewhere, or nowhere."""


class Light:
    """The truth of light, dark at first. Those who are to hear of its changes are `listeners`."""

    def __init__(self, topology: Topology, mirrors: Mapping[str, Mirrors]) -> None:
        self.listeners: list[Heed] = []
        self._mirrors = mirrors
        self._sends = {(up.switch, up.ingress): up for up in topology.uplinks}
        self._hears = {(up.switch, up.egress): up for up in topology.uplinks}
        self._trunks = {(t.aggregation, t.to_core): (t.core, t.ingress) for t in topology.trunks}
        self._trunks |= {(t.core, t.egress): (t.aggregation, t.from_core) for t in topology.trunks}
        self._enters: dict[Port, Uplink] = dict(self._sends)
        """Whose light, as last followed, enters a switch by a port."""
        self._ways: dict[Uplink, list[Port]] = {up: [at] for at, up in self._sends.items()}
        self._far: dict[Uplink, Uplink] = {}
        self._near: dict[Uplink, Uplink] = {}
        for name, each in mirrors.items():
            each.heed = partial(self._relit, name)

    def far(self, sender: Uplink) -> Uplink | None:
        """Return the uplink that hears this one now."""
        return self._far.get(sender)

    def near(self, hearer: Uplink) -> Uplink | None:
        """Return the uplink that this one hears now."""
        return self._near.get(hearer)

    def _relit(self, switch: str, ingress: Sequence[int]) -> None:
        entered = dict.fromkeys(self._enters.get((switch, port)) for port in ingress)
        self._turned([sender for sender in entered if sender is not None])

    def _turned(self, senders: Sequence[Uplink]) -> None:
        """Follow their light again, and tell whose arrives elsewhere."""
        for sender in senders:
            for at in self._ways[sender][1:]:
                if self._enters.get(at) is sender:
                    del self._enters[at]
        before = {sender: self._far.pop(sender, None) for sender in senders}
        for far in before.values():
            if far is not None:
                del self._near[far]
        for sender in senders:
            if (far := self._followed(sender)) is not None:
                self._far[sender], self._near[far] = far, sender
        if moved := [sender for sender in senders if self._far.get(sender) is not before[sender]]:
            for listener in self.listeners:
                listener(moved)

    def _followed(self, sender: Uplink) -> Uplink | None:
        """Note by which ports the light of an uplink enters switches; return who hears it."""
        at = (sender.switch, sender.ingress)
        way = self._ways[sender] = [at]
        while (egress := self._mirrors[at[0]].lit.get(at[1])) is not None:
            left = (at[0], egress)
            if left not in self._trunks:
                return self._hears.get(left)
            at = self._trunks[left]
            way.append(at)
            self._enters[at] = sender
        return None
