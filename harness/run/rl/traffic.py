"""What a step of the loop sends, told to the controller of its fabric: beforehand, and as it goes.

Training, the gathering of its weights and their way to the engines are announced together, when a
step begins; and once more when it is over, for the next one will be like it: circuits for it can be
lit while nobody sends. Without a fabric of its own the loop tells nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.model.training.phase import Phase
from harness.run.fabric.traffic import Part
from harness.run.fabric.work import GATHER, SYNC, TRAIN, gather_part, sync_part, train_part
from harness.run.session import Session

if TYPE_CHECKING:
    from harness.run.rl.sync import Way
    from harness.run.rl.trainees import Trainees


@dataclass
class StepTraffic:
    """Tells what one loop sends. `way`: who would send weights to whom now."""

    session: Session
    trainees: Trainees
    way: Callable[[], Way]
    _train: Part = field(default_factory=lambda: Part(TRAIN, ()))
    _announced: bool = False
    """Whether a step has been: weights that are synced before the first one tell of none."""
    _under_way: bool = False
    _ended: dict[str, int] = field(default_factory=dict)
    """By node, the last communication of training that has ended there."""

    def _parts(self) -> tuple[Part, Part, Part]:
        topology, size_bytes = self.session.bench.topology, self.trainees.weights_bytes
        sources, _, edges = self.way()
        gather = gather_part(topology, self.trainees.nodes, sources, size_bytes)
        return self._train, gather, sync_part(topology, edges, size_bytes)

    @asynccontextmanager
    async def training(self, phases: Sequence[Phase]) -> AsyncIterator[None]:
        """Tell that a training step of these phases is under way while the body runs."""
        fabric = self.session.fabric
        if fabric is None:
            yield
            return
        self._train = train_part(
            self.session.bench.topology,
            phases,
            self.trainees.ranks_of,
            layerwise=self.session.scenario.fabric.layerwise,
            backend="nccl" if "nccl" in self.trainees.facts.get("backend", "") else "gloo",
        )
        fabric.expect(self._parts())
        self._announced = True
        self._ended, self._under_way = {}, True  # a step that is made again begins anew
        try:
            async with fabric.during(self._train):
                yield
        finally:
            self._under_way = False
        fabric.reached(GATHER)

    def phase_ended(self, node: str, index: int) -> None:
        """Tell that a communication has ended on a node: circuits may be for what comes next."""
        if self.session.fabric is None or not self._under_way or len(self._train.comms) < 2:
            return  # what is told late is of a step that is over
        self._ended[node] = max(index, self._ended.get(node, 0))
        if self._ended.keys() >= self.trainees.ranks_of.keys():
            self.session.fabric.reached(TRAIN, min(self._ended.values()) + 1)

    @asynccontextmanager
    async def gathering(self) -> AsyncIterator[None]:
        """Tell that sources get all of the weights while the body runs."""
        fabric = self.session.fabric
        if fabric is None:
            yield
            return
        async with fabric.during(self._parts()[1]):
            yield
        fabric.reached(SYNC)

    @asynccontextmanager
    async def carrying(self, *, last: bool) -> AsyncIterator[None]:
        """Tell that weights are on their way to the engines while the body runs.

        With `last` no step follows for which circuits could be lit beforehand.
        """
        fabric = self.session.fabric
        if fabric is None:
            yield
            return
        async with fabric.during(self._parts()[2]):
            yield
        if self._announced and not last:
            fabric.expect(self._parts())
