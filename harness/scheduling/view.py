"""What policies see and what they decide: the same on a bench and in simulation. Values only.

A `View` is the generation pool at one moment. Requests are columns (numpy arrays of one length),
so that tens of thousands are looked at in milliseconds. Times are seconds of the bench's clock,
lengths tokens. Nothing here knows how long a response will be, but for `View.truth`, which only the
oracle is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.model.layout import Layout, Mix

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Instance:
    """One engine. `layout` is that of this instance alone (``1xTP2``).

    `running` have a seat; `waiting` are there without one. `tokens_per_s` as measured lately: the
    service rate; 0 while nothing is known.
    """

    name: str
    node: str
    layout: Layout
    accepting: bool
    sequences_max: int
    kv_capacity_tokens: int
    kv_used_tokens: int
    running: int
    waiting: int
    tokens_per_s: float = 0.0
    length_max_tokens: int = 2**31


@dataclass(frozen=True)
class Requests:
    """Open requests, as columns; `ids` says whose row is which.

    `group`: samples of one prompt share a number (unique over steps). `produced`: of the whole
    trajectory so far; `context`: what must be in KV to go on (prompt, and what was produced).
    `at`: index into `View.instances`, -1 while queued at the coordinator. `running`: has a seat.
    `batch`: the training step that it is for. `recomputed`: contexts that its turns after the
    first had computed so far, each of them whole (the present turn's too); None: nobody knows.
    """

    ids: tuple[str, ...]
    group: Ints
    produced: Ints
    context: Ints
    at: Ints
    running: NDArray[np.bool_]
    batch: Ints
    recomputed: Ints | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.ids)


@dataclass(frozen=True)
class Finished:
    """Responses of one batch that have ended: their groups and lengths, in no order.

    `recomputed`: contexts that turns after the first had computed; None: nobody knows.
    """

    batch: int
    group: Ints
    length: Ints
    recomputed: Ints | None = None


class Moved(NamedTuple):
    """A request that was moved lately."""

    id: str
    source: str
    target: str
    at_s: float


@dataclass(frozen=True)
class View:
    """The pool now. `gpus_of`: usable GPUs of each node, in node order.

    `history` holds past batches, oldest first, and last what has ended so far of those in flight.
    `coming`: requests of the next batch, that come as soon as these are done; 0 if none will; and
    `coming_batches`, how many there will be of its kind.
    `switched_s`: when the last switch ended (None: never); `switches`: how many there were since
    the newest batch began; `changing`: whether one is under way. `truth`: tokens that each open
    request still has to produce, in the rows' order; `truth_recomputes`: contexts that its later
    turns will have computed.
    """

    now_s: float
    instances: tuple[Instance, ...]
    requests: Requests
    history: tuple[Finished, ...]
    gpus_of: Mapping[str, int]
    cap_tokens: int
    """Of a response: none is longer."""
    turns_max: int = 1
    """Of a trajectory: none has more."""
    layout: Mix | None = None
    coming: int = 0
    coming_batches: int = 1
    switched_s: float | None = None
    switches: int = 0
    changing: bool = False
    moved: tuple[Moved, ...] = ()
    truth: Ints | None = None
    truth_recomputes: Ints | None = None


# -- decisions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the slow loop decided. `wanted` None: stay as it is, for `reason`.

    Times are expected from now until all open requests have ended: as it is, after the change
    (without its cost), and the cost. `assignment`: id -> name of the instance it should run on,
    for requests whose place matters; the others go wherever there is room.
    """

    wanted: Mix | None
    reason: str
    stay_s: float
    change_s: float = 0.0
    cost_s: float = 0.0
    best: Mix | None = None
    """The layout that came out best, whether it is wanted or not."""
    assignment: Mapping[str, str] = field(default_factory=dict)


class Move(NamedTuple):
    """What the fast loop decided: one request to another instance, and what that should save."""

    id: str
    source: str
    target: str
    saves_s: float


Routing = Literal["assigned", "least_loaded"]
"""`assigned`: every request is given an instance when its batch begins, in turn, and stays."""


@dataclass(frozen=True)
class Settings:
    """How careful the loops are; see `harness.model.scenario.Rl`."""

    gain_min: float = 0.05
    """Of the time left: what a switch must save beyond its cost."""
    switch_s: float = 0.0
    """What a switch costs, as measured or as asked."""
    rest_s: float = 2.0
    """After a switch, before the next."""
    moves_per_s_max: float = 2.0
    move_rest_s: float = 5.0
    """After a request was moved, before it may be again."""
