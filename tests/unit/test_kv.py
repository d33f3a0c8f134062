"""KV bytes of the paced engine: a receiver knows what is whole, and whose it is."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from agents.generation.kv import Kv, pattern
from agents.generation.transfer import Piece
from harness.model.layout import Layout
from harness.model.reshard import moves, part_of
from harness.model.shape import ModelShape

SHAPE = ModelShape(layers=6, hidden=64, heads=8, kv_heads=4, head_dim=8, vocab=64, intermediate=64)
SCALE = 1 / 64  # half a byte a token, of each layer and head


def kv(layout: Layout, rank: int) -> Kv:
    return Kv(part_of(layout, SHAPE, rank), SHAPE, SCALE)


Pieces = list[tuple[Piece, bytes]]


def sent(
    source: list[Kv], one: Layout, other: Layout, rank: int, tokens: int
) -> Iterator[tuple[Piece, bytes]]:
    for move in moves(one, other, SHAPE, "r"):
        if move.target == rank:
            data = source[move.source].cut("r", tokens, move.part).tobytes()
            layers, heads = ((r.start, r.stop) for r in move.part)
            yield Piece("t", "r", tokens, layers, heads, len(data), 0), data


@pytest.mark.parametrize("one", [Layout(1, 1), Layout(1, 2), Layout(1, 8), Layout(1, 2, 2)])
@pytest.mark.parametrize("other", [Layout(1, 1), Layout(1, 4), Layout(1, 8), Layout(1, 1, 3)])
def test_kv_survives_any_change_of_layout_and_goes_on_from_what_came(
    one: Layout, other: Layout
) -> None:
    source = [kv(one, rank) for rank in range(one.gpus)]
    target = [kv(other, rank) for rank in range(other.gpus)]
    for rank, mine in enumerate(target):
        assert mine.put("r", 301, sent(source, one, other, rank, 301))
        assert mine.held_bytes == mine.bytes_of(301)
    for rank, mine in enumerate(source):
        assert mine.put("r", 377, sent(target, other, one, rank, 377))


@pytest.mark.parametrize("harm", ["missing", "twice", "byte", "length", "tokens", "elsewhere"])
def test_kv_that_is_not_all_there_is_not_taken(harm: str) -> None:
    one, other = Layout(1, 2), Layout(1, 1)
    pieces: Pieces = list(sent([kv(one, 0), kv(one, 1)], one, other, 0, 100))
    piece, data = pieces[1]
    harmed: dict[str, Pieces] = {
        "missing": [],
        "twice": [pieces[0]],
        "byte": [(piece, bytes([data[0] ^ 1]) + data[1:])],
        "length": [(piece, data[:-1])],
        "tokens": [(msgspec.structs.replace(piece, tokens=99), data)],
        "elsewhere": [(msgspec.structs.replace(piece, heads=(3, 5)), data)],
    }
    mine = kv(other, 0)
    assert not mine.put("r", 100, [pieces[0], *harmed[harm]])
    assert not mine.put("another", 100, pieces)
    assert mine.held_bytes == 0


def test_heads_layers_positions_and_requests_differ() -> None:
    whole = part_of(Layout(1, 1), SHAPE, 0)
    rows = pattern("r", range(400), whole, SHAPE)
    assert len({rows[:, layer, head].tobytes() for layer in range(6) for head in range(4)}) > 20
    assert not np.array_equal(rows[:200], rows[200:])
    assert not np.array_equal(rows, pattern("q", range(400), whole, SHAPE))


def test_kv_of_what_left_is_dropped() -> None:
    one = Layout(1, 1)
    mine = kv(one, 0)
    assert mine.put("r", 50, sent([kv(one, 0)], one, one, 0, 50))
    mine.keep(["r"])
    assert mine.held_bytes
    mine.keep(["q"])
    assert mine.held_bytes == 0
