"""Commands without their answers: sent again until answered, failed when time or the agent is gone.

One timer serves all of them, because on the path of a reconfiguration an ask must cost no more
than a future and a dictionary entry. Knows no sockets: it is handed a function that sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import AgentLost, HarnessError, StepFailed
from harness.model.listing import few, first
from harness.wire.codec import kind_of
from harness.wire.messages import Failure, Message

RESEND_NS = NS_PER_S
TICK_NS = 50 * NS_PER_MS
ANSWER_GRACE_NS = 2 * NS_PER_S
"""An agent may answer at its deadline, or be cut off a second later; then it has to travel."""
SETTLE_NS = 500 * NS_PER_MS
"""After a first failure, how long others have to be named with it: more than an agent waits for a
rank that hangs to say where it stands, for that one is named later than those that wait for it."""
CULPRIT_NS = 4 * NS_PER_S
"""How long more where nobody has named a rank at fault: what was told only follows from it. More
than an agent takes to find out which rank hangs, or to be given up as silent itself."""


class CommandFailed(StepFailed):
    """Agents answered a command with `Failure`: who, what, and the ranks at fault."""

    def __init__(self, kind: str, failures: Mapping[str, Failure]) -> None:
        self.kind, self.failures = kind, dict(failures)
        self.ranks = tuple(sorted({r for f in failures.values() for r in f.ranks}))
        causes = {agent: f for agent, f in failures.items() if f.ranks} or self.failures
        told = first(_told(kind, agent, failure) for agent, failure in sorted(causes.items()))
        if followed := failures.keys() - causes.keys():
            told += f"; it failed then on {few(followed)} too"
        super().__init__(told)


def _told(kind: str, agent: str, failure: Failure) -> str:
    ranks = f" (ranks {', '.join(map(str, failure.ranks))})" if failure.ranks else ""
    return f"{agent}: {kind} failed: {failure.error}: {failure.text}{ranks}"


@dataclass(slots=True)
class Ask:
    """One command on its way. Times are on the coordinator's monotonic clock."""

    seq: int
    agent: str
    kind: str
    body: bytes
    reply: type[Message]
    future: asyncio.Future[Any]
    asked_ns: int
    deadline_ns: int
    send_ns: int = 0
    """When to send it (again)."""


class Asks:
    """The table of open commands. `send` returns False for an agent out of reach just now."""

    def __init__(self, send: Callable[[Ask, int], bool]) -> None:
        self._send = send
        self._open: dict[int, Ask] = {}
        self._seq = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self, agent: str, kind: str, body: bytes, reply: type[Message], timeout_ns: int
    ) -> Ask:
        """Send a command; its `future` gets the answer or the error."""
        loop = asyncio.get_running_loop()
        self._seq += 1
        now = time.monotonic_ns()
        ask = Ask(self._seq, agent, kind, body, reply, loop.create_future(), now, now + timeout_ns)
        self._open[ask.seq] = ask
        self._try(ask, now)
        if self._timer is None:
            self._timer = loop.call_later(TICK_NS / NS_PER_S, self._tick)
        return ask

    def settle(self, seq: int, result: Message | Exception) -> None:
        """Give a command its answer or its error; unknown and settled ones are ignored."""
        ask = self._open.pop(seq, None)
        if ask is None or ask.future.done():
            return
        if isinstance(result, ask.reply):
            ask.future.set_result(result)
        elif isinstance(result, Exception):
            ask.future.set_exception(result)
        elif not isinstance(result, Failure):
            text = f"{ask.agent} answered {ask.kind} with {kind_of(result)}"
            ask.future.set_exception(HarnessError(text))
        elif result.error == "Bug":
            ask.future.set_exception(HarnessError(_told(ask.kind, ask.agent, result)))
        else:
            ask.future.set_exception(CommandFailed(ask.kind, {ask.agent: result}))

    def fail(self, error: Exception, agent: str | None = None) -> None:
        """Fail all commands of `agent`, or of everyone."""
        for ask in list(self._open.values()):
            if agent in {None, ask.agent}:
                self.settle(ask.seq, error)

    def drop(self, asks: Iterable[Ask]) -> None:
        """Forget commands that nobody waits for any longer."""
        for ask in asks:
            self._open.pop(ask.seq, None)
            if not ask.future.cancel() and not ask.future.cancelled():
                ask.future.exception()  # seen, so that the loop does not report it as lost

    def close(self) -> None:
        """Cancel whatever is open."""
        self.drop(list(self._open.values()))
        if self._timer:
            self._timer.cancel()

    def _try(self, ask: Ask, now: int) -> None:
        sent = self._send(ask, now)
        ask.send_ns = now + (RESEND_NS if sent else TICK_NS)

    def _try_or_fail(self, ask: Ask, now: int) -> None:
        try:
            self._try(ask, now)
        except Exception as error:  # nobody awaits the timer: whoever awaits the answer must know
            self.settle(ask.seq, error)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic_ns()
        for ask in list(self._open.values()):
            if now >= ask.deadline_ns + ANSWER_GRACE_NS:
                waited = (ask.deadline_ns - ask.asked_ns) / NS_PER_S
                text = f"{ask.agent} did not answer {ask.kind} in {waited:.3g} s, though it beats"
                self.settle(ask.seq, AgentLost(text))
            elif now >= ask.send_ns:
                self._try_or_fail(ask, now)
        if self._open:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TICK_NS / NS_PER_S, self._tick)


async def answers(asks: Iterable[Ask], now_ns: Callable[[], int] = time.monotonic_ns) -> None:
    """Wait until all have their answer; raise for everyone at fault soon after the first failure.

    `AgentLost` outranks `CommandFailed`; anything else (a bug of ours) outranks both.
    """
    asks = list(asks)
    if not asks:
        return
    futures = [ask.future for ask in asks]
    done, rest = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
    if rest and not any(future.cancelled() for future in done):
        _, rest = await asyncio.wait(rest, timeout=SETTLE_NS / NS_PER_S)
        await _wait_for_culprit(futures, rest, now_ns)
    settled = [ask for ask in asks if ask.future.done()]
    errors = [error for ask in settled if (error := ask.future.exception())]
    failures: dict[str, Failure] = {}
    lost: list[str] = []
    for error in errors:
        if isinstance(error, CommandFailed):
            failures |= error.failures
        elif isinstance(error, AgentLost):
            lost.append(str(error))
        else:
            raise error
    if lost:
        more = [_told(asks[0].kind, agent, failure) for agent, failure in failures.items()]
        raise AgentLost("; ".join(lost + more))
    if failures:
        raise CommandFailed(asks[0].kind, failures)


async def _wait_for_culprit(
    futures: Iterable[asyncio.Future[Any]],
    rest: set[asyncio.Future[Any]],
    now_ns: Callable[[], int],
) -> None:
    """Wait as long as all failures may follow from one that was not told yet."""
    until_ns = now_ns() + CULPRIT_NS
    while rest and all(_only_follows(future) for future in futures if future.done()):
        left_s = (until_ns - now_ns()) / NS_PER_S
        done, rest = await asyncio.wait(
            rest, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return


def _only_follows(future: asyncio.Future[Any]) -> bool:
    """Tell an answer, or a failure without ranks at fault, from what ends the search for one."""
    if future.cancelled():
        return False
    error = future.exception()
    return error is None or (isinstance(error, CommandFailed) and not error.ranks)
