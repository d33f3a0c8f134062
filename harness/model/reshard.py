"""Which rank sends which KV to which rank, when a request moves between layouts. Pure.

Ranks of an instance are numbered as in vLLM: by DP group, then pipeline stage, then TP rank. A
request's KV is in one DP group, whose ranks hold the layers of their stage and, of these, their
share of the KV heads; where TP exceeds the KV heads, several hold the same one. Every rank of the
target gets each (layer, head) that it holds exactly once, from one of those that have it.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from harness.model.layout import Layout, kv_copies
from harness.model.shape import ModelShape


class Part(NamedTuple):
    """The KV that a rank holds: layers x KV heads."""

    layers: range
    heads: range


class Move(NamedTuple):
    """What rank `source` of one instance sends to rank `target` of the other."""

    source: int
    target: int
    part: Part


def group_of(request: str, dp: int) -> int:
    """Return the DP group that serves a request. Both ends know it, by the request's id."""
    return crc32(request.encode()) % dp


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """Return a stage's layers: even, and what is left goes to those before the last, as in vLLM."""
    even, left = divmod(layers, pp)
    sizes = [even + (pp - 1 - left <= i < pp - 1) for i in range(pp)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def part_of(layout: Layout, shape: ModelShape, rank: int) -> Part:
    """Return what a rank of an instance holds of its group's KV."""
    stage, tp_rank = divmod(rank % (layout.pp * layout.tp), layout.tp)
    heads = max(1, shape.kv_heads // layout.tp)
    first = tp_rank // kv_copies(layout, shape) * heads
    return Part(stage_layers(shape.layers, layout.pp, stage), range(first, first + heads))


def moves(source: Layout, target: Layout, shape: ModelShape, request: str) -> list[Move]:
    """Return who sends what to whom, so that every target rank has its part of the KV, once."""
    copies = kv_copies(source, shape)
    senders = _group(source, group_of(request, source.dp))
    found = []
    for receiver in _group(target, group_of(request, target.dp)):
        wanted = part_of(target, shape, receiver)
        for sender in senders:
            if sender % copies != receiver % copies:
                continue  # another holds the same heads: receivers are dealt over them
            held = part_of(source, shape, sender)
            part = Part(_both(held.layers, wanted.layers), _both(held.heads, wanted.heads))
            if part.layers and part.heads:
                found.append(Move(sender, receiver, part))
    return found


def _group(layout: Layout, group: int) -> range:
    ranks = layout.pp * layout.tp
    return range(group * ranks, (group + 1) * ranks)


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), max(0, min(one.stop, other.stop)))
