"""The communicators of one rank: made, destroyed and made anew in the same process.

Each generation meets under a fresh prefix of one store that outlives the ranks: keys left by an
earlier generation would let a second init hang. torch is imported at the first `make`.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from agents.collective import Member, Operation, Place
from harness.model.busbw import counts
from harness.model.nccl import NCCL_ALLOWED
from harness.model.scenario import Dtype, Op
from harness.wire.messages import Groups

_RECORDED = (*NCCL_ALLOWED, "GLOO_SOCKET_IFNAME")


class Communicators:
    """Of rank `rank`, the node's `local`-th. Used by one thread only."""

    def __init__(self, rank: int, local: int) -> None:
        self.rank = rank
        self.backend = ""
        self._local = local
        self._generation = -1
        self._members: list[Member] = []
        self._stores: dict[str, Any] = {}
        self._kept: Operation | None = None
        self._torch: Any = None
        self._device: Any = None

    def make(self, groups: Groups) -> int:
        """Join the group of all and every subgroup; return when the barrier after it was passed.

        Raises `ValueError` on a generation that is not fresh, and what torch raises when a rank is
        missing or the store cannot be reached within `groups.timeout_ns`.
        """
        if self._members:
            raise ValueError(f"the groups of generation {self._generation} still stand")
        if groups.generation <= self._generation:
            raise ValueError(f"generation {groups.generation} follows {self._generation}")
        torch = self._import()
        dist = torch.distributed
        self._generation = groups.generation
        self._choose(torch, groups)
        os.environ["GLOO_SOCKET_IFNAME"] = groups.interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", groups.interface)
        limit = timedelta(microseconds=groups.timeout_ns // 1000)
        try:
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore(f"gen/{groups.generation}", self._store(groups, limit)),
                rank=self.rank,
                world_size=groups.world_size,
                timeout=limit,
                device_id=self._device if self.backend == "nccl" else None,
            )
            self._join(dist, groups, limit)
        except Exception:
            self.destroy()  # what was half made must not block the next generation
            raise
        return time.monotonic_ns()

    def _join(self, dist: Any, groups: Groups, limit: timedelta) -> None:
        everyone = tuple(range(groups.world_size))
        members = [Member(dist.group.WORLD, everyone, self.rank)]
        for ranks in groups.subgroups:
            group = dist.new_group(list(ranks), timeout=limit, backend=self.backend)
            if self.rank in ranks:
                members.append(Member(group, ranks, ranks.index(self.rank)))
        dist.barrier(device_ids=[self._device.index] if self.backend == "nccl" else None)
        self._members = members

    def _choose(self, torch: Any, groups: Groups) -> None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        auto = "nccl" if gpus else "gloo"
        self.backend = auto if groups.backend == "auto" else groups.backend
        if self.backend == "nccl":
            if self._local >= gpus:
                raise ValueError(f"the node's rank number {self._local + 1} has no GPU of {gpus}")
            self._device = torch.device("cuda", self._local)
            torch.cuda.set_device(self._device)
        else:
            self._device = torch.device("cpu")

    def _store(self, groups: Groups, limit: timedelta) -> Any:
        if groups.store not in self._stores:
            host, port = groups.store.rsplit(":", 1)
            self._stores[groups.store] = self._torch.distributed.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=limit
            )
        return self._stores[groups.store]

    def _import(self) -> Any:
        if self._torch is None:
            import torch  # takes seconds; the control thread answers meanwhile
            import torch.distributed

            torch.set_num_threads(1)
            self._torch = torch
        return self._torch

    def destroy(self) -> int:
        """Leave all groups; return when that was done. Harmless when there are none."""
        self._members = []
        if self._kept:
            self._kept.unbind()
        if self._torch is not None and self._torch.distributed.is_initialized():
            self._torch.distributed.destroy_process_group()
        return time.monotonic_ns()

    @property
    def everyone(self) -> Member:
        """This rank in the group of all. Raises `ValueError` when there are no groups."""
        if not self._members:
            raise ValueError("there are no groups")
        return self._members[0]

    def members(self, use_subgroups: bool) -> list[Member]:
        """Return this rank's place in the group of all, or in each subgroup that has it."""
        return self._members[1:] if use_subgroups and self.everyone else [self.everyone]

    def operation(self, member: Member, op: Op, size_bytes: int, dtype: Dtype) -> Operation:
        """Return the operation with its buffers on this rank's device.

        The last one is kept: asked for again, it works on the same memory, as in one long run.
        """
        if op == "send_recv" and len(member.ranks) == 1:
            raise ValueError("send_recv needs two ranks or more")
        row = counts(op, size_bytes, len(member.ranks), dtype)
        kept = self._kept
        if kept and (kept.member.ranks, kept.op, kept.dtype, kept.row) == (
            member.ranks,
            op,
            dtype,
            row,
        ):
            kept.bind(member)
            return kept
        self._kept = None  # its memory goes before the next is asked for
        self._kept = Operation(Place(self._torch, self._device), member, op, dtype, row)
        return self._kept

    def effective_env(self) -> dict[str, str]:
        """Return the recorded variables as they stand in this process."""
        return {name: os.environ[name] for name in _RECORDED if name in os.environ}
