"""The agent's side of its ranks: starts them, orders them about, and says what became of them.

Every order goes to all local ranks at once and is answered when the last has answered. The outcome
is recorded here, never only by the process that may die: a rank's death answers whatever it was
asked, with the signal and its last lines. When a deadline passes, each rank's control thread is
asked how far it came; those that did not enter the collective, or do not answer at all, are named,
stacks go to the ranks' logs, and the ranks are killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agents.labour import Handler, Notify
from agents.pipe import FRAMES, Position, WhereAreYou, merge
from agents.process import Unkillable
from agents.seat import Seat, combine, settled
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.nccl import NCCL_ALLOWED
from harness.wire.messages import (
    DestroyGroups,
    Done,
    EndTraffic,
    Failure,
    Hold,
    MakeGroups,
    Message,
    Note,
    Resume,
    RunCollective,
    Samples,
    StartRanks,
    StartTraffic,
    StopAt,
    StopRanks,
    TrafficSoFar,
)

LOG_DIR = "HARNESS_LOG_DIR"
"""Environment variable: folder of the ranks' logs. Unset: they share the agent's output."""

PROGRAM = (sys.executable, "-m", "agents.rank")

_NO_DEADLINE_NS = 600 * NS_PER_S
_POSITION_NS = 200 * NS_PER_MS
_ANSWER_NS = NS_PER_S // 2
"""A rank that answers *at* the deadline has this long to be heard before it counts as late."""
_COLLECTIVE = (RunCollective, StartTraffic, StopAt, Resume)
"""Orders that end only when every rank has entered."""


class Ranks:
    """The labour of running ranks; see `agents.labour`. `program` starts one rank."""

    def __init__(
        self, notify: Notify, *, program: Sequence[str] = PROGRAM, logs: Path | None = None
    ) -> None:
        folder = os.environ.get(LOG_DIR)
        self._notify = notify
        self._program = tuple(program)
        self._logs = logs or (Path(folder) if folder else None)
        self._seats: dict[int, Seat] = {}
        self._burial: asyncio.Task[str] | None = None
        self._changing = asyncio.Lock()
        """Held while ranks come or go: those that are stopped are all there are."""

    def commands(self) -> dict[type[Message], Handler]:
        """Return who answers what."""
        everyone: tuple[type[Message], ...] = (
            MakeGroups, DestroyGroups, RunCollective, StartTraffic,
            Hold, StopAt, Resume, TrafficSoFar, EndTraffic,
        )  # fmt: skip
        return {
            **dict.fromkeys(everyone, self._order),
            StartRanks: self._start,
            StopRanks: self._stop,
        }

    async def close(self) -> None:
        """Kill all ranks and verify that they are gone; raises `Unkillable`."""
        if left := await self._end_all():
            raise Unkillable(left)

    def kill_now(self) -> None:
        """Kill all ranks without waiting."""
        for seat in list(self._seats.values()):
            seat.child.kill()

    # -- starting and stopping -----------------------------------------------------------------

    async def _start(self, asked: StartRanks, deadline_ns: int) -> Message:
        if self._burial is not None:
            await self._burial
        if refused := sorted(set(asked.nccl_env) - set(NCCL_ALLOWED)):
            return Failure(error="Refused", text=f"not on the list of NCCL variables: {refused}")
        async with self._changing:
            if self._seats:
                here = ", ".join(str(rank) for rank in self._seats)
                text = f"ranks {here} are here already: stop them first"
                return Failure(error="Busy", text=text)
            env = self._environment(asked.nccl_env)
            for local, rank in enumerate(asked.ranks):
                await self._seat(rank, local, env)
        answer = await self._order(MakeGroups(groups=asked.groups), deadline_ns)
        if isinstance(answer, Failure):
            await self._end_all()
        return answer

    async def _seat(self, rank: int, local: int, env: dict[str, str]) -> None:
        log = self._logs / f"rank{rank}.log" if self._logs else None
        argv = [*self._program, f"--rank={rank}", f"--local={local}"]
        self._seats[rank] = await Seat.started(
            f"rank {rank}", rank, argv, env=env, log=log, decoder=FRAMES, news=self._news
        )

    def _news(self, _seat: Seat, told: Message) -> None:
        if isinstance(told, Failure):
            died = told.error == "RankDied"
            text = told.text if died else f"{told.error}: {told.text}"
            self._notify(Note(level="error", text=text, ranks=told.ranks if died else ()))

    def _environment(self, nccl_env: dict[str, str]) -> dict[str, str]:
        """Return the ranks' environment: ours, less NCCL variables that would not be recorded."""
        stray = sorted(n for n in os.environ if n.startswith("NCCL_") and n not in NCCL_ALLOWED)
        if stray:
            text = f"left out of the ranks' environment, not being recorded: {', '.join(stray)}"
            self._notify(Note(level="warning", text=text))
        kept = {name: value for name, value in os.environ.items() if name not in stray}
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **nccl_env}

    async def _stop(self, _asked: StopRanks, _deadline_ns: int) -> Message:
        if left := await self._end_all():
            return Failure(error="Unkillable", text=left)
        return Done(t_ns=time.monotonic_ns())

    def _kill_all(self) -> None:
        """Kill all ranks at once: one whose peer is gone would only fill its log."""
        for seat in self._seats.values():
            seat.kill()

    async def _end_all(self) -> str:
        """Kill all ranks, see them gone; return what could not be killed, in words."""
        async with self._changing:
            self._kill_all()
            seats = list(self._seats.values())
            ends = await asyncio.gather(*(seat.end() for seat in seats), return_exceptions=True)
            self._seats.clear()
        failed = [end for end in ends if isinstance(end, BaseException)]
        for bug in (end for end in failed if not isinstance(end, Unkillable)):
            raise bug
        left = "; ".join(str(end) for end in failed)
        if left:
            self._notify(Note(level="error", text=left))
        return left

    # -- orders --------------------------------------------------------------------------------

    async def _order(self, asked: Message, deadline_ns: int) -> Message:
        """Ask every local rank, answer when the last has answered or the deadline has passed."""
        if not self._seats or self._burial is not None:
            return Failure(error="NoRanks", text="no rank runs on this node")
        due_ns = _due_ns(asked, deadline_ns)
        replies = {seat: seat.ask(asked, due_ns) for seat in self._seats.values()}
        # A traffic that is not steady by the deadline is answered then, not an expiry.
        patience_ns = _ANSWER_NS if isinstance(asked, Resume) else 0
        late = await settled(list(replies.values()), due_ns + patience_ns)
        answers = [reply.result() for reply in replies.values() if reply.done()]
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            return combine(failures)
        if late:
            return await self._expire(asked, [seat for seat in replies if replies[seat] in late])
        answer = merge(answers)
        self._tell_skipped(answer)
        return answer

    def _tell_skipped(self, answer: Message) -> None:
        if isinstance(answer, Samples) and any(not row.size_bytes for row in answer.ranks):
            text = "size 0: less than one 16-byte block for each rank (or one element); not timed"
            self._notify(Note(level="warning", text=text))

    async def _expire(self, asked: Message, late: list[Seat]) -> Failure:
        """Find out who is at fault, then kill all ranks: their communicators are of no use."""
        now_ns = time.monotonic_ns()
        replies = {s.number: s.ask(WhereAreYou(), now_ns + _POSITION_NS) for s in late}
        await settled(list(replies.values()), now_ns + _POSITION_NS)
        positions = {
            rank: found
            for rank, reply in replies.items()
            if reply.done() and isinstance(found := reply.result(), Position)
        }
        must_enter = isinstance(asked, _COLLECTIVE)
        ranks, text = at_fault([seat.number for seat in late], positions, must_enter)
        self._kill_all()
        self._burial = asyncio.create_task(self._bury())
        name = asked.__struct_config__.tag
        return Failure(error="CollectiveExpired", text=f"{name} expired: {text}", ranks=ranks)

    async def _bury(self) -> str:
        try:
            return await self._end_all()
        finally:
            self._burial = None


