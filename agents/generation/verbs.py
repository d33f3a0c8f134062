"""What an order does to a rank's engine, and the answer to it: one table, `Verbs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agents.generation.base import Engine, Seat
from agents.generation.orders import (
    Body,
    FindMemory,
    Leave,
    MemoryFound,
    Seated,
    Sit,
    Sleep,
    Slept,
    Stepped,
    Steps,
    Wake,
    Woken,
)
from harness.wire.generation import (
    Admission,
    MeasureSteps,
    Span,
    StepTimes,
    Submit,
    Submitted,
    Torn,
    UpdateWeights,
    WeightsUpdated,
    Withdraw,
    Withdrawn,
)
from harness.wire.messages import Done, Failure, Message


class Stages:
    """`agents.generation.base.Marks`: spans of an order's stages."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Stamp what is done within."""
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            span = Span(stage=stage, begin_ns=begin_ns, end_ns=time.monotonic_ns())
            self._spans.append(span)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All so far, in order of their ends."""
        return tuple(self._spans)


class Verbs:
    """One rank's engine as orders see it. `stepped` is called after every lockstep step."""

    def __init__(self, engine: Engine, stepped: Callable[[], None]) -> None:
        self.engine = engine
        self.seat: Seat | None = None
        """Where it sits; None while no engine is built."""
        self.asleep = False
        self._stepped = stepped
        self._verbs: dict[type[Message], Callable[[Any, Stages], Message]] = {
            Sit: self._sit,
            Leave: self._leave,
            Sleep: self._sleep,
            Wake: self._wake,
            Steps: self._steps,
            FindMemory: _find_memory,
            Submit: self._submit,
            Withdraw: self._withdraw,
            Admission: self._admission,
            UpdateWeights: self._update_weights,
            MeasureSteps: self._measure,
        }

    @property
    def leads(self) -> bool:
        """Whether it is rank 0 of an engine that is up: the one that tells, and runs."""
        return self.seat is not None and self.seat.rank == 0 and not self.asleep

    def do(self, order: Body) -> Message:
        """Do an order and return its answer. Whatever the engine raises comes out."""
        verb = self._verbs.get(type(order))
        if verb is None:
            return Failure(error="Unknown", text=f"a rank does not know {type(order).__name__}")
        return verb(order, Stages())

    def _sit(self, order: Sit, stages: Stages) -> Message:
        seat = Seat(
            instance=order.instance,
            rank=order.rank,
            gpu=order.gpu,
            address=order.address,
            meeting=order.meeting,
            ports=range(order.port, order.port + order.ports),
        )
        capacity = self.engine.build(seat, order.version, stages, order.source)
        self.seat, self.asleep = seat, False
        return Seated(capacity=capacity, kv_peer=self.engine.kv_peer(), spans=stages.spans)

    def _leave(self, order: Leave, stages: Stages) -> Message:
        self.engine.tear_down(stages)
        self.seat, self.asleep = None, False
        if order.ends:
            self.engine.close()
        return Torn(spans=stages.spans)

    def _sleep(self, _order: Sleep, _stages: Stages) -> Message:
        kept_bytes = self.engine.sleep()
        self.asleep = True
        return Slept(kept_bytes=kept_bytes)

    def _wake(self, order: Wake, stages: Stages) -> Message:
        self.engine.wake(order.version, stages, order.source)
        self.asleep = False
        return Woken(spans=stages.spans)

    def _steps(self, order: Steps, _stages: Stages) -> Message:
        begin_ns = time.monotonic_ns()
        taken, more = 0, True
        while taken < order.steps and more:
            more = self.engine.step()
            taken += 1
            self._stepped()
        return Stepped(steps=taken, elapsed_ns=time.monotonic_ns() - begin_ns, more=more)

    def _submit(self, order: Submit, _stages: Stages) -> Message:
        refused, with_kv = self.engine.submit(order.works)
        return Submitted(refused=refused, with_kv=with_kv)

    def _withdraw(self, order: Withdraw, stages: Stages) -> Message:
        with stages("kv_send" if order.to else "withdraw"):
            left, sent_bytes = self.engine.withdraw(order.ids or None, order.verb, order.to)
        return Withdrawn(upto=0, left=tuple(left), sent_bytes=sent_bytes, spans=stages.spans)

    def _admission(self, order: Admission, _stages: Stages) -> Message:
        self.engine.admit(allowed=order.open)
        return Done(t_ns=time.monotonic_ns())

    def _update_weights(self, order: UpdateWeights, stages: Stages) -> Message:
        with stages("weights"):
            moved_bytes = self.engine.update_weights(
                order.version, order.source, drop_kv=order.drop_kv
            )
        return WeightsUpdated(spans=stages.spans, moved_bytes=moved_bytes)

    def _measure(self, order: MeasureSteps, _stages: Stages) -> Message:
        return StepTimes(
            times_ns=self.engine.measure(
                order.batch, order.context_tokens, order.prefill_tokens, order.steps
            )
        )


def _find_memory(_order: FindMemory, _stages: Stages) -> Message:
    import torch

    if not torch.cuda.is_available():
        return MemoryFound(free_bytes=0, total_bytes=0)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return MemoryFound(free_bytes=free_bytes, total_bytes=total_bytes)
