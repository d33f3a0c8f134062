"""What a step of the RL loop sends: training, the gathering of its weights, their way. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.fabric.demand import Backend, Comm, of_moves, of_sync, of_training, total
from harness.fabric.topology import Topology
from harness.model.training.phase import Phase
from harness.run.fabric.traffic import Part

TRAIN, GATHER, SYNC = "train", "gather", "sync"


def places_of(topology: Topology, ranks_of: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Return the endpoint of each rank: the k-th of a node uses its GPU k."""
    return {
        rank: topology.nodes[node].endpoint(gpu)
        for node, ranks in ranks_of.items()
        for gpu, rank in enumerate(ranks)
    }


def train_part(
    topology: Topology,
    phases: Sequence[Phase],
    ranks_of: Mapping[str, Sequence[int]],
    *,
    layerwise: bool,
    backend: Backend = "gloo",
) -> Part:
    """Return a training step, as its phases announce it; as one communication, if not layerwise.

    `ranks_of`: the ranks of each node that trains.
    """
    comms = of_training(topology, phases, places_of(topology, ranks_of), backend=backend)
    if layerwise or not comms:
        return Part(TRAIN, comms)
    whole = total(topology, (comm.whole for comm in comms), TRAIN)
    return Part(TRAIN, (Comm(TRAIN, comms[0].axis, whole, comms[0].gap_ns),))


def gather_part(
    topology: Topology, trainers: Sequence[str], sources: Sequence[str], size_bytes: float
) -> Part:
    """Return how weights of this size, held in equal shares, get whole to each source."""
    share = size_bytes / len(trainers)
    moves = [(node, to, share) for to in sources for node in trainers if node != to]
    return Part(GATHER, (Comm(GATHER, "dp", of_moves(topology, moves, GATHER), 0.0),))


def sync_part(topology: Topology, edges: Sequence[tuple[str, str]], size_bytes: float) -> Part:
    """Return how weights of this size get to the engines, each edge carrying all of them."""
    return Part(SYNC, (Comm(SYNC, "dp", of_sync(topology, edges, size_bytes), 0.0),))
