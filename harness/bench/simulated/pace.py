"""One simulated instance: its steps up to a moment, and what it tells of its requests.

It tells what `agents.generation.pace` tells in real time, with the same stamps; but it is asked for
a moment, and jumps there. First tokens and ends are *urgent*: who watches is woken by them. Of what
goes on, output is told when a `report` is wanted: that costs as much as there are requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness.model.advance import FOREVER_NS
from harness.model.batching import settle
from harness.model.requests import Carried, Event
from harness.model.steptime import step_ns
from harness.rlsim.engine import Completed, Engine
from harness.wire.generation import Output, Stats

Ended = Literal["", "finished", "aborted", "exported"]
Tell = Callable[[Output, bool], None]
"""Take an output, and whether it is urgent."""


@dataclass(slots=True)
class _Open:
    """How much of a request's output was told. `first_ns` 0: its next token is the interval's."""

    told: int
    first_ns: int = 0
    cached_tokens: int = 0
    going: bool = False
    """Whether any was told since it was opened."""


class Pace:
    """See the module. `engine.state` is changed between `begin_order` and `end_order` only."""

    def __init__(self, engine: Engine, tell: Tell) -> None:
        self.engine, self._tell = engine, tell
        self._open: dict[str, _Open] = {}
        self._joined: list[str] = []
        self._landed: list[str] = []
        """Those that came with their KV, of which no token was told yet."""
        self._stops_ns = FOREVER_NS  # when an order acts: no step begins then
        self._interval_ns = 0  # end of the first decode step that was not reported
        self._steps = self._prefilled = self._cached = self._preemptions = 0
        self._first_token_ns = self._last_token_ns = 0
        self._beyond: frozenset[str] = frozenset()

    # -- time passes -------------------------------------------------------------------------

    def elapse(self, now_ns: int) -> int:
        """Let all happen by now, but for the stretch under way; return when it ends."""
        engine = self.engine
        if engine.now_ns < self._stops_ns <= now_ns:
            engine.cut(self._stops_ns)
        while (due_ns := engine.due_ns) <= now_ns:
            if engine.now_ns >= self._stops_ns:
                return FOREVER_NS
            self._complete(engine.complete())
        return due_ns

    def report(self, now_ns: int) -> None:
        """Tell all output of the steps that have ended by now."""
        engine = self.engine
        self.elapse(now_ns)
        if engine.shorten(now_ns):
            self._complete(engine.complete())
        for request in engine.state.running:
            if request.status == "decoding":
                settle(engine.state, request)
                version = request.version_last
                self._say(request.id, request.produced_tokens, version, engine.now_ns)
        self._interval_ns = 0

    def begin_order(self, now_ns: int) -> int:
        """Return when an order that comes now acts: at the end of the step under way."""
        engine, acts_ns = self.engine, now_ns
        if self.elapse(now_ns) < FOREVER_NS and engine.now_ns < now_ns:
            engine.cut(now_ns)
            acts_ns = engine.due_ns
        self._stops_ns = acts_ns
        return acts_ns

    def stand(self) -> None:
        """Be between two steps: an order acts now."""
        self.elapse(self._stops_ns)
        self.engine.stand(self._stops_ns)

    def end_order(self, now_ns: int) -> None:
        """Go on, also after an order that never acted; a first step with KV that came is news."""
        if self.engine.now_ns >= self._stops_ns:
            self.engine.stand(now_ns)
        self._stops_ns = FOREVER_NS
        if self._landed:
            self.engine.cut(self.engine.now_ns + 1)

    # -- what a stretch of steps brings --------------------------------------------------------

    def _complete(self, done: Completed) -> None:
        begin_ns, (step, times, ends_ns), events = done
        costs = self.engine.costs
        load = (step.batch, step.kv_tokens, step.prefill_tokens)
        if step.batch and (self._joined or not self._interval_ns):
            self._began_decoding(begin_ns + step_ns(costs, *load, step.prefill_pairs))
        grown = step.kv_tokens + step.batch * (times - 1)
        self._beyond |= costs.beyond(*load)
        self._beyond |= costs.beyond(step.batch, grown, step.prefill_tokens)
        lasts = [chunk.id for chunk in step.chunks if chunk.last]
        self._steps += times
        self._prefilled += step.prefill_tokens
        self._preemptions += len(step.preempted)
        if step.batch or lasts:
            self._last_token_ns = ends_ns
            self._first_token_ns = self._first_token_ns or self._interval_ns or ends_ns
        for name in lasts:
            self._open[name].first_ns = ends_ns
        for event in events:
            self._on_event(event, begin_ns)
        for name in lasts:
            if request := self.engine.state.requests.get(name):
                self._say(name, request.produced_tokens, request.version_last, ends_ns)
                self._joined.append(name)
        if step.batch and self._landed:
            self._say_landed(ends_ns)

    def _began_decoding(self, first_ns: int) -> None:
        self._interval_ns = self._interval_ns or first_ns
        for name in self._joined:
            if name in self._open:
                self._open[name].first_ns = first_ns
        self._joined.clear()

    def _on_event(self, event: Event, begin_ns: int) -> None:
        request = event.request
        if event.what == "preempted":  # before the step: it has no token from it
            self._say(request.id, request.produced_tokens, request.version_last, begin_ns)
        elif event.what == "finished":
            version = request.version_last
            self._say(request.id, request.produced_tokens, version, event.at_ns, "finished")

    def _say_landed(self, ends_ns: int) -> None:
        state = self.engine.state
        for name in self._landed:
            if (request := state.requests.get(name)) and request.status == "decoding":
                settle(state, request)
                self._say(name, request.produced_tokens, request.version_last, ends_ns)
        self._landed.clear()

    # -- what orders bring ---------------------------------------------------------------------

    def opened(self, request: Carried, cached_tokens: int = 0) -> None:
        """Tell the output of a request that was submitted, from where it stands."""
        self._open[request.id] = _Open(request.produced_tokens, 0, cached_tokens)
        if cached_tokens:
            self._cached += cached_tokens
            self._joined.append(request.id)
            self._landed.append(request.id)

    def ended(self, request: Carried, how: Ended) -> None:
        """Tell the last of a request that was ended by an order."""
        version, now_ns = request.version_last, self.engine.now_ns
        self._say(request.id, request.produced_tokens, version, now_ns, how)

    def _say(
        self, name: str, produced_tokens: int, version: int | None, last_ns: int, ended: Ended = ""
    ) -> None:
        entry = self._open[name]
        count = produced_tokens - entry.told
        if count or ended:
            output = Output(
                instance=self.engine.instance.name,
                id=name,
                start=entry.told,
                count=count,
                first_ns=(entry.first_ns or self._interval_ns) if count else last_ns,
                last_ns=last_ns,
                ended=ended,
                version=version or 0,
                cached_tokens=entry.cached_tokens,
            )
            self._tell(output, not entry.going or bool(ended))
            entry.cached_tokens, entry.going = 0, True
        entry.told, entry.first_ns = produced_tokens, 0
        if ended:
            del self._open[name]

    def stats(self, now_ns: int) -> Stats:
        """Return where it stood at the end of the last step, or stands idle; totals so far."""
        engine, state = self.engine, self.engine.state
        return Stats(
            t_ns=now_ns if engine.due_ns == FOREVER_NS else engine.now_ns,
            running=len(state.running),
            waiting=len(state.waiting) + len(state.preempted),
            kv_blocks_used=state.blocks_used,
            kv_blocks=state.limits.blocks,
            generated_tokens=engine.tokens,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            preemptions=self._preemptions,
            steps=self._steps,
            first_token_ns=self._first_token_ns,
            last_token_ns=self._last_token_ns,
            prefilling=len(state.prefilling),
            beyond=tuple(sorted(self._beyond)),
        )
