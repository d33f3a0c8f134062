"""Who sends which KV to whom: every rank of the target gets its part, each piece once."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.model.layout import Layout, kv_bytes_per_gpu_token
from harness.model.reshard import Part, group_of, moves, part_of, stage_layers
from harness.model.shape import ModelShape


def shape(layers: int, kv_heads: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=64,
        heads=16,
        kv_heads=kv_heads,
        head_dim=4,
        vocab=64,
        intermediate=64,
    )


def cells(part: Part) -> set[tuple[int, int]]:
    return set(product(part.layers, part.heads))


DEGREES = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(Layout, st.just(1), DEGREES, st.integers(1, 5), st.just(1), st.integers(1, 3))


@given(LAYOUTS, LAYOUTS, st.integers(1, 13), DEGREES, st.text(min_size=1, max_size=5))
def test_every_target_rank_gets_what_it_holds_exactly_once_from_one_that_has_it(
    source: Layout, target: Layout, layers: int, kv_heads: int, request_id: str
) -> None:
    assume(max(source.pp, target.pp) <= layers)
    model = shape(layers, kv_heads)
    came: dict[int, Counter[tuple[int, int]]] = {rank: Counter() for rank in range(target.gpus)}
    for move in moves(source, target, model, request_id):
        held = part_of(source, model, move.source)
        assert cells(move.part) <= cells(held)
        per_group = source.tp * source.pp
        assert move.source // per_group == group_of(request_id, source.dp)
        came[move.target].update(cells(move.part))
    for rank, counts in came.items():
        here = rank // (target.tp * target.pp) == group_of(request_id, target.dp)
        wanted = cells(part_of(target, model, rank)) if here else set()
        assert counts == Counter(wanted)


@given(LAYOUTS, st.integers(1, 13), DEGREES)
def test_parts_are_those_that_memory_is_counted_by(
    layout: Layout, layers: int, kv_heads: int
) -> None:
    assume(layout.pp <= layers)
    model = shape(layers, kv_heads)
    parts = [part_of(layout, model, rank) for rank in range(layout.tp * layout.pp)]
    assert set.union(*map(cells, parts)) == set(product(range(layers), range(kv_heads)))
    fullest = max(len(cells(part)) for part in parts)
    per_cell = 2 * model.head_dim * model.kv_dtype_bytes
    assert fullest * per_cell == kv_bytes_per_gpu_token(layout, model)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"), [(8, 2, [4, 4]), (7, 2, [4, 3]), (10, 4, [2, 3, 3, 2])]
)
def test_stages_are_cut_as_vllm_cuts_them(layers: int, pp: int, sizes: list[int]) -> None:
    assert [len(stage_layers(layers, pp, stage)) for stage in range(pp)] == sizes


def test_copies_of_a_head_share_the_sending() -> None:
    model = shape(1, 2)
    found = moves(Layout(1, 8), Layout(1, 8), model, "r")
    assert sorted(move.source for move in found) == list(range(8))
