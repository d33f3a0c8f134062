"""The coordinator of a generation pool in virtual time: instances, requests, who is sent where.

Requests are sent as the dispatcher of a bench sends them (`harness.scheduling.router`), to engines
that live the paced engine's life cycle (`harness.rlsim.engine`). What a policy sees of it is a
`View`. Deterministic. Times in ns, lengths in tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import UsageError
from harness.model.advance import FOREVER_NS
from harness.model.placement import Instance
from harness.model.profile import Profile
from harness.model.replay import ReplayRequest
from harness.model.requests import Carried, Event
from harness.rlsim.engine import Engine
from harness.scheduling.compute import Compute
from harness.scheduling.migration import By, estimates_of
from harness.scheduling.router import Candidate, Router, Wanted, nowhere
from harness.scheduling.view import Finished, Move, Moved, Requests, View

LINK_BYTES_PER_S = 50e9
"""Over which KV is sent: 400 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a pool runs on: the profile of its GPUs, GPUs of each node, what an engine takes."""

    profile: Profile
    gpus_of: Mapping[str, int]
    sequences_max: int = 256
    step_max_tokens: int = 2048
    kv_max_tokens: int = 0
    """Of one instance; 0: what its GPUs' memory holds."""
    link_bytes_per_s: float = LINK_BYTES_PER_S

    def compute(self) -> Compute:
        """Return what policies know of it."""
        return Compute.of(
            self.profile,
            sequences_max=self.sequences_max,
            step_max_tokens=self.step_max_tokens,
            kv_max_tokens=self.kv_max_tokens,
        )


@dataclass(slots=True, eq=False)
class Job:
    """A request as the coordinator keeps it."""

    request: ReplayRequest
    batch: int
    group: int
    context_tokens: int
    """Prompt of the present turn."""
    turn: int = 0
    before_tokens: int = 0
    """Produced in turns before the present one."""
    recomputed_tokens: int = 0
    """Contexts with which turns after the first began, the present one's too."""
    carried: Carried | None = None
    """As it left the last instance, in the present turn."""
    at: str = ""
    home: str = ""
    assigned: str = ""

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    @property
    def value(self) -> Carried:
        """What is submitted: the present turn, with what there is of it."""
        turn = self.request.turns[self.turn]
        return self.carried or Carried(self.id, self.context_tokens, turn.response_tokens, 0)

    def next_turn(self) -> bool:
        """Go on to the next turn; False where that was the last."""
        produced = self.request.turns[self.turn].response_tokens
        self.before_tokens += produced
        self.turn, self.carried, self.at = self.turn + 1, None, ""
        if self.turn == len(self.request.turns):
            return False
        self.context_tokens += produced + self.request.turns[self.turn].prompt_tokens
        self.recomputed_tokens += self.context_tokens
        return True

    @property
    def recomputes_tokens(self) -> int:
        """Contexts of the turns that are still to come."""
        context, found, turns = self.context_tokens, 0, self.request.turns
        for before, turn in pairwise(turns[self.turn :]):
            context += before.response_tokens + turn.prompt_tokens
            found += context
        return found


@dataclass(frozen=True, order=True)
class _Landing:
    """A request on its way with its KV."""

    at_ns: int
    number: int
    job: Job = field(compare=False)
    target: str = field(compare=False)


