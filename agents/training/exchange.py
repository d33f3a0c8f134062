"""Collectives of a paced step: real tensors, and each result is checked where it would show.

All share two buffers, as large as the largest needs. Before each, a rank marks the ends of what it
sends with its place in the group; after it, the marks that must have come are looked for. In
between lies whatever was there: 32-bit integers, so that sums wrap and cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents.collective import either
from harness.model.busbw import Counts, counts
from harness.model.scenario import Op
from harness.model.training.schedule import DTYPE


class WrongResult(Exception):
    """A collective brought something else than what the other ranks sent."""


class Exchange:
    """Of rank `rank`; `handles` are torch's groups by their global ranks."""

    def __init__(self, rank: int, device: str, handles: Mapping[tuple[int, ...], Any]) -> None:
        import torch

        self._torch: Any = torch
        self._rank, self._handles = rank, handles
        self._device = torch.device(device)
        self._sent = self._received = torch.zeros(0, dtype=getattr(torch, DTYPE))

    def reserve(self, sent: int, received: int) -> None:
        """Have room for as many elements."""
        self._sent = self._grown(self._sent, sent)
        self._received = self._grown(self._received, received)

    def _grown(self, buffer: Any, size: int) -> Any:
        if buffer.numel() >= size:
            return buffer
        return self._torch.zeros(size, dtype=buffer.dtype, device=self._device)

    def run(self, op: Op, ranks: tuple[int, ...], size_bytes: int, group: tuple[int, ...]) -> None:
        """Do it once among `ranks`, to its end; `group` is the one with a handle that has them.

        Raises `WrongResult`, and what torch raises when another rank is gone.
        """
        row = counts(op, size_bytes, len(ranks), DTYPE)
        here = ranks.index(self._rank)
        sent, received = self._sent[: row.sent], self._received[: row.received]
        if op == "all_reduce":
            sent = received
        blocks = len(ranks) if op in ("reduce_scatter", "all_to_all") else 1
        _ends(received, 1).zero_()
        _ends(sent, blocks).fill_(here + 1)
        self._start(op, ranks, self._handles[group], sent, received)
        if self._device.type == "cuda":
            self._torch.cuda.current_stream().synchronize()
        self._check(op, ranks, row, received)

    def _start(self, op: Op, ranks: tuple[int, ...], group: Any, sent: Any, received: Any) -> None:
        dist = self._torch.distributed
        match op:
            case "all_reduce":
                dist.all_reduce(received, group=group)
            case "all_gather":
                gather = either(dist, "all_gather_single", "all_gather_into_tensor")
                gather(received, sent, group=group)
            case "reduce_scatter":
                scatter = either(dist, "reduce_scatter_single", "reduce_scatter_tensor")
                scatter(received, sent, group=group)
            case "all_to_all":
                dist.all_to_all_single(received, sent, group=group)
            case "send_recv" if self._rank == ranks[0]:
                dist.send(sent, ranks[1], group=group)
            case "send_recv":
                dist.recv(received, ranks[0], group=group)
            case _:
                raise ValueError(f"no step of training has a {op}")

    def _check(self, op: Op, ranks: tuple[int, ...], row: Counts, received: Any) -> None:
        """Look for the marks of all ranks at both ends of each block that came."""
        each = range(1, len(ranks) + 1)
        match op:
            case "all_reduce" | "reduce_scatter":
                wanted = [sum(each)]
            case "all_gather" | "all_to_all":
                wanted = list(each)
            case _:
                if self._rank == ranks[0]:
                    return
                wanted = [1]
        found = _ends(received, len(wanted)).tolist()
        if found != [[mark] * len(found[0]) for mark in wanted]:
            raise WrongResult(
                f"{op} of {row.size_bytes} bytes among {ranks}: {found}, not {wanted}"
            )


def _ends(data: Any, blocks: int) -> Any:
    """Return a view of the first and last element of each of `blocks` equal parts."""
    parts = data.view(blocks, -1)
    return parts[:, :: max(1, parts.shape[1] - 1)]
