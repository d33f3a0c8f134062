"""The simulated labour of weight sync: a node's porter, as `agents.porter` is one, in virtual time.

Files are entries of the world: ``("weights", node, path)`` is (version, bytes, checksum). How they
come is `harness.bench.simulated.cargo`; here a node is asked and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from harness.bench.simulated.cargo import Cargo, Ended, Hop, Offer
from harness.bench.simulated.deadline import left_s
from harness.bench.simulated.world import Verb, World
from harness.errors import InfrastructureError
from harness.model.intake import Refused
from harness.tasks import beside, together
from harness.wire.generation import Span
from harness.wire.messages import Done, Failure, Message
from harness.wire.weights import (
    ClosePorter,
    ExpectWeights,
    ForgetWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)

PORT = 29600
_EARLY_S = 5.0
"""A sender may be faster than the order to expect it; so long it waits for that."""


class NotOpen(InfrastructureError):
    """There is no porter on this node."""


class _Expected:
    """A transfer that this node waits for, or has under way."""

    def __init__(self, order: ExpectWeights) -> None:
        self.order = order
        self.offered: asyncio.Future[Cargo] = asyncio.get_running_loop().create_future()

    def end(self, why: Ended) -> None:
        """End it, wherever it is."""
        if not self.offered.done():
            self.offered.set_exception(why)
        elif not self.offered.exception():
            self.offered.result().end(why)


class Porter:
    """See the module, and `harness.bench.simulated.world.Labour`."""

    def __init__(self, world: World, node: str) -> None:
        self.node = node
        self._world = world
        self._address = ""
        self._versions: list[int] = []
        """Whose files are here."""
        self._expected: _Expected | None = None
        self._sending: Cargo | None = None
        self._changed = asyncio.Event()
        """Set when something else is expected; a new one then."""

    def verbs(self) -> Mapping[type[Message], Verb]:
        """Return who answers what."""
        return {
            OpenPorter: self._on_open,
            ExpectWeights: _answering(self._on_expect),
            SendWeights: _answering(self._on_send),
            ForgetWeights: self._on_forget,
            ClosePorter: self._on_close,
        }

    def close(self) -> None:
        """End the porter and delete its files."""
        closed = Ended("Closed", "the porter was closed")
        for one in (self._expected, self._sending):
            if one is not None:
                one.end(closed)
        self._forget(self._versions)
        self._world.shared.pop(("porter", self._listen), None)
        self._address, self._expected, self._sending = "", None, None

    # -- orders ----------------------------------------------------------------------------------

    async def _on_open(self, asked: OpenPorter) -> Message:
        if self._address and asked.address != self._address:
            raise Refused(f"the porter listens at {self._listen}: close it first")
        self._address = asked.address
        self._world.shared["porter", self._listen] = self
        return PorterOpen(listen=self._listen, pid=0)

    async def _on_forget(self, asked: ForgetWeights) -> Message:
        self._check_open()
        self._forget([version for version in self._versions if version < asked.keep_from])
        return self._done()

    async def _on_close(self, _asked: ClosePorter) -> Message:
        self.close()
        return self._done()

    async def _on_send(self, asked: SendWeights) -> Message:
        self._check_open()
        if self._sending is not None:
            self._sending.end(_superseded(asked))
        found = self._world.shared.get(("weights", self.node, asked.path))
        if found is None:
            raise Ended("NoFile", f"{asked.path}: No such file or directory")
        _, size, checksum = found
        sent = asked.transfer, asked.version, size, checksum
        offer = Offer(*sent, asked.bucket_bytes, asked.stall_ns)
        cargo = self._sending = Cargo.of_file(offer)
        hops, begin_ns = self._hops(cargo, asked.children), self._now_ns()
        await self._by_deadline(cargo, [hop.run() for hop in hops])
        cargo.check()
        return _lost(hops) or WeightsSent(
            moved_bytes=size * len(hops),
            buckets=offer.buckets,
            checksum=checksum,
            spans=(self._span("send", hops, begin_ns),),
        )

    async def _on_expect(self, asked: ExpectWeights) -> Message:
        self._check_open()
        if self._expected is not None:
            self._expected.end(_superseded(asked))
        expected = self._expected = _Expected(asked)
        self._changed.set()
        self._changed = asyncio.Event()
        try:
            left = left_s(self._world.clock)
            if not (await asyncio.wait([expected.offered], timeout=left))[0]:
                raise Ended("Late", "nobody sent anything by the deadline")
            return await self._arrived(expected.offered.result(), asked.children)
        finally:
            if self._expected is expected:
                self._expected = None

    async def _arrived(self, cargo: Cargo, children: Sequence[str]) -> Message:
        """Have a file come, keep it, pass it on, and say how it went."""
        offer, begin_ns, hops = cargo.offer, self._now_ns(), self._hops(cargo, children)
        await self._by_deadline(cargo, [self._keep(cargo), *(hop.run() for hop in hops)])
        cargo.check()
        received_ns, verified_ns = cargo.received_ns, cargo.verified_ns
        return _lost(hops) or WeightsArrived(
            path=_path(offer.version),
            version=offer.version,
            moved_bytes=offer.size_bytes,
            checksum=offer.checksum,
            spans=(
                Span(stage="receive", begin_ns=begin_ns, end_ns=received_ns),
                Span(stage="verify", begin_ns=received_ns, end_ns=verified_ns),
                *([self._span("forward", hops, begin_ns)] if hops else []),
            ),
        )

    async def _by_deadline(self, cargo: Cargo, works: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Have all done; what is not by the deadline is given up."""
        async with beside(together(works)) as working:
            await asyncio.wait([working], timeout=left_s(self._world.clock))
            if working.done():
                working.result()
            elif not cargo.whole.done():
                had = f"{cargo.had} of {cargo.offer.buckets} buckets had come"
                cargo.end(Ended("Late", f"{had} by the deadline"))

    async def _keep(self, cargo: Cargo) -> None:
        """Have the file here once all of it is."""
        await asyncio.wait([cargo.whole])
        if cargo.whole.exception():
            return
        offer = cargo.offer
        content = offer.version, offer.size_bytes, offer.checksum
        self._world.shared["weights", self.node, _path(offer.version)] = content
        self._versions = sorted({*self._versions, offer.version})

    # -- doors -----------------------------------------------------------------------------------

    async def take(self, offer: Offer) -> Cargo:
        """Return the cargo to be filled. Raises `Ended` where it is not expected."""
        expected = await self._awaited(offer.transfer)
        if expected is None or expected.offered.done():
            raise Ended("ChildLost", "this node does not expect that transfer")
        if offer.version != expected.order.version:
            text = f"version {offer.version} was sent; {expected.order.version} is expected"
            expected.end(Ended("WrongVersion", text))
            raise Ended("ChildLost", text)
        cargo = Cargo(offer)
        expected.offered.set_result(cargo)
        return cargo

    async def _awaited(self, transfer: str) -> _Expected | None:
        try:
            async with asyncio.timeout(_EARLY_S):
                while self._expected is None or self._expected.order.transfer != transfer:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._expected

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _listen(self) -> str:
        return f"{self._address}:{PORT}"

    def _check_open(self) -> None:
        if not self._address:
            raise NotOpen("no porter is open on this node")

    def _forget(self, versions: Sequence[int]) -> None:
        for version in versions:
            del self._world.shared["weights", self.node, _path(version)]
        self._versions = [version for version in self._versions if version not in versions]

    def _hops(self, cargo: Cargo, peers: Sequence[str]) -> list[Hop]:
        return [Hop(self._world, self.node, cargo, peer) for peer in peers]

    def _span(self, stage: str, hops: Sequence[Hop], begin_ns: int) -> Span:
        begins_ns = min((hop.begin_ns for hop in hops), default=begin_ns)
        return Span(stage=stage, begin_ns=begins_ns, end_ns=self._now_ns())

    def _now_ns(self) -> int:
        return self._world.clock.now_ns()

    def _done(self) -> Done:
        return Done(t_ns=self._now_ns())


def _answering(verb: Verb) -> Verb:
    """Return a verb for which a transfer that ends is an answer."""

    async def answer(asked: Message) -> Message:
        try:
            return await verb(asked)
        except Ended as ended:
            return Failure(error=ended.error, text=ended.text)

    return answer


def _superseded(order: ExpectWeights | SendWeights) -> Ended:
    text = f"transfer {order.transfer} of version {order.version} takes its place"
    return Ended("Superseded", text)


def _lost(hops: Sequence[Hop]) -> Failure | None:
    """Return the failure that names the children that did not get all; None: all did."""
    lost = [str(hop) for hop in hops if hop.problem]
    return Failure(error="ChildLost", text="; ".join(lost)) if lost else None


def _path(version: int) -> str:
    return f"weights/{version}.safetensors"
