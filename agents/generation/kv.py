"""The bytes of KV that a rank of the paced engine holds, sends and checks.

Of one (layer, KV head), a request's KV of n tokens takes ``n * 2 * head_dim * dtype * bytes_scale``
bytes, rounded up: an array of (those bytes, layers, heads). Its content follows from the request's
id, the position, the layer and the head, so that a receiver can tell whether it is whole and its
own. What was received is kept until the request has left; the rest is written when it is to be
sent, which gives the same bytes as writing them step by step, and costs the steps nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import shake_128
from math import ceil

import numpy as np
from numpy.typing import NDArray

from agents.generation.transfer import Piece
from harness.model.reshard import Part
from harness.model.shape import ModelShape

Bytes = NDArray[np.uint8]


class Kv:
    """KV of requests in one rank, which holds `part` of the heads of all layers."""

    def __init__(self, part: Part, shape: ModelShape, bytes_scale: float) -> None:
        self._part, self._shape = part, shape
        self._token_bytes = 2 * shape.head_dim * shape.kv_dtype_bytes * bytes_scale
        self._held: dict[str, Bytes] = {}

    @property
    def held_bytes(self) -> int:
        """What was received and is kept."""
        return sum(held.nbytes for held in self._held.values())

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens in this rank."""
        return self._rows(tokens) * len(self._part.layers) * len(self._part.heads)

    def cut(self, request: str, tokens: int, part: Part) -> Bytes:
        """Return `part` of a request's first `tokens` tokens, contiguous."""
        rows, (layers, heads) = self._rows(tokens), self._part
        held = self._held.get(request, np.empty((0, len(layers), len(heads)), np.uint8))
        here = held[
            :rows,
            part.layers.start - layers.start : part.layers.stop - layers.start,
            part.heads.start - heads.start : part.heads.stop - heads.start,
        ]
        more = pattern(request, range(len(here), rows), part, self._shape)
        return np.concatenate((here, more)) if len(here) else more

    def put(self, request: str, tokens: int, pieces: Iterable[tuple[Piece, bytes]]) -> bool:
        """Take what came of a request; False, and nothing is kept, where it is not all of it."""
        rows, (layers, heads) = self._rows(tokens), self._part
        found = np.empty((rows, len(layers), len(heads)), np.uint8)
        left = len(layers) * len(heads)
        for piece, data in pieces:
            wide, tall = piece.layers[1] - piece.layers[0], piece.heads[1] - piece.heads[0]
            low, first = piece.layers[0] - layers.start, piece.heads[0] - heads.start
            inside = low >= 0 and first >= 0 and wide > 0 and tall > 0
            inside &= piece.layers[1] <= layers.stop and piece.heads[1] <= heads.stop
            if piece.tokens != tokens or not inside or len(data) != rows * wide * tall:
                return False
            block = np.frombuffer(data, np.uint8).reshape(rows, wide, tall)
            found[:, low : low + wide, first : first + tall] = block
            left -= wide * tall
        if left or not np.array_equal(
            found, pattern(request, range(rows), self._part, self._shape)
        ):
            return False
        self._held[request] = found
        return True

    def keep(self, requests: Collection[str]) -> None:
        """Drop the KV of all but these."""
        for name in self._held.keys() - set(requests):
            del self._held[name]

    def _rows(self, tokens: int) -> int:
        return ceil(tokens * self._token_bytes)


def pattern(request: str, rows: range, part: Part, shape: ModelShape) -> Bytes:
    """Return the bytes that `part` of a request's KV must have at positions `rows`."""
    lanes = shake_128(request.encode()).digest(shape.layers * shape.kv_heads)
    heads = np.frombuffer(lanes, np.uint8).reshape(shape.layers, shape.kv_heads)
    mine = heads[part.layers.start : part.layers.stop, part.heads.start : part.heads.stop]
    positions = (np.arange(rows.start, rows.stop) * 40503 >> 8).astype(np.uint8)
    return positions[:, None, None] + mine
