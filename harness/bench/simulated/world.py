"""What all simulated agents share: the bench, the clock, the network, figures, and each other.

An agent is a few *labours*, each with verbs: what it does when it is sent a message, and what it
answers. Verbs are coroutines on the virtual clock; they take the time that the figures say and send
what they send over the network. Agents never hear of each other by messages of their own, as real
ranks do over theirs: they `meet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from harness.clock import Clock
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.model.simulation import Calibration, Figure
from harness.wire.messages import Message, Note

T = TypeVar("T")

Verb = Callable[[Any], Coroutine[Any, Any, Message]]
"""Answers one kind of message. A `Failure` that is returned fails the command."""


class Flow(NamedTuple):
    """Bytes of payload from a node to another one. `nic`: by its rail; None: over all it has."""

    source: str
    target: str
    bytes: float
    nic: int | None = None
    """The target's NIC of that number, from the source's beside it: nothing changes rails."""


class Network(Protocol):
    """Carries flows over links that they share fairly, wherever routes and light lead them."""

    async def carry(self, flows: Sequence[Flow]) -> None:
        """Send all of these from now on; return when the last byte of the last has arrived.

        A flow within one node, or of nothing, takes no time. Whoever is cancelled sends no more.
        """

    async def stands_still(self, source: str, target: str, for_ns: int) -> None:
        """Return when nothing could get from one node to the other for so long."""


class Labour(Protocol):
    """What an agent can be asked to do."""

    def verbs(self) -> Mapping[type[Message], Verb]:
        """Return who answers what."""

    def close(self) -> None:
        """End all that still goes on by itself."""


@dataclass(eq=False)
class World:
    """See the module. `seed` is the scenario's: whatever is drawn here follows from it."""

    bench: Bench
    topology: Topology
    clock: Clock
    figures: Calibration
    network: Network
    seed: int = 0
    notes: asyncio.Queue[tuple[str, Note]] = field(default_factory=asyncio.Queue)
    """What agents tell unasked: (agent, note)."""
    shared: dict[Hashable, Any] = field(default_factory=dict)
    """Whatever agents have made together, such as weights that were sent: by a key of their own."""
    _meetings: dict[Hashable, _Meeting] = field(default_factory=dict)

    def tell(
        self, agent: str, text: str, level: Literal["info", "warning", "error"] = "info"
    ) -> None:
        """Have an agent tell something unasked."""
        self.notes.put_nowait((agent, Note(level=level, text=text)))

    async def takes(self, seconds: Figure | float) -> None:
        """Let so much time pass, in s."""
        value = seconds.value if isinstance(seconds, Figure) else seconds
        await self.clock.sleep_ns(round(value * 1e9))

    async def meet(self, key: Hashable, parties: int, work: Callable[[], Awaitable[T]]) -> T:
        """Wait until so many have come under this key; one of them works, all get its result.

        What `work` raises, all raise. Whoever is cancelled has not come. A key can be used again
        once all have their result.
        """
        meeting = self._meetings.setdefault(key, _Meeting())
        meeting.came += 1
        try:
            if meeting.came == parties:
                del self._meetings[key]
                meeting.task = asyncio.ensure_future(_as_coroutine(work()))
                meeting.begun.set()
            await meeting.begun.wait()
            assert meeting.task is not None
            result: T = await asyncio.shield(meeting.task)
        except asyncio.CancelledError:
            meeting.came -= 1
            if not meeting.came:
                if meeting.task is not None:
                    meeting.task.cancel()
                elif self._meetings.get(key) is meeting:
                    del self._meetings[key]
            raise
        return result


@dataclass(eq=False)
class _Meeting:
    came: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Future[Any] | None = None


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work
