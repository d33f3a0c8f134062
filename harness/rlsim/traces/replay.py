"""A trace replayed on a network, from event to event: who computes, who waits, who sends when.

A rank works on one node of a lane at a time (GPU, CPU, memory), of those that could begin on the
one that is listed first, and communicates meanwhile. A communication begins once all of its ranks
have come and that before it on the same list is over. It ends for all at once. Deterministic.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from harness.model.advance import FOREVER_NS
from harness.rlsim.flows import Flows
from harness.rlsim.paths import Paths
from harness.rlsim.traces.meetings import ALONE, Laid, Meeting
from harness.rlsim.traces.model import Compute, Lane, Mark, Memory, Program, lane_of, work_ns
from harness.rlsim.traces.standing import Standing
from harness.rlsim.traces.talk import Stage, Talk, Talks
from harness.rlsim.traces.wires import Wires

NOT_YET = -1
"""Instead of the end of a meeting that has begun."""


class Span(NamedTuple):
    """A node at work; of a communication, from its beginning on, not from the rank's coming."""

    rank: int
    place: int
    begin_ns: int
    end_ns: int


@dataclass(eq=False, slots=True)
class Account:
    """How a rank spends its time."""

    end_ns: int = 0
    compute_ns: int = 0
    exposed_ns: int = 0
    waiting_ns: int = 0
    working: int = 0
    talking: int = 0
    waiting: int = 0
    since_ns: int = 0

    def settle(self, now_ns: int) -> None:
        """Book the time since the last change."""
        if past_ns := now_ns - self.since_ns:
            if self.working:
                self.compute_ns += past_ns
            elif self.talking:
                self.exposed_ns += past_ns
            elif self.waiting:
                self.waiting_ns += past_ns
            self.since_ns = now_ns


class Job(NamedTuple):
    """What a node of a lane takes."""

    lane: Lane
    duration_ns: int


@dataclass(eq=False, slots=True)
class _Worker:
    """One rank at work."""

    rank: int
    jobs: Sequence[Job | None]
    """By place; None of what takes no lane."""
    numbers: Sequence[int]
    """By place, the meeting that it is of."""
    account: Account = field(default_factory=Account)
    queues: dict[Lane, list[int]] = field(
        default_factory=lambda: {"gpu": [], "cpu": [], "memory": []}
    )
    busy: dict[Lane, bool] = field(
        default_factory=lambda: {"gpu": False, "cpu": False, "memory": False}
    )
    is_called: bool = False
    """Whether it is to look what it could begin."""


@dataclass(eq=False, slots=True)
class _Talking:
    """A meeting that has begun."""

    meeting: Meeting
    talk: Talk
    begin_ns: int
    stage: int = -1
    is_sending: bool = False
    left: int = 0
    """Flows of its stage that have not arrived."""
    local_end_ns: int = 0


