"""One rank of generation: a resident child of an agent, in which engines come and go.

``python -m agents.generation.rank`` is started with an inherited socket. Its main thread does one
order at a time; in between, rank 0 of a free engine runs it. A *control* thread reads the line, so
that a rank that hangs can still be asked where it stands. What fails without being a refusal ends
the process: nothing is known any more of what such an engine holds. So does the line's end.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import NoReturn

import msgspec

from agents.frames import Frame
from agents.generation.base import Engine
from agents.generation.orders import FRAMES, Body, Leave, Ready, Start, Told
from agents.generation.outbox import Outbox
from agents.generation.verbs import Verbs
from agents.line import Line
from agents.process import die_with
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import ExitCode, UsageError
from harness.wire.generation import Stats
from harness.wire.messages import Failure, Message

MODULES = {"paced": "agents.generation.paced", "vllm": "agents.generation.vllm"}
"""Which module has an engine: its ``make(spec, tell)`` returns one."""

_STATS_NS = 250 * NS_PER_MS
"""An instance that makes steps without output tells its state this often."""
_WAIT_MAX_NS = 60 * NS_PER_S


class Rank:
    """State of one rank. The threads share what is below `_lock`; the rest is the main thread's."""

    def __init__(self, line: socket.socket, modules: Mapping[str, str]) -> None:
        self.line = Line(line, FRAMES, self._put)
        self._modules = modules
        self._lock = threading.Condition()
        self._orders: deque[Frame[Body]] = deque()
        self._verbs: Verbs | None = None
        self._outbox = Outbox()
        self._told_ns = 0
        self._standing: Stats | None = None

    def _put(self, frame: Frame[Body]) -> None:
        with self._lock:
            self._orders.append(frame)
            self._lock.notify()

    # -- the main thread -----------------------------------------------------------------------

    def work(self) -> None:
        """Do orders as they come, and run a free engine in between; never returns."""
        while True:
            if not self._orders:  # those that wait already are done before the next step
                self._run()
            with self._lock:
                while not self._orders:
                    self._lock.wait()
                frame = self._orders.popleft()
            self._do(frame)

    def _run(self) -> None:
        """Let a free engine run until an order comes."""
        if self._verbs is None or not self._verbs.leads or self._verbs.engine.lockstep:
            return
        try:
            self._verbs.engine.run(self._wait)
        except Exception as error:  # whatever it raises is the engine's end
            self._fail(0, error)

    def _wait(self, until_ns: int) -> bool:
        """Wait as `agents.generation.base.Wait` says, and tell meanwhile what is due."""
        while True:
            now_ns = time.monotonic_ns()
            due_ns = self._tell_due(now_ns)
            with self._lock:
                if self._orders:
                    return True
                if now_ns >= until_ns:
                    return False
                wake_ns = min(until_ns, due_ns, now_ns + _WAIT_MAX_NS)
                self._lock.wait((wake_ns - now_ns) / NS_PER_S)

    def _do(self, frame: Frame[Body]) -> None:
        body = frame.body
        self.line.begin(body)
        try:
            answer = self._answer(body)
        except UsageError as error:
            answer = Failure(error=type(error).__name__, text=str(error))
        except Exception as error:  # whatever it raises is the engine's end
            self._fail(frame.seq, error)
        self._tell(time.monotonic_ns())
        self.line.say(frame.seq, answer)
        self.line.doing = ""
        if isinstance(body, Leave) and body.ends:
            os._exit(ExitCode.PASSED)

    def _answer(self, body: Body) -> Message:
        if isinstance(body, Start):
            return self._start(body)
        if self._verbs is None:
            return Failure(error="NotStarted", text="a rank's first order makes its engine")
        return self._verbs.do(body)

    def _fail(self, seq: int, error: Exception) -> NoReturn:
        """Say what happened, to the log in full, and end."""
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
        self.line.say(seq, Failure(error="RankFailed", text=text))
        sys.stderr.flush()
        os._exit(ExitCode.BUG)

    def _start(self, order: Start) -> Message:
        module = import_module(self._modules[order.spec.engine])
        engine: Engine = module.make(order.spec, self._outbox.add)
        self._verbs = Verbs(engine, self._stepped)
        facts, warnings = engine.facts()
        return Ready(facts=facts, warnings=warnings, lockstep=engine.lockstep)

    # -- telling -------------------------------------------------------------------------------

    def _stepped(self) -> None:
        self._tell_due(time.monotonic_ns())

    def _tell_due(self, now_ns: int) -> int:
        """Tell what is due; return when to look again."""
        due_ns = self._outbox.due_ns()
        if due_ns is None:
            due_ns = self._told_ns + _STATS_NS
        if due_ns <= now_ns:
            self._tell(now_ns)
            return now_ns + _STATS_NS
        return due_ns

    def _tell(self, now_ns: int) -> None:
        """Tell outputs, and where the instance stands if that has changed. Rank 0's alone."""
        if self._verbs is None or not self._verbs.leads:
            self._outbox.clear()
            return
        self._told_ns = now_ns
        outputs = self._outbox.take(now_ns)
        stats = self._verbs.engine.stats()
        standing = msgspec.structs.replace(stats, t_ns=0)
        if outputs or standing != self._standing:
            self._standing = standing
            self.line.say(0, Told(outputs=outputs, stats=stats))


def main(modules: Mapping[str, str] = MODULES) -> None:
    """Run one rank; see `agents.generation.labour` for who starts it."""
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("parent", "fd", "gpu"):
        options.add_argument(f"--{name}", type=int, required=True)
    found = options.parse_args()
    die_with(found.parent)
    faulthandler.enable()
    sys.setswitchinterval(0.0005)  # the control thread must not wait 5 ms for Python's lock
    rank = Rank(socket.socket(fileno=found.fd), modules)
    threading.Thread(target=rank.line.control, name="control", daemon=True).start()
    rank.work()


if __name__ == "__main__":
    main()