class Fleet:
    """Instances by name, and all requests that have not ended."""

    def __init__(
        self, hardware: Hardware, compute: Compute, before: Sequence[Finished] = ()
    ) -> None:
        self.hardware, self.compute, self._before = hardware, compute, before
        self.now_ns = 0
        self.engines: dict[str, Engine] = {}
        self.coming: frozenset[str] = frozenset()
        """Names of instances that are being built."""
        self.jobs: dict[str, Job] = {}
        self.moved: list[Moved] = []
        self.preemptions = 0
        self._past: list[Finished] = []
        self._ended: list[tuple[int, int, int]] = []
        """Of the present batch: group, length, and contexts computed by turns after the first."""
        self._queue: deque[Job] = deque()
        self._landings: list[_Landing] = []
        self._groups: dict[tuple[int, int], int] = {}
        self._siblings_home: dict[int, str] = {}
        self._tokens_gone = 0
        self._ways = estimates_of(hardware.profile, 1.0, hardware.link_bytes_per_s)

    @property
    def tokens(self) -> int:
        """Produced so far, as the engines count them."""
        return self._tokens_gone + sum(engine.tokens for engine in self.engines.values())

    # -- time passes ------------------------------------------------------------------------

    def next_ns(self) -> int:
        """Return when something happens next of itself."""
        due = [engine.due_ns for engine in self.engines.values()]
        return min((*due, *(landing.at_ns for landing in self._landings[:1])), default=FOREVER_NS)

    def happen(self) -> None:
        """Let all happen that is due."""
        for engine in self.engines.values():
            if engine.due_ns <= self.now_ns:
                self._hear(engine.reach(self.now_ns))
        while self._landings and self._landings[0].at_ns <= self.now_ns:
            self._land(heapq.heappop(self._landings))

    def settle(self) -> None:
        """Bring every instance to the end of its present step, so that it can be looked at."""
        for engine in self.engines.values():
            self._hear(engine.reach(self.now_ns))

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            self.preemptions += event.what == "preempted"
            if event.what == "finished":
                job = self.jobs[event.request.id]
                if job.next_turn():
                    self._queue.append(job)
                else:
                    del self.jobs[job.id]
                    self._ended.append((job.group, job.before_tokens, job.recomputed_tokens))

    # -- instances and requests come and go ---------------------------------------------------

    def build(self, instances: Iterable[Instance]) -> None:
        """Bring up instances, empty. Raises `UsageError` where one does not fit its GPUs."""
        hardware = self.hardware
        for instance in instances:
            self.engines[instance.name] = Engine.up(
                instance,
                hardware.profile,
                self.now_ns,
                sequences_max=hardware.sequences_max,
                step_max_tokens=hardware.step_max_tokens,
                kv_max_tokens=hardware.kv_max_tokens,
            )

    def take_down(self, names: Iterable[str]) -> None:
        """End settled instances; their requests wait ahead of all others, with what they have."""
        for name in names:
            engine = self.engines.pop(name)
            self._tokens_gone += engine.tokens
            self._queue.extendleft(reversed([self._left(carried) for carried in engine.end()]))

    def add(self, requests: Iterable[ReplayRequest], batch: int) -> None:
        """Take the requests of the next batch; `order` queues them."""
        if batch:
            self._past.append(_finished(batch - 1, self._ended))
            self._ended = []
        for request in requests:
            group = self._groups.setdefault((batch, request.prompt), len(self._groups))
            self.jobs[request.id] = Job(request, batch, group, request.prompt_tokens)

    def order(self, ids: Sequence[str]) -> None:
        """Queue requests in this order."""
        self._queue = deque(self.jobs[id_] for id_ in ids)

    def assign(self, assignment: Mapping[str, str]) -> None:
        """Let requests run on certain instances only, as long as those are up: id -> name."""
        for id_, name in assignment.items():
            self.jobs[id_].assigned = name

    # -- who is sent where --------------------------------------------------------------------

    def dispatch(self) -> None:
        """Send what waits to wherever there is room for it, as a bench's dispatcher does.

        Raises `UsageError` where a request can run nowhere, now or later.
        """
        if not self._queue or not self.engines:
            return
        router = Router(map(self._candidate, self.engines.values()))
        passed: list[Job] = []
        while self._queue and not router.is_full:
            job = self._queue.popleft()
            bound = router[job.assigned]
            if job.assigned in self.coming or (bound and not bound.takes(1)):
                passed.append(job)
                continue
            wanted = self._wanted(job)
            if chosen := router.route(wanted):
                self._send(job, self.engines[chosen.name])
                router.replace(self._candidate(self.engines[chosen.name]))
            elif not self.coming and (why := nowhere(wanted, router.candidates)):
                raise UsageError(f"request {job.id} can run nowhere: {why}")
            else:
                passed.append(job)
        self._queue.extendleft(reversed(passed))

    def _candidate(self, engine: Engine) -> Candidate:
        requests, known = len(engine.state.requests), engine.known_tokens(self.now_ns)
        seats = engine.state.limits.sequences_max
        batch = min(requests + 1, seats)
        step_s = float(self.compute.step_s(engine.instance.layout, batch, known))
        return Candidate(
            name=engine.name,
            accepting=True,
            requests=requests,
            waiting=engine.waiting,
            sequences_max=seats,
            kv_free_tokens=engine.kv_capacity_tokens - known,
            length_max_tokens=engine.length_max_tokens,
            tokens_per_s=batch / step_s,
        )

    def _wanted(self, job: Job) -> Wanted:
        carried, bound = job.value, self.engines.get(job.assigned)
        length = carried.prompt_tokens + carried.response_tokens
        return Wanted(
            known_tokens=carried.prompt_tokens + carried.produced_tokens,
            length_tokens=length,
            home=job.home,
            sibling=self._siblings_home.get(job.group, ""),
            only=bound.name if bound and length <= bound.length_max_tokens else "",
        )

    def _send(self, job: Job, engine: Engine) -> None:
        engine.submit(job.value, self.now_ns)
        job.at = job.home = self._siblings_home[job.group] = engine.name

    def _left(self, carried: Carried) -> Job:
        """Note that a request has left its instance, with what it has."""
        job = self.jobs[carried.id]
        job.carried, job.at = carried, ""
        return job

    # -- moves --------------------------------------------------------------------------------

    def move_ms(self, source: str, target: str, context_tokens: int) -> dict[By, float]:
        """Return what either way of moving takes: KV over the link, or computed anew."""
        between = [self.engines[name].instance.layout for name in (source, target)]
        found = {by: ms(between[0], between[1], context_tokens) for by, ms in self._ways.items()}
        return {by: ms for by, ms in found.items() if ms is not None}

    def move(self, move: Move) -> None:
        """Take a request to another instance of a settled fleet, with KV where that is cheaper."""
        carried = self.engines[move.source].hand_over(move.id)
        if carried is None:
            return
        job = self._left(carried)
        job.assigned = move.target if job.assigned else ""
        self.moved.append(Moved(move.id, move.source, move.target, self.now_ns / NS_PER_S))
        known = carried.prompt_tokens + carried.produced_tokens
        ms = self.move_ms(move.source, move.target, known)
        if 0 < carried.kv_tokens < known and ms["kv"] <= ms["recompute"]:
            job.at = move.target
            lands_ns = self.now_ns + round(ms["kv"] * NS_PER_MS)
            landing = _Landing(lands_ns, len(self.moved), job, move.target)
            heapq.heappush(self._landings, landing)
        else:
            self._send(job, self.engines[move.target])

    def _land(self, landing: _Landing) -> None:
        """Let a request go on where it was sent with its KV, or queue it if that is gone."""
        job, engine = landing.job, self.engines.get(landing.target)
        if engine is None:
            job.at = ""
            self._queue.appendleft(job)
            return
        self._hear(engine.take_over(job.value, self.now_ns))
        job.home = engine.name

    # -- what policies see --------------------------------------------------------------------

    def view(self, cap_tokens: int, *, truth: bool) -> View:
        """Return a settled fleet as policies see it, with the true lengths or without."""
        at_of = {name: at for at, name in enumerate(self.engines)}
        rows = np.array([self._row(job, at_of) for job in self.jobs.values()], dtype=np.int64)
        group, produced, context, at, running, batch, length, recomputed = rows.reshape(-1, 8).T
        requests = Requests(
            ids=tuple(self.jobs),
            group=group,
            produced=produced,
            context=context,
            at=at,
            running=running.astype(bool),
            batch=batch,
            recomputed=recomputed,
        )
        recomputes = [job.recomputes_tokens for job in self.jobs.values()] if truth else []
        return View(
            now_s=self.now_ns / NS_PER_S,
            instances=tuple(engine.seen() for engine in self.engines.values()),
            requests=requests,
            history=(*self._before, *self._past, _finished(len(self._past), self._ended)),
            gpus_of=self.hardware.gpus_of,
            cap_tokens=cap_tokens,
            moved=tuple(moved for moved in self.moved if moved.id in self.jobs),
            truth=length - produced if truth else None,
            truth_recomputes=np.array(recomputes, np.int64) if truth else None,
        )

    def _row(self, job: Job, at_of: Mapping[str, int]) -> tuple[int, ...]:
        value, at = job.value, at_of.get(job.at, -1)
        produced, runs = value.produced_tokens, at >= 0
        engine = self.engines.get(job.at)
        if engine and job.id in engine.state.requests:
            produced, runs = engine.produced(job.id)
        context, total = value.prompt_tokens + produced, job.before_tokens + produced
        length, recomputed = job.request.response_tokens, job.recomputed_tokens
        return job.group, total, context, at, int(runs), job.batch, length, recomputed


def _finished(batch: int, ended: list[tuple[int, int, int]]) -> Finished:
    group, length, recomputed = np.array(ended, dtype=np.int64).reshape(-1, 3).T
    return Finished(batch, group, length, recomputed)
