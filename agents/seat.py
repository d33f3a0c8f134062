"""A child with a line to it, as its agent sees it: orders go out, and every one gets an answer.

The child is started with ``--parent`` and ``--fd`` (see `agents.frames` for what goes over it). It
may die at any time: then its answers are `Failure`s with the signal and its last lines of log.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agents.frames import Unpacker, pack
from agents.process import Child, describe_exit, spawn
from harness.clock import NS_PER_S
from harness.wire.messages import Failure, Message

_LAST_LINES = 6
_LINE_CHARACTERS = 160
_SETTLE_NS = NS_PER_S // 2
"""After a first failure the other ranks get this long to tell theirs: the cause comes late."""

News = Callable[["Seat", Message], None]
"""What a child says unasked, and its death: a `Failure`, ``RankDied``. Called on the loop."""


class Seat(asyncio.Protocol):
    """One child, a socket, and the orders that it has not answered.

    `name` ("rank 3") begins what is said of it, `number` is its number in failures. Every future
    made by `ask` ends with a message.
    """

    def __init__(
        self,
        name: str,
        number: int,
        child: Child,
        *,
        log: Path | None,
        decoder: msgspec.msgpack.Decoder[Any],
        news: News,
    ) -> None:
        self.name, self.number, self.child = name, number, child
        self.cause = ""
        """How it ended; "" while it runs."""
        self._log, self._news = log, news
        self._unpacker = Unpacker(decoder)
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._seq = 0
        self._transport: asyncio.WriteTransport | None = None
        self._end: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(child.pidfd, self._on_exit)

    @classmethod
    async def started(
        cls,
        name: str,
        number: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None,
        decoder: msgspec.msgpack.Decoder[Any],
        news: News,
    ) -> Seat:
        """Start a child; its output goes to the end of `log`, or where ours goes."""
        ours, theirs = socket.socketpair()
        output = log.open("ab") if log else None
        try:
            line = (f"--parent={os.getpid()}", f"--fd={theirs.fileno()}")
            child = spawn([*argv, *line], env=env, pass_fds=(theirs.fileno(),), output=output)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if output:
                output.close()
        seat = cls(name, number, child, log=log, decoder=decoder, news=news)
        await asyncio.get_running_loop().create_unix_connection(lambda: seat, sock=ours)
        return seat

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio calls this)."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Settle what was asked, pass news on (asyncio calls this)."""
        for frame in self._unpacker.feed(data):
            waiting = self._pending.pop(frame.seq, None)
            body = frame.body
            if isinstance(body, Failure):
                body = msgspec.structs.replace(body, text=f"{self.name}: {body.text}")
            if waiting is not None and not waiting.done():
                waiting.set_result(body)
            elif frame.seq == 0:
                self._news(self, body)

    def ask(self, body: Message, deadline_ns: int) -> asyncio.Future[Message]:
        """Send an order; the future has the answer, however late."""
        future: asyncio.Future[Message] = self._loop.create_future()
        if self.cause or self._transport is None:
            future.set_result(self.death())
            return future
        self._seq += 1
        self._pending[self._seq] = future
        self._transport.write(pack(self._seq, deadline_ns, body))
        return future

    def _on_exit(self) -> None:
        status = self.child.reap()
        if status is None:
            return
        self._loop.remove_reader(self.child.pidfd)
        self.cause = describe_exit(status)
        self._loop.call_soon(self._tell_death)  # after what it said last, which may lie ready too

    def _tell_death(self) -> None:
        self._news(self, self.death())
        self._settle()

    def death(self) -> Failure:
        """Say how it ended, with its last lines."""
        text = f"{self.name} (pid {self.child.pid}) {self.cause or 'is gone'}"
        if lines := self._last_lines():
            text += "; its last lines: " + " | ".join(lines)
        return Failure(error="RankDied", text=text, ranks=(self.number,))

    def _last_lines(self) -> list[str]:
        if self._log is None:
            return []
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
                return [line[:_LINE_CHARACTERS] for line in lines]
        except FileNotFoundError:  # the run folder was taken away under us
            return []

    def _settle(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_result(self.death())
        self._pending.clear()

    def kill(self) -> None:
        """Kill the child; its end is no news then. Harmless when it is gone."""
        if self._end is not None:
            return  # the number of its handle may be another's by now
        self._loop.remove_reader(self.child.pidfd)
        self.cause = self.cause or "was stopped"
        self.child.kill()
        self._settle()

    async def end(self) -> None:
        """See the child gone, which was killed before; raises `Unkillable`. May be repeated."""
        if self._end is None:
            self._end = asyncio.ensure_future(self._ended())
        await asyncio.shield(self._end)

    async def _ended(self) -> None:
        if self._transport is not None:
            self._transport.close()
        await self.child.end()
        self.child.close()


def combine(failures: Sequence[Failure]) -> Failure:
    """Return one failure of several; deaths come first, because the others follow from them."""
    deaths = [failure for failure in failures if failure.error == "RankDied"]
    chosen = deaths or list(failures)
    return Failure(
        error=chosen[0].error,
        text="; ".join(failure.text for failure in chosen),
        ranks=tuple(sorted({rank for failure in chosen for rank in failure.ranks})),
    )


async def settled(
    replies: list[asyncio.Future[Message]], due_ns: int
) -> set[asyncio.Future[Message]]:
    """Wait for replies; return those still open at `due_ns`, or soon after a first failure."""
    pending = {reply for reply in replies if not reply.done()}
    while pending:
        left_ns = due_ns - time.monotonic_ns()
        done, pending = await asyncio.wait(
            pending, timeout=max(0.0, left_ns / NS_PER_S), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        if any(isinstance(reply.result(), Failure) for reply in done):
            due_ns = min(due_ns, time.monotonic_ns() + _SETTLE_NS)
    return pending
