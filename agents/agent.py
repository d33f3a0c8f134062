"""The agent process: does on its node what the coordinator asks, and never outlives it.

Commands run concurrently, each as a task; answers are remembered by (epoch, seq), so that a
repeated command is answered, never repeated. The ways out: `Shutdown` (0), a signal (4), the
coordinator lost (3), a bug of ours (70). On each of them the labour is closed first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable

from agents.facts import hello
from agents.generation.labour import Generation
from agents.labour import Handler, Labour, Notify
from agents.probe import Probe
from agents.ranks import Ranks
from agents.training.labour import Training
from agents.weights import Weights
from harness.clock import NS_PER_S
from harness.errors import ExitCode, HarnessError
from harness.processes import ask_for_real_time, awake
from harness.wire import codec
from harness.wire.echo import Echo
from harness.wire.meeting import Coordinator, Met, meet
from harness.wire.messages import Done, Envelope, Failure, Message, Note, Shutdown
from harness.wire.sockets import Frame, LoopSocket

CLOSE_WITHIN_NS = 5 * NS_PER_S
END_WITHIN_NS = 7 * NS_PER_S
"""After its coordinator is lost, the agent is gone this much later even if its loop is stuck."""
CUT_OFF_NS = NS_PER_S
"""A handler may answer at its deadline; this much later it is cancelled."""
REMEMBERED = 512
"""Answers kept for repeated commands; the coordinator repeats only what it still waits for."""
LINGER_MS = 1_000
"""The last answers have this long to leave."""


MakeLabours = Callable[[Notify, str], tuple[Labour, ...]]


def labours(notify: Notify, name: str) -> tuple[Labour, ...]:
    """Return the work that this agent carries: the one place where it is plugged in."""
    return (
        Ranks(notify),
        Probe(notify, node=name),
        Generation(notify),
        Training(notify),
        Weights(notify),
    )


class Agent:
    """One agent on the running event loop; `serve` returns the exit code."""

    def __init__(self, met: Met, make_labours: MakeLabours) -> None:
        self._name, self._met = met.coordinator.pair.name, met
        self._epoch = met.epoch
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[ExitCode] = self._loop.create_future()
        self.ended = threading.Event()
        """Set once the labour is closed: the watchdog may rest."""
        self._last_word = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[tuple[int, int]] = set()
        self._answers: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._forgotten_seq = 0
        self._labours = make_labours(self.notify, self._name)
        self._handlers: dict[type[Message], Handler] = {}
        for labour in self._labours:
            self._handlers |= labour.commands()
        self._socket = LoopSocket(met.socket, self._receive)

    # -- life and end ------------------------------------------------------------------------

    async def serve(self) -> ExitCode:
        """Work until told to end, then close the labour and send the last word."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._ending
        finally:
            await self._close()
            if self._last_word:
                self._send(self._last_word)
            self._socket.close(LINGER_MS)

    def lost(self, silence_ns: int) -> None:
        """End because the coordinator is silent. Called in the echo's thread, as its last act.

        If the event loop does not bring the agent to its end, the labour is killed without it.
        """
        text = f"the coordinator was silent for {silence_ns / NS_PER_S:.2f} s"
        self._loop.call_soon_threadsafe(self._end, ExitCode.INFRASTRUCTURE, text)
        if self.ended.wait(END_WITHIN_NS / NS_PER_S):
            return
        for labour in self._labours:
            labour.kill_now()
        sys.stderr.write(f"agent {self._name}: {text}; work is stuck and was killed\n")
        sys.stderr.flush()
        os._exit(ExitCode.INFRASTRUCTURE)

    def broken(self, error: Exception) -> None:
        """End because the heartbeat's thread failed: a bug of ours. Called in that thread."""
        self._loop.call_soon_threadsafe(self._break, error)

    def notify(self, note: Note) -> None:
        """Send unasked news to the coordinator, from any thread."""
        self._loop.call_soon_threadsafe(self._send_note, note)

    def _send_note(self, note: Note) -> None:
        self._send(self._pack(note, None))

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        self._send_note(Note(level="warning", text=f"{self._name} ends on {name}"))
        self._end(ExitCode.INTERRUPTED, f"ends on {name}")

    def _end(self, code: ExitCode, text: str) -> None:
        if not self._ending.done():
            if text:
                sys.stderr.write(f"agent {self._name}: {text}\n")
            self._ending.set_result(code)

    def _break(self, error: BaseException) -> None:
        """End with the traceback of a bug in the agent itself."""
        if not self._ending.done():
            self._ending.set_exception(error)

    async def _close(self) -> None:
        """Stop all work; what does not stop in time is killed, and the last word says so."""
        for task in self._tasks:
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_NS / NS_PER_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                for labour in self._labours:
                    await labour.close()
        except BaseException as error:
            for labour in self._labours:
                labour.kill_now()
            if not isinstance(error, TimeoutError | HarnessError):
                raise
            text = f"work did not stop by itself ({str(error) or 'time is up'}); it was killed"
            sys.stderr.write(f"agent {self._name}: {text}\n")
            if self._last_word:
                failure = Failure(error=type(error).__name__, text=text)
                self._last_word = self._pack(failure, codec.decode(self._last_word).re)

    # -- commands ----------------------------------------------------------------------------

    def _receive(self, frames: list[Frame]) -> None:
        try:
            self._received(codec.decode(frames[-1].bytes))
        except codec.WireError as error:
            self._send_note(Note(level="error", text=str(error)))
        except Exception as error:  # nobody awaits this callback
            self._break(error)

    def _received(self, envelope: Envelope) -> None:
        key = (envelope.epoch, envelope.seq)
        if envelope.epoch < self._epoch or envelope.seq == 0 or key in self._under_way:
            return  # an older life of the coordinator; a late welcome; asked already
        if envelope.epoch > self._epoch:
            self._epoch, self._forgotten_seq = envelope.epoch, 0
            self._answers.clear()
        if answer := self._answers.get(key):
            self._send(answer)
        elif envelope.seq <= self._forgotten_seq:
            text = f"command {key} was answered long ago"
            self._send(self._pack(Failure(error="Forgotten", text=text), envelope.seq))
        else:
            self._under_way.add(key)
            task = self._loop.create_task(self._perform(envelope))
            self._tasks.add(task)
            task.add_done_callback(self._performed)

    def _performed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._break(error)

    async def _perform(self, envelope: Envelope) -> None:
        key = (envelope.epoch, envelope.seq)
        deadline_ns = time.monotonic_ns() + envelope.deadline_ns if envelope.deadline_ns else 0
        try:
            body = codec.decode_body(envelope)
        except codec.WireError as error:
            answer: Message = Failure(error=type(error).__name__, text=str(error))
        else:
            if isinstance(body, Shutdown):
                done = Done(t_ns=time.monotonic_ns())
                self._last_word = self._pack(done, envelope.seq)
                self._end(ExitCode.PASSED, "")
                return
            answer = await self._answer(body, deadline_ns)
        try:
            data = self._pack(answer, envelope.seq)
        except codec.WireError as error:
            data = self._pack(Failure(error="WireError", text=str(error)), envelope.seq)
        self._under_way.discard(key)
        self._answers[key] = data
        if len(self._answers) > REMEMBERED:
            (_, seq), _ = self._answers.popitem(last=False)
            self._forgotten_seq = max(self._forgotten_seq, seq)
        self._send(data)

    async def _answer(self, body: Message, deadline_ns: int) -> Message:
        """Have the labour answer; whatever goes wrong becomes a `Failure`."""
        kind = codec.kind_of(body)
        handler = self._handlers.get(type(body))
        if handler is None:
            return Failure(error="NotACommand", text=f"no labour on {self._name} does {kind!r}")
        limit = None
        if deadline_ns:
            limit = (deadline_ns + CUT_OFF_NS - time.monotonic_ns()) / NS_PER_S
        timeout = asyncio.timeout(limit)
        try:
            async with timeout:
                return await handler(body, deadline_ns)
        except TimeoutError as error:
            if timeout.expired():
                return Failure(error="Expired", text=f"{kind} was not done at its deadline")
            return Failure(error="TimeoutError", text=str(error))
        except asyncio.CancelledError:
            self._send_note(Note(level="warning", text=f"{kind} was cut off: the agent ends"))
            raise
        except HarnessError as error:
            return Failure(error=type(error).__name__, text=str(error))
        except Exception:
            return Failure(error="Bug", text=traceback.format_exc())

    # -- sending -----------------------------------------------------------------------------

    def _pack(self, body: Message, re: int | None) -> bytes:
        return codec.encode(
            body,
            run=self._met.run,
            node=self._name,
            epoch=self._epoch,
            seq=0,
            re=re,
            t_mono_ns=time.monotonic_ns(),
        )

    def _send(self, data: bytes) -> None:
        self._socket.send([data])  # when the queue is full, the coordinator asks again


def run(
    coordinator: Coordinator, max_wait_ns: int, make_labours: MakeLabours = labours
) -> ExitCode:
    """Meet the coordinator, serve it, and leave nothing behind. Blocks; returns the exit code."""
    ask_for_real_time()  # the coordinator waits for answers while collectives fill the CPUs
    met = meet(coordinator, hello(), max_wait_ns)
    sys.setswitchinterval(0.0005)  # nor does the event loop wait 5 ms for a thread's Python
    with awake():
        return asyncio.run(_serve(met, make_labours))


async def _serve(met: Met, make_labours: MakeLabours) -> ExitCode:
    agent = Agent(met, make_labours)
    echo = Echo(met, lost=agent.lost, broken=agent.broken)
    echo.start()
    try:
        return await agent.serve()
    finally:
        agent.ended.set()
        met.close()
        echo.join()
