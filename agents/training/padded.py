"""A step of the real trainer beforehand: who takes which samples, and what will be sent. Pure.

Every micro batch has as many rows as the fullest, as long as the longest sample: padding is
computed and sent like anything else. The order of what is sent is the paced trainer's
(`harness.model.training.schedule`), for both are carried by the same means. How much goes to
experts depends on the tokens; an even router is assumed. The last norm goes with the head,
uncounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from harness.clock import NS_PER_S
from harness.model.degrees import Degrees
from harness.model.shape import ModelShape
from harness.model.training.axes import Place, groups_along
from harness.model.training.micro_batches import Bins, dealt
from harness.model.training.phase import Phase
from harness.model.training.schedule import Schedule, schedule
from harness.model.training.traffic import Lengths, Traffic

ITEM_BYTES = 4
"""All is float32."""
NORM_BYTES = 4 * ITEM_BYTES
"""The gradients' norm is added up together with the step's figures."""
_NORM = "gradient norm"


class Padded(NamedTuple):
    """One step. `dealt`: indices of samples by rank of DP, then micro batch."""

    dealt: tuple[Bins, ...]
    rows: int
    """Of each micro batch."""
    length: int
    """Of each row, in tokens."""
    phases: tuple[Phase, ...]
    schedule: Schedule

    def flops(self, place: Place) -> float:
        """Return the operations of the rank there."""
        where = place.pp, place.dp
        return sum(move.flops.get(where, 0.0) for move in self.schedule.moves) + (
            self.schedule.after.get(where, 0.0)
        )


class Planner:
    """Plans steps of one model on some degrees; gaps are as long as the last step computed."""

    def __init__(self, shape: ModelShape, degrees: Degrees, micro_batch_tokens: int) -> None:
        shape = msgspec.structs.replace(shape, dtype_bytes=ITEM_BYTES)
        self._traffic = _Traffic(shape, degrees)
        self._limit_tokens = micro_batch_tokens
        self._flops_per_s = float("inf")

    def plan(self, tokens: Sequence[int]) -> Padded:
        """Return the step of samples of these lengths. A pipeline gets a micro batch a stage."""
        degrees = self._traffic.degrees
        shared = -(-sum(tokens) // (degrees.dp * degrees.pp))
        found = dealt(tokens, degrees.dp, max(1, min(self._limit_tokens, shared)))
        rows = max((len(batch) for rank in found for batch in rank), default=0)
        length = max(tokens, default=0)
        even = Lengths(rows * length, rows * length**2)
        batches = [[even] * len(rank) for rank in found]
        laid = schedule(self._traffic, batches, 1.0, self._flops_per_s)
        return Padded(found, rows, length, self._phases(laid), laid)

    def took(self, plan: Padded, place: Place, compute_ns: int) -> None:
        """Learn how fast this rank computes."""
        self._flops_per_s = plan.flops(place) / max(1, compute_ns) * NS_PER_S

    def _phases(self, laid: Schedule) -> tuple[Phase, ...]:
        """Return the schedule's, and what this trainer sends besides: see `_head_norms`."""
        phases = [
            msgspec.structs.replace(phase, bytes=NORM_BYTES) if phase.name == _NORM else phase
            for phase in (move.phase for move in laid.moves)
        ]
        at = next((n for n, phase in enumerate(phases) if phase.name == _NORM), len(phases))
        return (*phases[:at], *self._head_norms(), *phases[at:])

    def _head_norms(self) -> tuple[Phase, ...]:
        """TP ranks have the norms of queries and keys whole, but their gradients in part."""
        shape, degrees = self._traffic.shape, self._traffic.degrees
        if degrees.tp == 1:
            return ()
        layers = -(-shape.layers // degrees.pp)
        parameters = layers * 2 * -(-shape.head_dim // degrees.dp)
        return (
            Phase(
                name="gradients of head norms",
                op="all_reduce",
                axis="tp",
                groups=groups_along("tp", degrees),
                bytes=parameters * ITEM_BYTES,
                gap_ns=0,
            ),
        )


class _Traffic(Traffic):
    """TP splits matrices of layers only: embeddings and norms are whole on each rank.

    Experts move with their layer, or, split by EP, not at all.
    """

    def layer_bytes(self, item_bytes: int) -> int:
        shape = self.shape
        norms = 2 * shape.hidden + 2 * shape.head_dim * shape.qk_norm
        split = (shape.layer_parameters - norms) // self.degrees.tp
        experts = 0 if self.degrees.ep > 1 else shape.expert_parameters // shape.layers
        return (split + norms + experts) * item_bytes

    def experts_bytes(self, item_bytes: int) -> int:
        del item_bytes
        return 0

    def table_bytes(self, item_bytes: int) -> int:
        return self.shape.embedding_parameters * item_bytes
