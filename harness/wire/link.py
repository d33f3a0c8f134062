"""The coordinator's side of the wire: who is there, ask one or many, and never wait for the dead.

A ROUTER that only speaks CURVE with keys of an allow-list; every message carries the name of its
key, so that nobody can speak for another. Heartbeats and clocks have their own socket and thread
(`wire.pulse`). A command is sent again until it is answered, the agent is lost or time is up;
agents answer a repeated command from memory, so sending twice is harmless.

Errors: `AgentsMissing`, `AgentLost`, `CommandFailed` (a `StepFailed`), `UsageError`; a plain
`HarnessError` where an agent met a bug of ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar, cast

import zmq

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import (
    AgentLost,
    AgentsMissing,
    HarnessError,
    InfrastructureError,
    UsageError,
)
from harness.wire import codec
from harness.wire.asks import Ask, Asks, answers
from harness.wire.keys import Pair
from harness.wire.messages import (
    VERSION,
    Done,
    Envelope,
    Hello,
    Message,
    Note,
    Refusal,
    Shutdown,
    Welcome,
)
from harness.wire.pulse import FIRST_BURST, Pulse, Told, clock_identity
from harness.wire.sockets import (
    Doorkeeper,
    Frame,
    LoopSocket,
    new_context,
    server_socket,
    split_address,
)
from harness.wire.timesync import ClockError, ClockFit

BEAT_NS = 200 * NS_PER_MS
LOST_NS = 3 * NS_PER_S
R = TypeVar("R", bound=Message)


@dataclass(slots=True)
class _Peer:
    """A welcomed agent process."""

    route: bytes
    hello: Hello


class Link:
    """Speaks to the agents of one run; entered with ``async with``.

    `bind` is ``HOST:PORT``; port 0 takes free ones, else the pulse takes ``PORT + 1``. `agents`
    maps each name to its public key. `epoch` counts the coordinator's lives within the run.
    """

    def __init__(
        self,
        *,
        bind: str,
        pair: Pair,
        agents: Mapping[str, str],
        run: str,
        epoch: int = 1,
        beat_ns: int = BEAT_NS,
        lost_ns: int = LOST_NS,
    ) -> None:
        self._host, port = split_address(bind)
        self._port = port
        self._pair, self._agents = pair, dict(agents)
        self._run, self._epoch = run, epoch
        self._beat_ns, self._lost_ns = beat_ns, lost_ns
        self._pulse_port = 0
        self._peers: dict[str, _Peer] = {}
        self._asks = Asks(self._send_ask)
        self._refused: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._broken: Exception | None = None
        self.notes: asyncio.Queue[tuple[str, Note]] = asyncio.Queue()
        """Unasked news, each with the agent's name; the link's own news come the same way."""
        self.clocks: dict[str, ClockFit] = {}
        """The latest fit of each agent's clock."""

    @property
    def address(self) -> str:
        """``HOST:PORT`` that agents connect to."""
        return f"{self._host}:{self._port}"

    async def __aenter__(self) -> Self:
        """Open both sockets. Raises `InfrastructureError` where an address cannot be had."""
        self._changed = asyncio.Event()
        self._clock_identity = clock_identity()
        self._context = new_context()
        self._doorkeeper = Doorkeeper(self._context, self._agents)
        self._doorkeeper.start()
        try:
            work, beats = (server_socket(self._context, self._pair) for _ in range(2))
            pulse_port = self._port + 1 if self._port else 0
            self._port = self._bind(work, self._port)
            self._pulse_port = self._bind(beats, pulse_port)
        except BaseException:
            self._doorkeeper.stop()
            self._context.destroy(0)
            raise
        self._socket = LoopSocket(work, self._receive)
        told = Told(lost=self._mark_lost, clock=self._mark_clock, broken=self._break)
        self._pulse = Pulse(beats, beat_ns=self._beat_ns, lost_ns=self._lost_ns, told=told)
        self._pulse.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close. Agents that were not shut down end themselves after `lost_ns`."""
        self._asks.close()
        self._socket.close(0)
        self._doorkeeper.stop()
        self._context.term()
        self._pulse.join()

    def _bind(self, socket: zmq.Socket[bytes], port: int) -> int:
        try:
            socket.bind(f"tcp://{self._host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise InfrastructureError(
                f"cannot listen on {self._host}:{port}: {error.strerror}"
            ) from error
        endpoint = cast("bytes", socket.getsockopt(zmq.LAST_ENDPOINT))
        return int(endpoint.rsplit(b":", 1)[1].rstrip(b"\0"))

    # -- verbs -----------------------------------------------------------------------------

    async def ready(self, expected: Collection[str], max_wait_ns: int) -> dict[str, Hello]:
        """Wait until all of `expected` are welcome and their clocks measured; return what they are.

        Raises `AgentsMissing` naming the missing and the seen, and `InfrastructureError` at once
        when one of them speaks another version of the protocol.
        """
        if strangers := sorted(set(expected) - self._agents.keys()):
            raise UsageError(f"no key for {', '.join(strangers)}: make one with `harness keys`")
        try:
            async with asyncio.timeout(max_wait_ns / NS_PER_S):
                while not set(expected) <= self._peers.keys() & self.clocks.keys():
                    self._raise_if_unfit(expected)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise AgentsMissing(self._who_is_missing(expected, max_wait_ns)) from error
        return {name: self._peers[name].hello for name in expected}

    async def ask(self, agent: str, body: Message, reply: type[R], timeout_ns: int) -> R:
        """Send one command and return its answer.

        The agent has `timeout_ns`. Raises `AgentLost` when it falls silent or does not answer in
        time, `CommandFailed` when it answers `Failure`.
        """
        ask = self._open(agent, body, codec.encode_body(body), reply, timeout_ns)
        try:
            return cast("R", await ask.future)
        finally:
            self._asks.drop([ask])

    async def ask_all(
        self, bodies: Mapping[str, Message], reply: type[R], timeout_ns: int
    ) -> dict[str, R]:
        """Ask several agents at once and return all answers.

        The first failure ends the wait; the error names everyone known to be at fault. Agents that
        still work go on doing so.
        """
        encoded = {id(body): codec.encode_body(body) for body in bodies.values()}
        asks: list[Ask] = []
        try:
            for agent, body in bodies.items():
                asks.append(self._open(agent, body, encoded[id(body)], reply, timeout_ns))
            await answers(asks)
            return {ask.agent: cast("R", ask.future.result()) for ask in asks}
        finally:
            self._asks.drop(asks)

    async def shutdown(self, timeout_ns: int) -> None:
        """Measure the clocks once more, then have every agent stop its work, answer and exit.

        Raises `AgentLost` naming those that did not answer, after all others did.
        """
        agents = sorted(self._peers)
        await self._last_clocks(agents, min(timeout_ns // 4, 2 * NS_PER_S))
        asks = (self._shutdown_one(agent, timeout_ns) for agent in agents)
        answers = await asyncio.gather(*asks, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, HarnessError):
                raise error
        if errors:
            raise AgentLost("; ".join(map(str, errors)))

    async def _shutdown_one(self, agent: str, timeout_ns: int) -> None:
        await self.ask(agent, Shutdown(), Done, timeout_ns)
        self._pulse.forget(agent)
        self._peers.pop(agent, None)

    async def _last_clocks(self, agents: list[str], limit_ns: int) -> None:
        """Take the last burst; best effort, for the run's record has the earlier fits."""
        before = {agent: self.clocks.get(agent) for agent in agents}
        for agent in agents:
            self._pulse.burst(agent, FIRST_BURST)
        deadline = time.monotonic_ns() + limit_ns
        while (left := deadline - time.monotonic_ns()) > 0 and any(
            self.clocks.get(agent) is fit and agent in self._peers for agent, fit in before.items()
        ):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left / NS_PER_S)
            except TimeoutError:
                return

    # -- sending -----------------------------------------------------------------------------

    def _open(
        self, agent: str, body: Message, data: bytes, reply: type[Message], timeout_ns: int
    ) -> Ask:
        if self._broken:
            raise self._broken
        if agent not in self._peers:
            raise AgentLost(self._lost.get(agent, f"{agent} is not connected"))
        return self._asks.open(agent, codec.kind_of(body), data, reply, timeout_ns)

    def _send_ask(self, ask: Ask, now: int) -> bool:
        peer = self._peers.get(ask.agent)
        if peer is None:
            return False
        left = max(1, ask.deadline_ns - now)
        route = peer.route
        return self._send(route, ask.agent, ask.body, kind=ask.kind, seq=ask.seq, deadline_ns=left)

    def _send(
        self,
        route: bytes,
        name: str,
        body: Message | bytes,
        *,
        kind: str = "",
        seq: int = 0,
        deadline_ns: int = 0,
    ) -> bool:
        """Send to one peer; False when it cannot be reached just now."""
        data = codec.encode(
            body,
            kind=kind,
            run=self._run,
            node=name,
            epoch=self._epoch,
            seq=seq,
            t_mono_ns=time.monotonic_ns(),
            deadline_ns=deadline_ns,
        )
        return self._socket.send([route, data])

    # -- receiving ---------------------------------------------------------------------------

    def _receive(self, frames: list[Frame]) -> None:
        try:
            self._received(frames[0].bytes, str(frames[-1].get("User-Id")), frames[-1].bytes)
        except Exception as error:  # a bug of ours must reach those who wait
            self._break(error)

    def _received(self, route: bytes, name: str, data: bytes) -> None:
        """Handle a message from the holder of the key of `name`."""
        try:
            envelope = codec.decode(data)
            if envelope.kind == "hello":
                self._meet(route, name, envelope)
                return
            peer = self._peers.get(name)
            if peer is None or peer.route != route:
                return  # a process that was refused or lost; our silence ends it
            body = codec.decode_body(envelope)
        except codec.WireError as error:
            self._news("error", name, f"{name} sent what cannot be read: {error}")
            return
        if isinstance(body, Note):
            self.notes.put_nowait((name, body))
        elif envelope.re is not None and envelope.epoch == self._epoch:
            self._asks.settle(envelope.re, body)

    def _meet(self, route: bytes, name: str, envelope: Envelope) -> None:
        reason = self._why_not(route, name, envelope)
        if reason:
            self._send(route, name, Refusal(reason=reason))
            return
        hello = codec.decode_body(envelope)
        assert isinstance(hello, Hello)
        if name not in self._peers:
            self._lost.pop(name, None)
            self.clocks.pop(name, None)
            ours = self._clock_identity
            shared = bool(ours) and hello.facts.get("clock") == ours
            self._pulse.watch(name, route, shares_clock=shared)
            self._peers[name] = _Peer(route, hello)
            self._changed.set()
        welcome = Welcome(beat_ns=self._beat_ns, lost_ns=self._lost_ns, pulse_port=self._pulse_port)
        self._send(route, name, welcome)

    def _why_not(self, route: bytes, name: str, envelope: Envelope) -> str:
        """Return why this process cannot be `name`, or "". Versions first: old bodies differ."""
        if not codec.compatible(envelope.v):
            reason = (
                f"{name} speaks protocol {codec.version_text(envelope.v)}, the coordinator "
                f"{codec.version_text(VERSION)}: install the same version on both"
            )
            self._refused[name] = reason
            self._changed.set()
            return reason
        if envelope.node != name:
            reason = f"the key of {name} does not make a process {envelope.node}"
        elif (known := self._peers.get(name)) and known.route != route:
            at = f"process {known.hello.pid} on {known.hello.host}"
            reason = f"the name {name} is taken by {at}"
        else:
            return ""
        self._news("warning", name, f"refused an agent: {reason}")
        return reason

    # -- news of peers -----------------------------------------------------------------------

    def _news(self, level: str, name: str, text: str) -> None:
        self.notes.put_nowait((name, Note(level=level, text=text)))

    def _mark_lost(self, name: str, silence_ns: int) -> None:
        if self._peers.pop(name, None) is None:
            return
        text = f"{name} fell silent: no heartbeat for {silence_ns / NS_PER_S:.2f} s"
        self._lost[name] = text
        self._news("error", name, text)
        self._asks.fail(AgentLost(text), name)
        self._changed.set()

    def _mark_clock(self, name: str, result: ClockFit | ClockError) -> None:
        if isinstance(result, ClockError):
            self._news("error", name, f"clock: {result}")
        elif name in self._peers:
            self.clocks[name] = result
        self._changed.set()

    def _break(self, error: Exception) -> None:
        """Let a bug of ours reach everyone who waits, now and later."""
        self._broken = self._broken or error
        self._asks.fail(error)
        self._changed.set()

    def _raise_if_unfit(self, expected: Collection[str]) -> None:
        if self._broken:
            raise self._broken
        if reasons := [self._refused[name] for name in sorted(expected) if name in self._refused]:
            raise InfrastructureError("; ".join(reasons))

    def _who_is_missing(self, expected: Collection[str], waited_ns: int) -> str:
        waited = f"{waited_ns / NS_PER_S:.3g} s"
        missing = sorted(set(expected) - self._peers.keys())
        if not missing:
            timeless = sorted(set(expected) - self.clocks.keys())
            return f"clocks of {', '.join(timeless)} could not be measured in {waited}"
        seen = ", ".join(sorted(self._peers)) or "nobody"
        lost = "".join(f"; {self._lost[name]}" for name in missing if name in self._lost)
        return (
            f"missing after {waited}: {', '.join(missing)} (seen: {seen}{lost}); agents connect "
            f"to {self.address}"
        )
