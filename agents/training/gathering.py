"""Who gives which weights to whom, so that several ranks have all of them; and the giving.

A rank holds some tensors whole. Each of the *writers* lacks what only others hold, and gets it from
one of those. With every node's first rank a writer this is an all-gather over the nodes' links: a
node takes in what it lacks, once, while it gives away what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Move(NamedTuple):
    """The tensor `name` goes from rank `giver` to rank `writer`."""

    name: str
    giver: int
    writer: int


def moves(held: Sequence[Collection[str]], writers: Sequence[int]) -> list[Move]:
    """Return what must be sent, given the names that each rank holds; alike on all ranks. Pure.

    Where several ranks hold what is lacking, they give in turn.
    """
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(held):
        for name in names:
            holders.setdefault(name, []).append(rank)
    lacking = [
        (name, writer)
        for writer in writers
        for name, there in holders.items()
        if writer not in there
    ]
    return [
        Move(name, holders[name][turn % len(holders[name])], writer)
        for turn, (name, writer) in enumerate(lacking)
    ]


def gather(
    own: Mapping[str, Any],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    writers: Sequence[int],
    rank: int,
    like: Any,
) -> dict[str, Any]:
    """Return all tensors at the writers, elsewhere those of `own`; collective.

    `own` are this rank's tensors, contiguous. `shapes`: by name, of what each rank holds, in rank
    order, alike on all ranks. What comes has the dtype and device of the tensor `like`.
    """
    from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

    found, sends, receives = dict(own), [], []
    for name, giver, writer in moves(shapes, writers):
        if rank == giver:
            sends.append(P2POp(isend, own[name], writer))
        elif rank == writer:
            found[name] = like.new_empty(shapes[giver][name])
            receives.append(P2POp(irecv, found[name], giver))
    calls = [*receives, *sends]  # so gloo uses both ways of a link at once; else in turn
    for call in batch_isend_irecv(calls) if calls else ():
        call.wait()
    return found
