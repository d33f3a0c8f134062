"""New weights into engines that run."""

from __future__ import annotations

from collections.abc import Iterable

from harness.run.generation.fleet import Fleet
from harness.run.generation.places import by_node
from harness.wire.generation import UpdateWeights, WeightsUpdated


async def load_weights(
    fleet: Fleet, names: Iterable[str], *, drop_kv: bool, timeout_ns: int
) -> dict[str, WeightsUpdated]:
    """Let engines load the weights of the fleet's `version` from its `sources`; not the dead.

    They go on generating after it; while it lasts they are not held to be stalling. Whoever calls
    it holds `changing`. Raises as the fleet's commands do.
    """
    places = [at for name in names if (at := fleet.places.get(name)) and not at.dead]
    bodies = {
        node: UpdateWeights(
            instances=there,
            version=fleet.version,
            source=fleet.sources.get(node, ""),
            drop_kv=drop_kv,
        )
        for node, there in by_node(places).items()
    }
    for at in places:
        at.loading = True
    try:
        return (await fleet.nodes.each(bodies, WeightsUpdated, timeout_ns)).complete()
    finally:
        for at in places:
            at.loading, at.life = False, None
