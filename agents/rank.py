"""One rank: a child process of an agent that makes communicators and runs collectives.

``python -m agents.rank`` is started by `agents.ranks` with an inherited socket. Two threads: the
*control* thread reads orders and answers at once what concerns the traffic's gate; the main thread
does torch's work, one order at a time, and between orders keeps the traffic going. Both meet at
one condition. The process ends when its socket closes or its agent dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque

from agents.collective import Operation
from agents.communicators import Communicators
from agents.frames import Frame, Unpacker, pack
from agents.pipe import FRAMES, Body, Position, WhereAreYou
from agents.process import die_with
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.gate import Gate, Watch
from harness.processes import ask_for_real_time
from harness.wire.messages import (
    DestroyGroups,
    Done,
    EndTraffic,
    Failure,
    Held,
    Hold,
    MakeGroups,
    Message,
    Quiesced,
    RankSamples,
    RanksReady,
    Resume,
    Resumed,
    RunCollective,
    Samples,
    StartTraffic,
    StopAt,
    TrafficSoFar,
    TrafficTimes,
)

_LOOK_UP_NS = NS_PER_S
"""How often the control thread looks at an iteration in flight."""
_BROKEN = {
    MakeGroups: "GroupsFailed",
    DestroyGroups: "GroupsFailed",
    RunCollective: "CollectiveBroken",
    StartTraffic: "CollectiveBroken",
}
"""What an order is said to have failed with when torch raises. The culprit is not known here."""


class Rank:
    """State of one rank. Everything below `_lock` is shared by its two threads."""

    def __init__(self, line: socket.socket, rank: int, communicators: Communicators) -> None:
        self._line = line
        self._rank = rank
        self._comms = communicators
        self._sending = threading.Lock()
        self._lock = threading.Condition()
        self._orders: deque[Frame[Body]] = deque()
        self._gate: Gate | None = None
        self._broken = ""
        self._starting: Frame[Body] | None = None
        self._stopping: list[Frame[Body]] = []
        self._watches: list[tuple[Frame[Body], Watch]] = []
        self._stall_ns = 0
        self._entered = 0
        self._waiting = False
        self._operation: Operation | None = None  # main thread only

    # -- the control thread --------------------------------------------------------------------

    def control(self) -> None:
        """Read orders until the agent is gone, then end the process, whatever torch is doing."""
        ask_for_real_time()  # the switch waits for these answers while collectives fill the CPUs
        unpacker = Unpacker(FRAMES)
        while True:
            if not select.select([self._line], [], [], self._look_after())[0]:
                continue
            try:
                data = self._line.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                os._exit(0)
            for frame in unpacker.feed(data):
                with self._lock:
                    answer = self._at_once(frame)
                    if answer is None:
                        self._lock.notify()
                if answer is not None:
                    self._say(frame.seq, answer)

    def _at_once(self, frame: Frame[Body]) -> Message | None:
        """Answer what can be answered under the lock; queue or remember the rest."""
        match frame.body:
            case WhereAreYou():
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                return Position(entered=self._entered, inside=self._inside())
            case Hold() | StopAt() | Resume() | TrafficSoFar() | EndTraffic():
                return self._on_traffic(frame)
            case _:
                if self._gate and not self._gate.standing:
                    return self._refused("Busy", "traffic is running: hold and stop it first")
                self._orders.append(frame)
                return None

    def _on_traffic(self, frame: Frame[Body]) -> Message | None:
        gate, body = self._gate, frame.body
        if gate is None:
            # What broke it is most likely another rank: this one does not name itself.
            ranks = () if self._broken else (self._rank,)
            text = self._broken or "no traffic was started"
            return Failure(error="NoTraffic", text=text, ranks=ranks)
        match body:
            case Hold():
                return Held(entered={self._rank: gate.hold()})
            case StopAt():
                return self._stop_at(gate, frame, body.iteration)
            case Resume():
                self._watches.append((frame, self._watch(gate, body)))
                return None
            case TrafficSoFar():
                spans = list(gate.spans)[-body.last :] if body.last > 0 else []
                return TrafficTimes(times_ns={self._rank: tuple(b - a for a, b in spans)})
            case _:
                return self._end_traffic(gate)

    def _stop_at(self, gate: Gate, frame: Frame[Body], iteration: int) -> Message | None:
        if not gate.stop_at(iteration):
            text = f"has entered iteration {gate.entered}, beyond {iteration}"
            return self._refused("Beyond", text)
        if gate.standing:
            return Quiesced(last_good_ns={self._rank: gate.last_good_ns})
        self._stopping.append(frame)
        return None

    def _watch(self, gate: Gate, asked: Resume) -> Watch:
        now_ns = time.monotonic_ns()
        if asked.watch_only:
            return Watch(now_ns, asked.reference_ns, asked.within_pct)
        return gate.resume(now_ns, asked.reference_ns, asked.within_pct)

    def _end_traffic(self, gate: Gate) -> Message:
        if not gate.standing:
            return self._refused("Busy", "traffic is not standing still: stop it first")
        gate.end()
        self._gate = None
        return Done(t_ns=time.monotonic_ns())

    def _inside(self) -> bool:
        return self._waiting or bool(self._gate and self._gate.inside_since_ns)

    def _look_after(self) -> float:
        """Answer watches whose deadline has come, tell of a stall; return seconds until the next.

        It falls to the control thread because the main thread may be stuck in an iteration.
        """
        news: list[tuple[int, Message]] = []
        with self._lock:
            now_ns = time.monotonic_ns()
            gate = self._gate
            due = [pair for pair in self._watches if pair[0].deadline_ns <= now_ns]
            self._watches = [pair for pair in self._watches if pair not in due]
            since_ns = gate.inside_since_ns if gate else 0
            for frame, watch in due:
                if since_ns:
                    watch.longest_ns = max(watch.longest_ns, now_ns - since_ns)
                news.append((frame.seq, self._resumed(watch)))
            if gate and since_ns and self._stall_ns and now_ns - since_ns > self._stall_ns:
                text = f"iteration {gate.entered} has not come back for {self._stall_ns / 1e9:g} s"
                self._stall_ns = 0  # said once
                news.append((0, _failed("CollectiveExpired", text)))
            waits_ns = [frame.deadline_ns - now_ns for frame, _ in self._watches]
        for seq, message in news:
            self._say(seq, message)
        return max(NS_PER_MS, min([_LOOK_UP_NS, *waits_ns])) / NS_PER_S

    def _resumed(self, watch: Watch) -> Resumed:
        return Resumed(
            released_ns={self._rank: watch.released_ns},
            first_good_ns={self._rank: watch.first_good_ns},
            steady_ns={self._rank: watch.steady_ns},
            longest_ns={self._rank: watch.longest_ns},
        )

    def _refused(self, error: str, text: str) -> Failure:
        """Return a failure whose cause is this rank, or what it was asked to do."""
        return Failure(error=error, text=text, ranks=(self._rank,))

    def _say(self, seq: int, message: Message) -> None:
        with self._sending:  # a long answer may go out in pieces
            self._line.sendall(pack(seq, 0, message))

    # -- the main thread -----------------------------------------------------------------------

    def work(self) -> None:
        """Do orders as they come, and iterations of the traffic in between; never returns."""
        while True:
            with self._lock:
                while not self._orders and not (self._gate and self._gate.may_enter()):
                    self._lock.wait()
                frame = self._orders.popleft() if self._orders else None
                if frame is None and self._gate:
                    self._gate.enter(time.monotonic_ns())
                    iteration = self._gate.entered
            if frame is None:
                self._iterate(iteration)
            else:
                self._do(frame)

    def _do(self, frame: Frame[Body]) -> None:
        try:
            answer = self._done(frame)
        except ValueError as error:
            answer = self._refused("Refused", str(error))
        except Exception as error:  # torch raises anything; it becomes the answer
            traceback.print_exc()
            answer = _failed(_BROKEN.get(type(frame.body), "RankFailed"), str(error))
        self._waiting = False
        if answer is not None:
            self._say(frame.seq, answer)

    def _done(self, frame: Frame[Body]) -> Message | None:
        match frame.body:
            case MakeGroups(groups=groups):
                ready_ns = self._comms.make(groups)
                if self._operation:
                    self._operation.bind(self._comms.everyone)
                return RanksReady(
                    ready_ns=ready_ns,
                    pids={self._rank: os.getpid()},
                    backend=self._comms.backend,
                    effective_env=self._comms.effective_env(),
                )
            case DestroyGroups():
                return Done(t_ns=self._comms.destroy())
            case RunCollective() as asked:
                return Samples(ranks=tuple(self._samples(asked)))
            case StartTraffic() as asked:
                self._start_traffic(frame, asked)
                return None
            case other:
                return self._refused("Unknown", f"a rank does not know {type(other).__name__}")

    def _samples(self, asked: RunCollective) -> list[RankSamples]:
        """Run in this rank's groups, in the order of `Groups.subgroups`, which all ranks share."""
        rows = []
        for member in self._comms.members(asked.use_subgroups):
            operation = self._comms.operation(member, asked.op, asked.size_bytes, asked.dtype)
            times_ns: list[int] = []
            wrong = None
            if operation.row.size_bytes:
                times_ns = operation.timed(asked.iterations, asked.warmup, self._entering)
                if asked.verify:
                    self._entering()
                    wrong = operation.verify()
                self._waiting = False
            rows.append(
                RankSamples(
                    rank=self._rank,
                    group=member.ranks,
                    size_bytes=operation.row.size_bytes,
                    times_ns=tuple(times_ns),
                    wrong=wrong,
                )
            )
        return rows

    def _entering(self) -> None:
        self._entered += 1
        self._waiting = True

    # -- traffic -------------------------------------------------------------------------------

    def _start_traffic(self, frame: Frame[Body], asked: StartTraffic) -> None:
        if self._gate:
            raise ValueError("traffic was started already: end it first")
        everyone = self._comms.everyone
        operation = self._comms.operation(everyone, asked.op, asked.size_bytes, asked.dtype)
        if not operation.row.size_bytes:
            raise ValueError(f"{asked.size_bytes} bytes leave nothing for each rank")
        self._entering()
        operation.barrier()
        self._operation = operation
        with self._lock:
            self._gate, self._broken = Gate(), ""
            self._starting, self._stall_ns = frame, asked.timeout_ns

    def _iterate(self, iteration: int) -> None:
        operation = self._operation
        assert operation is not None
        self._entered += 1
        try:
            operation.launch(iteration)
        except Exception as error:  # torch raises anything; it becomes the answer
            self._traffic_broke(f"iteration {iteration}: {error}")
            return
        now_ns = time.monotonic_ns()
        with self._lock:
            said = self._after_iteration(now_ns)
        for seq, message in said:
            self._say(seq, message)

    def _after_iteration(self, now_ns: int) -> list[tuple[int, Message]]:
        gate = self._gate
        assert gate is not None
        begin_ns = gate.inside_since_ns
        gate.leave(now_ns)
        said: list[tuple[int, Message]] = []
        if self._starting:
            said.append((self._starting.seq, Done(t_ns=now_ns)))
            self._starting = None
        if self._watches:
            for frame, watch in list(self._watches):
                if watch.observe(begin_ns, now_ns):
                    said.append((frame.seq, self._resumed(watch)))
                    self._watches.remove((frame, watch))
        if self._stopping and gate.standing:
            quiesced = Quiesced(last_good_ns={self._rank: now_ns})
            said += [(frame.seq, quiesced) for frame in self._stopping]
            self._stopping = []
        return said

    def _traffic_broke(self, text: str) -> None:
        with self._lock:
            waiting = [frame for frame, _ in self._watches]
            waiting += self._stopping + ([self._starting] if self._starting else [])
            self._watches, self._starting, self._stopping = [], None, []
            if self._gate:
                self._gate.end()
            self._gate, self._broken = None, text
        for frame in waiting:
            self._say(frame.seq, _failed("CollectiveBroken", text))
        self._say(0, _failed("CollectiveBroken", text))


def _failed(error: str, text: str) -> Failure:
    return Failure(error=error, text=text)


def main() -> None:
    """Run one rank; see `agents.ranks` for who starts it."""
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("parent", "fd", "rank", "local"):
        options.add_argument(f"--{name}", type=int, required=True)
    found = options.parse_args()
    die_with(found.parent)
    faulthandler.enable()
    sys.setswitchinterval(0.0005)  # the control thread must not wait 5 ms for Python's lock
    line = socket.socket(fileno=found.fd)
    rank = Rank(line, found.rank, Communicators(found.rank, found.local))
    threading.Thread(target=rank.control, name="control", daemon=True).start()
    rank.work()


if __name__ == "__main__":
    main()