def at_fault(
    late: Sequence[int], positions: dict[int, Position], must_enter: bool
) -> tuple[tuple[int, ...], str]:
    """Say which of the ranks that are late are at fault, and where each stands.

    A rank is at fault when it does not answer (stopped, or stuck in the kernel). Where all
    `must_enter` a collective, so is one that stands outside; if all are inside, those behind the
    furthest.
    """
    named = [rank for rank in late if rank not in positions]
    words = [f"rank {rank} does not answer" for rank in named]
    furthest = max((found.entered for found in positions.values()), default=0)
    for rank, found in sorted(positions.items()):
        verb = "waits in" if found.inside else "is outside, having entered"
        words.append(f"rank {rank} {verb} collective {found.entered}")
    if must_enter:
        named += [rank for rank, found in positions.items() if not found.inside]
        named = named or [r for r, found in positions.items() if found.entered < furthest]
    if not named:
        words.append("no local rank is at fault: the missing one is on another node")
    return tuple(sorted(named)), "; ".join(words)


def _due_ns(asked: Message, deadline_ns: int) -> int:
    """Return when local ranks must have answered: the command's own limit, or the deadline."""
    now_ns = time.monotonic_ns()
    due_ns = deadline_ns or now_ns + _NO_DEADLINE_NS
    if isinstance(asked, RunCollective | StartTraffic):
        return min(due_ns, now_ns + asked.timeout_ns)
    return due_ns
