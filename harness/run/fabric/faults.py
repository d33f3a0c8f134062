"""What of the fabric is not to be used, and when those who failed are asked again. No I/O.

A part (an uplink, a trunk) that broke stays out as long as the arm lasts: there is nobody to ask.
Switches and ToRs are asked again, each time after twice as long, so that one which answers but
fails whenever it is used costs little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.links import Link

FIRST_NS, LONGEST_NS = 100 * NS_PER_MS, 60 * NS_PER_S
"""How long the first of those waits is, and the longest."""


@dataclass
class Faults:
    """What is wrong now, each with its reason."""

    broken: dict[str, str] = field(default_factory=dict)
    """Parts and switches that are not planned with."""
    unsteered: dict[str, str] = field(default_factory=dict)
    """ToRs that did not take their routes: what those lead over stays as it is."""
    _over: dict[str, frozenset[Link]] = field(default_factory=dict)
    """By such a ToR, the links that its routes may lead over."""
    _due_ns: dict[str, int] = field(default_factory=dict)
    _wait_ns: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """All that is not as it should be."""
        return frozenset((*self.broken, *self.unsteered))

    @property
    def led_over(self) -> frozenset[Link]:
        """Links that ToRs which refused may send over still."""
        return frozenset().union(*self._over.values())

    def unsteer(self, failures: Mapping[str, str], lit: frozenset[Link], now_ns: int) -> list[str]:
        """Note ToRs that kept their routes, which led over `lit`; return those that are new."""
        new = [tor for tor in failures if tor not in self.unsteered]
        for tor in new:
            self.unsteered[tor] = failures[tor]
            self._over[tor] = frozenset(link for link in lit if tor in (link.a.tor, link.b.tor))
            self.failed(tor, now_ns)
        return new

    def may_refuse(self, tor: str, links: frozenset[Link]) -> bool:
        """Whether the routes of a ToR lead over nothing but `links` even where it refuses."""
        return tor in self._over and self._over[tor] <= links

    def failed(self, name: str, now_ns: int) -> None:
        """Note that a switch or a ToR failed: it is asked again, later than the last time."""
        wait_ns = min(2 * self._wait_ns.get(name, FIRST_NS // 2), LONGEST_NS)
        self._wait_ns[name], self._due_ns[name] = wait_ns, now_ns + wait_ns

    def to_ask(self, now_ns: int) -> list[str]:
        """Return the switches and ToRs whose time has come."""
        return [name for name, due_ns in self._due_ns.items() if due_ns <= now_ns]

    def back(self, name: str) -> None:
        """Use a switch or a ToR again."""
        for there in (self.broken, self.unsteered, self._over, self._due_ns):
            there.pop(name, None)
