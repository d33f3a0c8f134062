"""What an engine is to its rank process: a few verbs, called in turn by one thread.

Every rank of an instance gets the same verbs in the same order. Between verbs it makes steps, in
one of two ways. A *free* engine (paced) runs by itself in rank 0, until a command waits. A
*lockstep* engine (vLLM, where each rank has a scheduler of its own) takes as many steps as it is
told, the same on every rank, so that all ranks see each command between the same two steps.

Only rank 0 tells outputs. A verb that fails raises; `Refused` and `UsageError` are answers where
all ranks raise them, anything else makes the instance dead. Stamps are on the node's monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from harness.model.placement import Instance
from harness.model.requests import Carried
from harness.wire.generation import (
    Capacity,
    KvTarget,
    Output,
    Stats,
    Verb,
    Work,
)

Tell = Callable[[Output], None]
"""Give an output to the agent; cheap, batched by the rank process."""
Wait = Callable[[int], bool]
"""``wait(until_ns)``: until a command waits (True), or that time has come (False)."""


@dataclass(frozen=True)
class Seat:
    """Where a rank sits: `rank` of `instance`, on the node's GPU `gpu`, reachable at `address`.

    `meeting` is where the instance's ranks meet (one fresh rendezvous per build), `ports` a range
    that is this instance's alone.
    """

    instance: Instance
    rank: int
    gpu: int
    address: str
    meeting: str
    ports: range


class Marks(Protocol):
    """Stamps of stages within a verb: ``with marks("groups"):``."""

    def __call__(self, stage: str) -> AbstractContextManager[object]:
        """Return a context manager that stamps the stage's begin and end."""


class Engine(Protocol):
    """One rank's part of an engine, made once per process as ``make(spec, tell)``.

    Between `build` and `tear_down` it is an engine; a resident process goes through many of them.
    """

    @property
    def lockstep(self) -> bool:
        """Whether ranks take steps only as told."""

    def facts(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return what runs here (engine, version, device), and warnings."""

    def build(self, seat: Seat, version: int, marks: Marks, source: str = "") -> Capacity:
        """Make groups, load weights, lay out KV; stages ``groups``, ``weights``, ``kv_cache``.

        `source` as in `update_weights`.
        """

    def kv_peer(self) -> str:
        """Return ``HOST:PORT`` where this rank takes KV; "" where the engine moves none itself."""

    def tear_down(self, marks: Marks) -> None:
        """End the engine, free what it held; stage ``teardown``. Harmless where there is none."""

    def sleep(self) -> int:
        """Free weights and KV but stay ready to wake; return the bytes that stay. Or `Refused`."""

    def wake(self, version: int, marks: Marks, source: str = "") -> None:
        """Undo `sleep`, at these weights; `source` as in `update_weights`."""

    def submit(self, works: Sequence[Work]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Queue requests; return the refused with their reasons, and those that came with KV."""

    def withdraw(
        self, ids: Sequence[str] | None, verb: Verb, to: KvTarget | None
    ) -> tuple[list[Carried], dict[str, int]]:
        """End requests (None: all) after telling all of their output; send their KV where asked.

        Returns them and the bytes of KV that this rank sent, by id. A request that is not here is
        left out.
        """

    def admit(self, *, allowed: bool) -> None:
        """Let waiting requests in, or not."""

    def update_weights(self, version: int, source: str, *, drop_kv: bool) -> int:
        """Load weights from a file (""; the engine's own); return the bytes that this rank moved.

        Raises `UsageError` for a file that no rank can read, before anything has changed. Any other
        error ends the instance: some of its weights are new, and some are not.
        """

    def measure(
        self, batch: int, context_tokens: int, prefill_tokens: int, steps: int
    ) -> tuple[int, ...]:
        """Time steps, see `harness.wire.generation.MeasureSteps`; holds no request after."""

    def stats(self) -> Stats:
        """Return its state and its totals since it was built."""

    def step(self) -> bool:
        """lockstep: take one step; return whether there is anything more to step for."""

    def run(self, wait: Wait) -> None:
        """free: step, on every return from `wait`, until a command waits. Rank 0 only."""

    def close(self) -> None:
        """Leave nothing behind: the process ends."""
