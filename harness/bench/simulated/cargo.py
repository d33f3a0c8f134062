"""A file of weights on its way over one hop, from node to node, bucket by bucket.

A node sends a bucket on as soon as it has it. So a hop begins when the first bucket is there, goes
on at the rate of what is slower, the network or the host, and ends no earlier than one bucket after
the last has come. That is four carries a hop (`harness.rlsim.parts`), however many buckets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from harness.bench.simulated.world import Flow, World
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError
from harness.rlsim.parts import Parts
from harness.tasks import beside

TIME_IS_UP = "the time is up"


class Ended(InfrastructureError):
    """A transfer that will not be completed, and why: `error` is a failure's name."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(error, text)
        self.error, self.text = error, text

    def __str__(self) -> str:
        return self.text


class Offer(NamedTuple):
    """A transfer, as a sender offers it."""

    transfer: str
    version: int
    size_bytes: int
    checksum: int
    bucket_bytes: int
    stall_ns: int
    """A sender for whom nothing moves for so long gives up."""

    @property
    def buckets(self) -> int:
        """How many there are; the last may be shorter."""
        return -(-self.size_bytes // self.bucket_bytes)

    @property
    def parts(self) -> Parts:
        """What is carried at once."""
        return Parts.of(self.size_bytes, self.bucket_bytes)


def _moment() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Cargo:
    """A file at one node, as far as it has come there."""

    offer: Offer
    begun: asyncio.Future[None] = field(default_factory=_moment)
    """The first bucket is here: it can be sent on."""
    nearly: asyncio.Future[None] = field(default_factory=_moment)
    """All but the last bucket is here."""
    whole: asyncio.Future[None] = field(default_factory=_moment)
    """All of it is here, and sound."""
    lost: asyncio.Future[None] = field(default_factory=_moment)
    """It was ended: all of these raise why."""
    had: int = 0
    """Buckets that are here for certain."""
    received_ns: int = 0
    verified_ns: int = 0

    @classmethod
    def of_file(cls, offer: Offer) -> Cargo:
        """Return one of which all is here."""
        cargo = cls(offer)
        for moment in (cargo.begun, cargo.nearly, cargo.whole):
            moment.set_result(None)
        return cargo

    def end(self, why: Ended) -> None:
        """End it where it is, for all who wait for more of it; the first reason stays."""
        for moment in (self.begun, self.nearly, self.whole, self.lost):
            if not moment.done():
                moment.set_exception(why)
                moment.exception()  # seen: it may be that nobody waits

    def check(self) -> None:
        """Raise `Ended` if it was."""
        if self.lost.done():
            self.lost.result()


class Receiver(Protocol):
    """A node that takes transfers."""

    node: str

    async def take(self, offer: Offer) -> Cargo:
        """Return the cargo to be filled. Raises `Ended` where it is not expected."""


class Hop:
    """One child's share of a transfer; `problem` says why it did not get all."""

    def __init__(self, world: World, node: str, cargo: Cargo, peer: str) -> None:
        self._world, self._node, self._cargo = world, node, cargo
        self.peer, self.had, self.problem = peer, 0, ""
        self.begin_ns = 0
        """When the first byte of a bucket was sent."""

    async def run(self) -> None:
        """Connect, offer, and send all as it comes."""
        receiver: Receiver | None = self._world.shared.get(("porter", self.peer))
        if receiver is None:
            self.problem = "[Errno 111] Connection refused"
            return
        try:
            await self._world.takes(self._world.figures.sync.carry_fixed_s)
            await self._fill(await receiver.take(self._cargo.offer), receiver.node)
        except Ended as ended:
            self.problem = str(ended)
        except asyncio.CancelledError:
            self.problem = "was not done by the deadline"
            raise

    async def _fill(self, far: Cargo, child: str) -> None:
        near, offer, clock = self._cargo, self._cargo.offer, self._world.clock
        parts = offer.parts
        try:
            await near.begun
            if not near.whole.done():
                await self._world.takes(self._host_s(parts.first))  # a bucket is verified first
            await self._send(parts.first, child, far)
            far.begun.set_result(None)
            ready_ns = self._host_ns(offer.size_bytes - parts.last)
            await self._send(parts.between, child, far)
            await near.nearly
            await self._send(parts.full, child, far)
            far.nearly.set_result(None)
            ready_ns = max(ready_ns, self._host_ns(parts.full))
            await near.whole
            await self._send(parts.last, child, far)
        except (Ended, asyncio.CancelledError) as ended:
            had = f"{self.had} of {offer.buckets} buckets had come"
            far.end(Ended("ParentLost", f"the sender is lost ({str(ended) or TIME_IS_UP}): {had}"))
            raise
        await clock.sleep_ns(ready_ns - clock.now_ns())  # it takes in one after the other
        far.received_ns = clock.now_ns()
        await self._world.takes(self._host_s(parts.last))
        far.check()
        far.verified_ns = clock.now_ns()
        far.whole.set_result(None)

    async def _send(self, size_bytes: int, child: str, far: Cargo) -> None:
        """Send some of it, unless it is ended at either end."""
        if not size_bytes:
            return
        self.begin_ns = self.begin_ns or self._world.clock.now_ns()
        network, stall_ns = self._world.network, self._cargo.offer.stall_ns
        async with (
            beside(network.carry([Flow(self._node, child, size_bytes)])) as carrying,
            beside(network.stands_still(self._node, child, stall_ns)) as still,
        ):
            over = (carrying, still, far.lost, self._cargo.lost)
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            far.check()
            self._cargo.check()
            if not carrying.done():
                raise Ended("StoodStill", f"stood still for {stall_ns / NS_PER_S:g} s")
            await carrying
        self.had += -(-size_bytes // self._cargo.offer.bucket_bytes)
        far.had = self.had

    def _host_ns(self, size_bytes: int) -> int:
        """Return when a porter that begins now has verified so much."""
        return self._world.clock.now_ns() + round(self._host_s(size_bytes) * NS_PER_S)

    def _host_s(self, size_bytes: int) -> float:
        """Return how long a porter takes to verify so much and to begin sending it."""
        own, buckets = self._world.figures.sync, -(-size_bytes // self._cargo.offer.bucket_bytes)
        return size_bytes / 1e9 / own.carry_gb_per_s.value + buckets * own.bucket_us.value / 1e6

    def __str__(self) -> str:
        """Say which child it is, what went wrong, and how many buckets it had."""
        buckets = self._cargo.offer.buckets
        return f"{self.peer}: {self.problem}; it had {self.had} of {buckets} buckets"