class Replay:
    """See the module. `run` once; then ask what was found.

    `speeds`: by rank, how fast it computes, 1 being as the trace says.
    """

    def __init__(
        self,
        laid: Laid,
        talks: Talks,
        wires: Wires,
        latency_ns: int,
        speeds: Mapping[int, float] | None = None,
        *,
        keep_spans: bool = False,
    ) -> None:
        self.laid = laid
        self.standing = Standing(laid)
        self.now_ns = 0
        self.times_ns: dict[int, tuple[int, int]] = {}
        """By meeting that has begun, when it did; and when it ended, or `NOT_YET`."""
        self.spans: list[Span] | None = [] if keep_spans else None
        self.talks = talks
        self._latency_ns = latency_ns
        self._flows = Flows(wires.capacities_bytes_per_s())
        self._flows_due_ns = FOREVER_NS
        self._senders: list[_Talking] = []
        """By flow."""
        self._posted: list[tuple[_Talking, Stage]] = []
        self._moments: list[int] = []
        self._ends: dict[int, list[tuple[_Worker, int]]] = defaultdict(list)
        self._turns: dict[int, list[_Talking]] = defaultdict(list)
        self._freed: list[tuple[_Worker, int]] = []
        self._called: list[_Worker] = []
        self._workers = self._hire(speeds or {})

    def _hire(self, speeds: Mapping[int, float]) -> dict[int, _Worker]:
        workers = {}
        for program in self.laid.trace.programs:
            by_speed: dict[float, list[Job | None]] = {}
            for rank in program.ranks:
                speed = speeds.get(rank, 1.0)
                if speed not in by_speed:
                    by_speed[speed] = self._jobs(program, speed)
                workers[rank] = _Worker(rank, by_speed[speed], self.laid.meetings.at[rank])
        return {rank: workers[rank] for rank in sorted(workers)}

    def _jobs(self, program: Program, speed: float) -> list[Job | None]:
        found: list[Job | None] = []
        for node in program.nodes:
            if isinstance(node, Compute | Memory):
                duration_ns = work_ns(node, self.laid.trace.gpu)
                assert duration_ns is not None, "checked at the door"
                found.append(Job(lane_of(node), round(duration_ns / speed)))
            else:
                found.append(None)
        return found

    @property
    def accounts(self) -> dict[int, Account]:
        """How each rank spent its time."""
        return {rank: worker.account for rank, worker in self._workers.items()}

    # -- from event to event -----------------------------------------------------------------------

    def run(self) -> None:
        """Go on until nothing is left that could happen."""
        self._freed = [(self._workers[rank], place) for rank, place in self.standing.first()]
        while True:
            self._go_on()
            self._begin_works()
            self._send_posted()
            due_ns = self._moments[0] if self._moments else FOREVER_NS
            due_ns = min(due_ns, self._flows_due_ns)
            if due_ns == FOREVER_NS:
                break
            self.now_ns = due_ns
            if self._flows_due_ns <= due_ns:
                self._arrive()
            if self._moments and self._moments[0] == due_ns:
                heapq.heappop(self._moments)
                ends, turns = self._ends.pop(due_ns, ()), self._turns.pop(due_ns, ())
                for worker, place in ends:
                    self._end_work(worker, place)
                for talking in turns:
                    self._turn(talking)
        for worker in self._workers.values():
            worker.account.settle(self.now_ns)

    def _wake_at(self, at_ns: int) -> None:
        if at_ns not in self._ends and at_ns not in self._turns:
            heapq.heappush(self._moments, at_ns)

    def _go_on(self) -> None:
        """Let nodes begin that wait for none any more; what takes no time ends at once."""
        while self._freed:
            freed, self._freed = self._freed, []
            for worker, place in freed:
                number, job = worker.numbers[place], worker.jobs[place]
                if job is not None:
                    heapq.heappush(worker.queues[job.lane], place)
                    self._call(worker)
                elif number != ALONE:
                    worker.account.settle(self.now_ns)
                    worker.account.waiting += 1
                    if self.standing.enter(number):
                        self._begin(number)
                elif isinstance(self.laid.program[worker.rank].nodes[place], Mark):
                    self._end(worker, place)

    def _call(self, worker: _Worker) -> None:
        if not worker.is_called:
            worker.is_called = True
            self._called.append(worker)

    def _end(self, worker: _Worker, place: int) -> None:
        worker.account.end_ns = self.now_ns
        for follower in self.standing.end(worker.rank, place):
            self._freed.append((worker, follower))

    # -- works -------------------------------------------------------------------------------------

    def _begin_works(self) -> None:
        called, self._called = self._called, []
        for worker in called:
            worker.is_called = False
            for lane, queue in worker.queues.items():
                if queue and not worker.busy[lane]:
                    place = heapq.heappop(queue)
                    job = worker.jobs[place]
                    assert job is not None
                    worker.busy[lane] = True
                    worker.account.settle(self.now_ns)
                    worker.account.working += 1
                    end_ns = self.now_ns + job.duration_ns
                    self._wake_at(end_ns)
                    self._ends[end_ns].append((worker, place))

    def _end_work(self, worker: _Worker, place: int) -> None:
        job = worker.jobs[place]
        assert job is not None
        worker.busy[job.lane] = False
        worker.account.settle(self.now_ns)
        worker.account.working -= 1
        if worker.queues[job.lane]:
            self._call(worker)
        self._keep(worker.rank, place, self.now_ns - job.duration_ns)
        self._end(worker, place)

    def _keep(self, rank: int, place: int, begin_ns: int) -> None:
        if self.spans is not None:
            self.spans.append(Span(rank, place, begin_ns, self.now_ns))

    # -- meetings ----------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        meeting = self.laid.meetings.all[number]
        self.times_ns[number] = (self.now_ns, NOT_YET)
        for rank, _ in meeting.seats:
            account = self._workers[rank].account
            account.settle(self.now_ns)
            account.waiting -= 1
            account.talking += 1
        self._turn_at(self.now_ns, _Talking(meeting, self.talks.of(meeting), self.now_ns))

    def _next_stage(self, talking: _Talking) -> None:
        """Begin a stage with its latency, or end the meeting after its last one."""
        if talking.stage == len(talking.talk.stages):
            self._end_meeting(talking)
            return
        stage = talking.talk.stages[talking.stage]
        talking.is_sending = bool(len(stage.paths))
        local_ns = 0 if talking.is_sending else stage.local_ns
        self._turn_at(self.now_ns + stage.latency_ns + local_ns, talking)

    def _turn_at(self, at_ns: int, talking: _Talking) -> None:
        self._wake_at(at_ns)
        self._turns[at_ns].append(talking)

    def _turn(self, talking: _Talking) -> None:
        """Send what a stage sends after its latency; or go on to the next stage."""
        if talking.is_sending:
            stage = talking.talk.stages[talking.stage]
            talking.is_sending = False
            talking.left = len(stage.paths)
            talking.local_end_ns = self.now_ns + stage.local_ns
            self._posted.append((talking, stage))
        else:
            talking.stage += 1
            self._next_stage(talking)

    def _end_meeting(self, talking: _Talking) -> None:
        meeting = talking.meeting
        self.times_ns[meeting.number] = (talking.begin_ns, self.now_ns)
        begins = self.standing.close(meeting.number)
        for rank, place in meeting.seats:
            worker = self._workers[rank]
            worker.account.settle(self.now_ns)
            worker.account.talking -= 1
            self._keep(rank, place, talking.begin_ns)
        if begins:
            self._begin(meeting.then)
        for rank, place in meeting.seats:
            self._end(self._workers[rank], place)

    # -- flows -------------------------------------------------------------------------------------

    def _send_posted(self) -> None:
        """Let all flows begin that begin now, at once."""
        if not self._posted:
            return
        for talking, stage in self._posted:
            self._senders += [talking] * len(stage.paths)
        paths = Paths.joined([stage.paths for _, stage in self._posted])
        sizes = np.concatenate([stage.sizes_bytes for _, stage in self._posted])
        self._posted = []
        self._flows.add(self.now_ns, paths, sizes, self._latency_ns)
        self._flows_due_ns = self._flows.next_ns()

    def _arrive(self) -> None:
        for flow in self._flows.advance(self.now_ns):
            talking = self._senders[flow]
            talking.left -= 1
            if not talking.left:
                self._turn_at(max(self.now_ns, talking.local_end_ns), talking)
        self._flows_due_ns = self._flows.next_ns()
