"""One answer of an instance out of its ranks' answers, and one of a node out of instances'. Pure.

Ranks' answers are in rank order; the first is the leader's, whose outputs and requests count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from agents.generation.orders import Seated
from harness.wire.generation import Capacity, joined
from harness.wire.messages import Message


def merged(answers: Sequence[Any]) -> Any:
    """Return the leader's answer with the spans, and the bytes, of all."""
    leader: Message = answers[0]
    changed: dict[str, Any] = {}
    if "spans" in leader.__struct_fields__:
        changed["spans"] = joined(span for answer in answers for span in answer.spans)
    if "moved_bytes" in leader.__struct_fields__:
        changed["moved_bytes"] = sum(answer.moved_bytes for answer in answers)
    if "sent_bytes" in leader.__struct_fields__:
        sent: Counter[str] = Counter()
        for answer in answers:
            sent.update(answer.sent_bytes)
        changed["sent_bytes"] = dict(sent)
    return msgspec.structs.replace(leader, **changed)


def capacity_of(seated: Sequence[Seated]) -> Capacity:
    """Return what the instance takes: as its leader says, with the weights of all ranks."""
    held_bytes = sum(rank.capacity.weights_bytes for rank in seated)
    return msgspec.structs.replace(seated[0].capacity, weights_bytes=held_bytes)


def kv_peers_of(seated: Sequence[Seated]) -> tuple[str, ...]:
    """Return where each rank takes KV; none where the engine moves none itself."""
    peers = tuple(rank.kv_peer for rank in seated)
    return peers if all(peers) else ()
