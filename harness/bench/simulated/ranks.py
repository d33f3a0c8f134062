"""The simulated labour of ranks: a node's ranks of collectives, as `agents.ranks` has them.

What all nodes do together is `harness.bench.simulated.company`; here a node is asked and answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from harness.bench.simulated.company import Company
from harness.bench.simulated.deadline import in_time
from harness.bench.simulated.loop import Loop
from harness.bench.simulated.world import Verb, World
from harness.model.advance import FOREVER_NS
from harness.model.gate import Gate, Watch
from harness.model.intake import Refused
from harness.model.nccl import NCCL_ALLOWED
from harness.wire.messages import (
    DestroyGroups,
    Done,
    EndTraffic,
    Failure,
    Groups,
    Held,
    Hold,
    MakeGroups,
    Message,
    Quiesced,
    RanksReady,
    Resume,
    Resumed,
    RunCollective,
    Samples,
    StartRanks,
    StartTraffic,
    StopAt,
    StopRanks,
    TrafficSoFar,
    TrafficTimes,
)


class _Failed(Exception):
    """What cannot be answered otherwise."""

    def __init__(self, error: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.failure = Failure(error=error, text=text, ranks=ranks)


class Ranks:
    """See the module, and `harness.bench.simulated.world.Labour`."""

    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node
        self._here: tuple[int, ...] = ()
        self._company: Company | None = None

    def verbs(self) -> Mapping[type[Message], Verb]:
        """Return who answers what."""
        found: dict[type[Message], Verb] = {
            StartRanks: self._on_start,
            MakeGroups: self._on_make,
            DestroyGroups: self._on_destroy,
            StopRanks: self._on_stop,
            RunCollective: self._on_run,
            StartTraffic: self._on_start_traffic,
            Hold: self._on_hold,
            StopAt: self._on_stop_at,
            Resume: self._on_resume,
            TrafficSoFar: self._on_so_far,
            EndTraffic: self._on_end_traffic,
        }
        return {kind: self._answering(verb) for kind, verb in found.items()}

    def _answering(self, verb: Verb) -> Verb:
        """Return a verb whose failures are answers."""

        async def answer(asked: Message) -> Message:
            try:
                return await verb(asked)
            except _Failed as failed:
                return failed.failure
            except Refused as refused:
                return Failure(error="Refused", text=str(refused), ranks=self._here)

        return answer

    def close(self) -> None:
        """End all ranks."""
        if self._company is not None:
            self._company.disband()
        self._company, self._here = None, ()

    # -- starting and stopping ---------------------------------------------------------------------

    async def _on_start(self, asked: StartRanks) -> Message:
        if refused := sorted(set(asked.nccl_env) - set(NCCL_ALLOWED)):
            raise _Failed("Refused", f"not on the list of NCCL variables: {refused}")
        if self._here:
            here = ", ".join(map(str, self._here))
            raise _Failed("Busy", f"ranks {here} are here already: stop them first")
        company = Company.of(self._world, asked)
        self._here = asked.ranks
        try:
            async with self._limit("start_ranks", asked.groups.timeout_ns):
                await self._world.takes(self._world.figures.generation.processes_s)
                await company.muster.join(self._node, asked.ranks)
                self._company = company
                return await self._made(company, asked.groups)
        except BaseException:
            self.close()
            company.disband()
            raise

    async def _on_make(self, asked: MakeGroups) -> Message:
        company = self._resting
        async with self._limit("make_groups", asked.groups.timeout_ns):
            return await self._made(company, asked.groups)

    async def _made(self, company: Company, groups: Groups) -> RanksReady:
        ready_ns = await company.make(groups)
        return RanksReady(
            ready_ns=ready_ns,
            pids=dict.fromkeys(self._here, 0),
            backend=self._world.figures.collectives.backend,
            effective_env=company.env,
        )

    async def _on_destroy(self, _asked: DestroyGroups) -> Message:
        company = self._resting
        async with self._limit("destroy_groups"):
            return Done(t_ns=await company.destroy())

    async def _on_stop(self, _asked: StopRanks) -> Message:
        self.close()
        return self._done()

    @asynccontextmanager
    async def _limit(self, order: str, timeout_ns: int = FOREVER_NS) -> AsyncIterator[None]:
        """Give an order until its deadline, or so long; then the ranks are of no use any more."""
        try:
            async with in_time(self._world.clock, timeout_ns):
                yield
        except TimeoutError:
            self.close()
            text = "no local rank is at fault: the missing one is on another node"
            raise _Failed("CollectiveExpired", f"{order} expired: {text}") from None

    # -- collectives -----------------------------------------------------------------------------

    async def _on_run(self, asked: RunCollective) -> Message:
        company = self._resting
        async with self._limit("run_collective", asked.timeout_ns):
            rows = await company.run(asked)
        mine = tuple(row for rank in self._here for row in rows if row.rank == rank)
        if any(not row.size_bytes for row in mine):
            text = "size 0: less than one 16-byte block for each rank (or one element); not timed"
            self._world.tell(self._node, text, "warning")
        return Samples(ranks=mine)

    # -- traffic ---------------------------------------------------------------------------------

    async def _on_start_traffic(self, asked: StartTraffic) -> Message:
        company = self._resting
        async with self._limit("start_traffic", asked.timeout_ns):
            loop = await company.start(asked)
            gate = loop.gates[self._node]
            await loop.until(lambda: gate.finished > 0)
        return Done(t_ns=gate.spans[0][1])

    async def _on_hold(self, _asked: Hold) -> Message:
        _, gate = self._traffic
        return Held(entered=self._each(gate.hold()))

    async def _on_stop_at(self, asked: StopAt) -> Message:
        loop, gate = self._traffic
        if not gate.stop_at(asked.iteration):
            text = f"has entered iteration {gate.entered}, beyond {asked.iteration}"
            raise _Failed("Beyond", text, self._here)
        loop.stir()
        async with self._limit("stop_at"):
            await loop.until(lambda: gate.standing)
        return Quiesced(last_good_ns=self._each(gate.last_good_ns))

    async def _on_resume(self, asked: Resume) -> Message:
        loop, gate = self._traffic
        now_ns = self._world.clock.now_ns()
        if asked.watch_only:
            watch = Watch(now_ns, asked.reference_ns, asked.within_pct)
        else:
            watch = gate.resume(now_ns, asked.reference_ns, asked.within_pct)
            loop.stir()
        await loop.steady(self._node, watch)
        return Resumed(
            released_ns=self._each(watch.released_ns),
            first_good_ns=self._each(watch.first_good_ns),
            steady_ns=self._each(watch.steady_ns),
            longest_ns=self._each(watch.longest_ns),
        )

    async def _on_so_far(self, asked: TrafficSoFar) -> Message:
        _, gate = self._traffic
        spans = list(gate.spans)[-asked.last :] if asked.last > 0 else []
        times_ns = tuple(end_ns - begin_ns for begin_ns, end_ns in spans)
        return TrafficTimes(times_ns=dict.fromkeys(self._here, times_ns))

    async def _on_end_traffic(self, _asked: EndTraffic) -> Message:
        loop, gate = self._traffic
        if not gate.standing:
            raise _Failed("Busy", "traffic is not standing still: stop it first", self._here)
        gate.end()
        self._joined.ended(loop)
        return self._done()

    # -- what is here ----------------------------------------------------------------------------

    @property
    def _joined(self) -> Company:
        if self._company is None:
            raise _Failed("NoRanks", "no rank runs on this node")
        return self._company

    @property
    def _resting(self) -> Company:
        """The company, none of whose traffic goes on here."""
        company = self._joined
        if company.loop is not None and not company.loop.gates[self._node].standing:
            raise _Failed("Busy", "traffic is running: hold and stop it first", self._here)
        return company

    @property
    def _traffic(self) -> tuple[Loop, Gate]:
        loop = self._joined.loop
        if loop is None or not loop.gates[self._node].running:
            raise _Failed("NoTraffic", "no traffic was started", self._here)
        return loop, loop.gates[self._node]

    def _each(self, value: int) -> dict[int, int]:
        return dict.fromkeys(self._here, value)

    def _done(self) -> Done:
        return Done(t_ns=self._world.clock.now_ns())
