"""One protocol for the three worlds: what the orchestrator may ask of a bench.

A bench hands out connected agents, switches that can be read and applied, and ToRs that can be
steered. All verbs are coroutines with limits of their own; none of them decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from drivers.base import Applied, Identity, Matching
from drivers.errors import NoLight
from drivers.tor.base import Route
from harness.clock import Clock
from harness.fabric.topology import Topology
from harness.model.bench import Switch, Tor
from harness.wire.messages import Hello, Message, Note
from harness.wire.timesync import ClockFit

R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Switched:
    """A map applied, and its light; stamps on the coordinator's clock."""

    applied: Applied
    light_ns: int | None
    """When all that was made had light; None where nobody can measure it, or it has none."""
    device_ns: int
    """Of the whole time, what was spent waiting for the unit: blocked on its line, or for light."""
    dark: NoLight | None = None
    """The egress ports that stayed dark."""


class SwitchHandle(Protocol):
    """One switch behind its own worker thread: a call never blocks the event loop."""

    @property
    def name(self) -> str:
        """As in the bench file."""

    @property
    def spec(self) -> Switch:
        """As in the bench file, with the URL and known_hosts that are really used."""

    @property
    def typical_switch_ns(self) -> int:
        """What the unit's family and model usually take."""

    async def identify(self) -> Identity:
        """Ask who it is."""

    async def read(self) -> Matching:
        """Read the part of the map that is ours."""

    async def apply(self, wanted: Matching) -> Applied:
        """Make `wanted` our part of the map, verified by read-back; foreign circuits stay."""

    async def prepare(self, wanted: Matching) -> None:
        """Read the map and work out the change to `wanted` beforehand; faults wait for `switch`.

        Only a `switch` to the same map that comes next makes use of it; `apply` always reads.
        """

    async def switch(self, wanted: Matching) -> Switched:
        """Apply as `apply` does, then wait for the light of what was made."""


class TorHandle(Protocol):
    """One ToR that is steered."""

    @property
    def spec(self) -> Tor:
        """As in the bench file, with the URL and known_hosts that are really used."""

    @property
    def limit_s(self) -> float:
        """How long one change of its routes may take."""


class Bench(Protocol):
    """A running bench, entered with ``async with``; leaving it stops all that it started."""

    @property
    def topology(self) -> Topology:
        """What is cabled to what."""

    @property
    def clock(self) -> Clock:
        """The coordinator's."""

    @property
    def switches(self) -> Mapping[str, SwitchHandle]:
        """Open switches."""

    @property
    def tors(self) -> Mapping[str, TorHandle]:
        """Open ToRs: those that are steered."""

    @property
    def hellos(self) -> Mapping[str, Hello]:
        """Per connected agent, what it said of itself. Nodes always have one; ToRs may."""

    @property
    def clocks(self) -> Mapping[str, ClockFit]:
        """Per agent, the mapping of its clock onto the coordinator's, with its bound."""

    @property
    def store(self) -> str:
        """``HOST:PORT`` of the ranks' rendezvous store, owned outside the ranks."""

    async def ask(self, agent: str, body: Message, reply: type[R], timeout_ns: int) -> R:
        """Send one command to one agent and return its answer.

        Raises `AgentLost` when it stops answering and `StepFailed` when it answers `Failure`.
        """

    async def ask_all(
        self, bodies: Mapping[str, Message], reply: type[R], timeout_ns: int
    ) -> dict[str, R]:
        """Ask several agents at once; all answers, or one error that names every agent at fault."""

    async def steer(self, wanted: Mapping[str, frozenset[Route]]) -> None:
        """Make these the steering routes of these ToRs; raises `SteeringFailed`."""

    async def electrical(self, oversubscription: float | None) -> None:
        """Let the electrical path of each ToR carry its hosts' rates divided by this.

        1 is an ideal fabric, which blocks nobody; None: as the bench file says. Raises `UsageError`
        where there is no path of ours to change: on a live bench, or control plane only.
        """

    async def news(self) -> tuple[str, Note]:
        """Wait for the next unasked note of an agent: (agent, note)."""
