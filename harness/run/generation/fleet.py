"""The instances of a run and the requests in them, as one thing to command.

State changes only on the event loop. Beside whoever commands it, the fleet watches each node (one
long poll at a time: outputs into the ledger, stats, deaths), sends queued requests to instances,
gives up instances that died or stall and starts them anew. Whoever changes the layout holds
`changing` meanwhile, so that no restart comes in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from harness.model.layout import Layout
from harness.model.placement import Instance
from harness.model.replay import ReplayRequest
from harness.model.requests import Carried
from harness.run.generation.ledger import Ledger
from harness.run.generation.places import Place
from harness.run.session import Session
from harness.wire.generation import (
    Built,
    EngineSpec,
    KvTarget,
    Prepared,
    Span,
    Strategy,
    Submitted,
    Torn,
    Verb,
    Work,
)


@dataclass(frozen=True)
class Left:
    """What a withdrawal took: now `held` in the ledger, with all of its output delivered.

    `carried` as the engines told it, by id; `sent_bytes` by id; spans by node, mapped onto the
    coordinator's clock. `ids` also has requests that an engine did not know.
    """

    ids: tuple[str, ...]
    carried: Mapping[str, Carried]
    sent_bytes: Mapping[str, int]
    spans: Mapping[str, tuple[Span, ...]]


class Fleet:
    """See the module. Names are of instances; `placed` gives each node's instances.

    Commands ask all nodes concerned at once and return when all have answered. Spans in answers
    are on the nodes' clocks (``session.at``), but for `Left`. They raise `CommandFailed` where
    nodes answered `Failure` (``.failures`` by node) and `AgentLost` where nodes are lost; what
    succeeded on the other nodes is registered all the same.
    """

    session: Session
    spec: EngineSpec
    layout: Layout | None
    """What is up, as whoever changes it says."""
    ledger: Ledger
    places: dict[str, Place]
    gpus_of: dict[str, int]
    lost: dict[str, str]
    """Nodes that are out for good, and why."""
    changing: asyncio.Lock

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        session: Session,
        spec: EngineSpec,
        gpus_of: Mapping[str, int],
        prebuild: Sequence[Mapping[str, tuple[Instance, ...]]] = (),
        *,
        stall_ns: int,
        timeout_ns: int,
    ) -> AsyncIterator[Fleet]:
        """Start the ranks, watch the nodes while the body runs, and close all of it."""
        raise NotImplementedError
        yield

    # -- engines ------------------------------------------------------------------------

    async def prepare(
        self, placed: Mapping[str, tuple[Instance, ...]], strategy: Strategy, timeout_ns: int
    ) -> dict[str, Prepared]:
        """Ask whether these could be all that runs on these nodes; nothing is changed."""
        raise NotImplementedError

    async def build(
        self, placed: Mapping[str, tuple[Instance, ...]], strategy: Strategy, timeout_ns: int
    ) -> dict[str, Built]:
        """Build instances; they are registered, but not accepting."""
        raise NotImplementedError

    async def tear_down(
        self, names: Iterable[str], strategy: Strategy, timeout_ns: int, *, force: bool = False
    ) -> dict[str, Torn]:
        """End instances; they are registered no longer.

        Without `force` they must hold no request (else `ValueError`); with it their requests go
        back to the queue, and are sent wherever `accept` allows.
        """
        raise NotImplementedError

    async def admission(self, names: Iterable[str], *, allowed: bool, timeout_ns: int) -> None:
        """Let engines admit waiting requests, or not."""
        raise NotImplementedError

    # -- requests -----------------------------------------------------------------------

    def accept(self, names: Iterable[str]) -> None:
        """Let the router send requests to these instances."""
        raise NotImplementedError

    def refuse(self, names: Iterable[str]) -> None:
        """Let it send them none; those under way still arrive."""
        raise NotImplementedError

    def add(self, requests: Iterable[ReplayRequest]) -> None:
        """Queue new requests, each to be sent to the least loaded instance that can hold it."""
        raise NotImplementedError

    def requeue(self, ids: Iterable[str]) -> None:
        """Queue held requests, ahead of those that never began."""
        raise NotImplementedError

    async def submit_to(self, name: str, works: Sequence[Work], timeout_ns: int) -> Submitted:
        """Send held requests to one instance, past the router; those it refuses stay held."""
        raise NotImplementedError

    async def withdraw(
        self,
        names: Iterable[str],
        *,
        ids: Iterable[str] = (),
        verb: Verb = "abort",
        to: KvTarget | None = None,
        timeout_ns: int,
    ) -> Left:
        """Take requests out: `ids` of one instance, or all of several, which then `refuse` more.

        Returns when all of their output is in the ledger; one that finished meanwhile is finished.
        """
        raise NotImplementedError

    async def drained(self, names: Iterable[str], timeout_ns: int) -> bool:
        """Wait until nothing runs in these instances (whose admission is closed)."""
        raise NotImplementedError

    async def until(self, predicate: Callable[[], bool], timeout_ns: int) -> bool:
        """Wait until `predicate` holds, looked at again whenever something happened.

        Returns whether it holds in the end. Raises `StepFailed` when no instance is left.
        """
        raise NotImplementedError
