"""One emulated unit at work: its model, its mover, and the lines on which clients talk to it.

Everything here runs on the event loop's thread, so commands are obeyed one after the other,
whichever line they come in by. The order within a command is the unit's: light goes dark, the
autonomous reports leave, then the reply. What the unit does by itself (a pulsed shutter) is done by
a timer of the loop, and before any command that comes later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from drivers.base import NS_PER_MS
from drivers.emulators.config import Faults
from drivers.emulators.faces import Answer, Session
from drivers.emulators.faults import Fate, Fates
from drivers.emulators.model import Change, SwitchModel
from drivers.emulators.mover import Mover


class Line(Protocol):
    """What a server offers to one client's dialogue."""

    byte_ns: int
    """Time that one byte takes on the wire; 0 where there is nothing to pace."""
    ends_with_the_unit: bool
    """Whether the connection is gone when the unit loses power; a serial adapter stays."""

    def write(self, data: bytes) -> None:
        """Send, in order."""

    def close(self) -> None:
        """Hang up once everything written has left."""


class Unit:
    """The model with everything that makes it act. `die` ends the process without a farewell."""

    def __init__(
        self,
        model: SwitchModel,
        mover: Mover,
        fates: Fates,
        *,
        answer_ms: float = 0.0,
        boot_ms: float = 0.0,
        die: Callable[[], None],
    ) -> None:
        self.model, self.mover, self.fates, self.die = model, mover, fates, die
        self.answer_s = answer_ms / 1e3
        self._boot_ns = round(boot_ms * NS_PER_MS)
        self._up_ns = 0
        """When it answers again, after it lost power."""
        self._dialogues: set[Dialogue] = set()
        self._timer: asyncio.TimerHandle | None = None

    def connect(self, session: Session, line: Line) -> Dialogue:
        """Open a dialogue on `line`; the server feeds it what arrives."""
        dialogue = Dialogue(self, session, line)
        self._dialogues.add(dialogue)
        if not self.is_up:
            dialogue.lose_power()
        return dialogue

    def disconnect(self, dialogue: Dialogue) -> None:
        """Forget a dialogue whose line is gone."""
        self._dialogues.discard(dialogue)

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        return time.monotonic_ns() >= self._up_ns

    def reboot(self) -> None:
        """Lose power: all circuits go dark, sessions end, and nobody is answered for a while."""
        now_ns = time.monotonic_ns()
        self._up_ns = now_ns + self._boot_ns
        self.mover.carry_out(self.model.lose_power(now_ns), now_ns)
        for dialogue in tuple(self._dialogues):
            dialogue.lose_power()

    def break_down(self, faults: Faults) -> None:
        """Have these faults from now on; raises `Misuse` where the unit has no such ports."""
        now_ns = time.monotonic_ns()
        change = self.model.break_down(faults, now_ns)
        self.fates.replace(faults)
        self.mover.carry_out(change, now_ns)

    def carry_out(self, change: Change, now_ns: int, wall: datetime) -> None:
        """Move the light and tell every session that wants to know."""
        self.mover.carry_out(change, now_ns)
        for dialogue in self._dialogues:
            dialogue.tell(change, wall)

    def catch_up(self) -> None:
        """Carry out what the unit has due by now, and come back when more is."""
        now_ns = time.monotonic_ns()
        if (due_ns := self.model.due_ns) is not None and due_ns <= now_ns:
            self.mover.carry_out(self.model.advance(now_ns), now_ns)
        self.close()
        if (due_ns := self.model.due_ns) is not None:
            left_s = max(0, due_ns - time.monotonic_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(left_s, self.catch_up)

    def close(self) -> None:
        """Do nothing by itself any more. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Dialogue:
    """One client on one line."""

    def __init__(self, unit: Unit, session: Session, line: Line) -> None:
        self._unit, self._session, self._line = unit, session, line
        self._lose_next = False
        if session.greeting and unit.is_up:
            line.write(session.greeting)

    def lose_power(self) -> None:
        """End the connection, where it ends with the unit."""
        if self._line.ends_with_the_unit:
            self._line.close()

    def feed(self, data: bytes) -> None:
        """Take bytes as they arrive; obey every command that they complete."""
        if not self._unit.is_up:
            return
        for command in self._session.lines(data):
            if not command.strip():
                continue
            self._unit.catch_up()
            now_ns, wall = time.monotonic_ns(), datetime.now(UTC)
            answer = self._session.answer(command, now_ns, wall)
            for change in answer.changes:
                self._unit.carry_out(change, now_ns, wall)
            self._reply(answer)
            self._unit.catch_up()

    def tell(self, change: Change, wall: datetime) -> None:
        """Send the autonomous report of a change, where the protocol has one."""
        if report := self._session.report(change, wall):
            self._line.write(report)

    def _reply(self, answer: Answer) -> None:
        fate = self._unit.fates.of(answer)
        if fate is Fate.SEND and not answer.reply:
            return
        if fate is Fate.LOSE:
            self._lose_next = not answer.reply
        elif self._lose_next and fate not in (Fate.DIE, Fate.REBOOT):
            self._lose_next = False
        elif self._unit.answer_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._unit.answer_s, self._send, answer.reply, fate)
        else:
            self._send(answer.reply, fate)

    def _send(self, reply: bytes, fate: Fate) -> None:
        if fate is Fate.SEND:
            self._line.write(reply)
            return
        half = reply[: len(reply) // 2]
        self._line.write(half)
        if fate is Fate.CUT:
            self._line.close()
        else:
            on_wire_s = len(half) * self._line.byte_ns / 1e9
            ends = self._unit.die if fate is Fate.DIE else self._unit.reboot
            asyncio.get_running_loop().call_later(on_wire_s, ends)
