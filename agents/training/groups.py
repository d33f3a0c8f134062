"""The torch process groups of a rank of training: one store, one group of all, one along each axis.

gloo where there is no GPU, NCCL where there is one. Rank 0 holds the store: it listens on the
node's data address, and dies with the rank, so that nothing of a broken attempt is left. Keys of
each attempt lie under a prefix of their own all the same: a rank that came late from an earlier
one would else hang the others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from agents.training.base import Groups
from agents.training.orders import Join
from harness.errors import UsageError
from harness.model.training.axes import AXES, Axis, Members, groups_along, place_of


def join(asked: Join) -> Groups:
    """Meet all ranks and make the groups; collective. Raises what torch raises when one is missing.

    Raises `UsageError` for a rank without a GPU of its own, and a store that cannot be made.
    """
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    torch.set_num_threads(1)
    device = _device(torch, asked.local)
    os.environ["GLOO_SOCKET_IFNAME"] = asked.interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", asked.interface)
    limit = timedelta(microseconds=asked.timeout_ns // 1000)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"training/{asked.attempt}", _store(dist, asked, limit)),
        rank=asked.rank,
        world_size=asked.world_size,
        timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )
    return _grouped(dist, asked, str(device), limit)


def _grouped(dist: Any, asked: Join, device: str, limit: timedelta) -> Groups:
    degrees, members, handles = asked.spec.degrees, {}, {}
    along: dict[Axis, Members] = {
        axis: groups for axis in AXES if len((groups := groups_along(axis, degrees))[0]) > 1
    }
    for axis, groups in along.items():
        own = new_groups(groups, asked.rank, limit)
        members[axis] = next(ranks for ranks in groups if asked.rank in ranks)
        handles[axis] = own[members[axis]]
    dist.barrier(device_ids=[asked.local] if device.startswith("cuda") else None)
    return Groups(
        rank=asked.rank,
        degrees=degrees,
        place=place_of(asked.rank, degrees),
        device=device,
        members=members,
        handles=handles,
        all_members=along,
    )


def new_groups(
    groups: Iterable[tuple[int, ...]], rank: int, limit: timedelta | None = None
) -> dict[tuple[int, ...], Any]:
    """Make these groups, on all ranks in the same order; return those that `rank` is in."""
    import torch.distributed as dist

    made = {ranks: dist.new_group(list(ranks), timeout=limit) for ranks in groups}
    return {ranks: group for ranks, group in made.items() if rank in ranks}


def _device(torch: Any, local: int) -> Any:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu")
    if local >= gpus:
        raise UsageError(f"the node's rank number {local + 1} has no GPU of {gpus}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _store(dist: Any, asked: Join, limit: timedelta) -> Any:
    host, _, port = asked.store.rpartition(":")
    if asked.rank:
        return dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    try:
        listening = socket.create_server((host, int(port)), backlog=asked.world_size)
    except OSError as error:
        raise UsageError(f"rank 0 cannot listen on {asked.store}: {error.strerror}") from error
    return dist.TCPStore(
        host,
        int(port),
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listening.detach(),
    )
