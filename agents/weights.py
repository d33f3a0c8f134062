"""The labour of weight sync: the node's porter, the folder of its files, and what is asked of it.

The porter (`agents.porter`) does the work; here it is started, asked, and replaced when it died.
Files lie in a folder of this agent's own (`harness.memory`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agents.labour import Handler, Notify
from agents.porter import FRAMES
from agents.ranks import LOG_DIR
from agents.seat import Seat, settled
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError
from harness.memory import MEMORY, Folder
from harness.model.intake import Refused
from harness.wire.messages import Done, Failure, Message, Note
from harness.wire.weights import (
    ClosePorter,
    ExpectWeights,
    ForgetWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
)

PROGRAM = (sys.executable, "-m", "agents.porter")
_NO_DEADLINE_NS = 600 * NS_PER_S
_ANSWER_NS = 900_000_000
"""A porter answers at its deadline and not after; so long its answer may travel."""
_PARTING_NS = 2 * NS_PER_S


class NotOpen(InfrastructureError):
    """There is no porter on this node, or it has died."""


class Weights:
    """The labour of weight sync; see `agents.labour`. `program` starts the porter."""

    def __init__(
        self,
        notify: Notify,
        *,
        program: Sequence[str] = PROGRAM,
        logs: Path | None = None,
        memory: Path = MEMORY,
    ) -> None:
        folder = os.environ.get(LOG_DIR)
        self._notify, self._program = notify, tuple(program)
        self._logs = logs or (Path(folder) if folder else None)
        self._folder = Folder("weights", memory)
        self._seat: Seat | None = None
        self._open: PorterOpen | None = None
        self._opening = asyncio.Lock()
        self._address = ""

    def commands(self) -> dict[type[Message], Handler]:
        """Return who answers what."""
        return {
            OpenPorter: self._on_open,
            ExpectWeights: self._relay,
            SendWeights: self._relay,
            ForgetWeights: self._relay,
            ClosePorter: self._on_close,
        }

    async def close(self) -> None:
        """End the porter and delete its files; raises `Unkillable`."""
        await self._bury()
        self._folder.remove()

    def kill_now(self) -> None:
        """Kill the porter without waiting; its files go when the next agent opens one."""
        if seat := self._seat:
            seat.child.kill()

    # -- commands ------------------------------------------------------------------------------

    async def _on_open(self, asked: OpenPorter, deadline_ns: int) -> Message:
        async with self._opening:
            if self._seat is not None and not self._seat.cause and self._open is not None:
                if asked.address == self._address:
                    return self._open
                raise Refused(f"the porter listens at {self._open.listen}: close it first")
            await self._bury()
            self._seat = await self._started()
            answer = await self._relay(asked, deadline_ns)
            if isinstance(answer, PorterOpen):
                self._open, self._address = answer, asked.address
            else:
                await self._bury()
            return answer

    async def _started(self) -> Seat:
        """Start a porter over the folder; what it finds there of an earlier one it keeps."""
        folder = self._folder.path
        for unfinished in folder.glob("*.part"):
            unfinished.unlink(missing_ok=True)
        return await Seat.started(
            "porter",
            0,
            [*self._program, f"--folder={folder}"],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            log=self._logs / "porter.log" if self._logs else None,
            decoder=FRAMES,
            news=self._news,
        )

    def _news(self, seat: Seat, told: Message) -> None:
        if isinstance(told, Failure) and seat is self._seat:
            self._notify(Note(level="error", text=told.text))

    async def _relay(self, asked: Message, deadline_ns: int) -> Message:
        """Have the porter answer, at the latest soon after the deadline; a silent one is killed."""
        seat = self._seat
        if seat is None:
            raise NotOpen("no porter is open on this node")
        due_ns = deadline_ns or time.monotonic_ns() + _NO_DEADLINE_NS
        reply = seat.ask(asked, due_ns)
        await settled([reply], due_ns + _ANSWER_NS)
        if not reply.done():
            tag = asked.__struct_config__.tag
            text = f"the porter (pid {seat.child.pid}) has not answered {tag} by its deadline"
            seat.kill()  # it is stuck: who opens it again gets another
            return Failure(error="PorterSilent", text=text)
        answer = reply.result()
        if isinstance(answer, Failure):  # what the coordinator knows as ranks are others
            error = "PorterDied" if answer.error == "RankDied" else answer.error
            answer = msgspec.structs.replace(answer, error=error, ranks=())
        return answer

    async def _on_close(self, asked: ClosePorter, deadline_ns: int) -> Message:
        async with self._opening:
            if self._seat is not None and not self._seat.cause:
                due_ns = time.monotonic_ns() + _PARTING_NS
                await self._relay(asked, min(due_ns, deadline_ns or due_ns))
            await self.close()
            return Done(t_ns=time.monotonic_ns())

    async def _bury(self) -> None:
        """Kill the porter and see it gone. Raises `Unkillable`."""
        seat, self._open = self._seat, None
        if seat is not None:
            seat.kill()
            await seat.end()
            self._seat = None
