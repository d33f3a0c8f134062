"""A training step beforehand: who is in which group, what is dealt to whom, sent and computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.degrees import Degrees, parse_degrees
from harness.model.load import load_profile
from harness.model.shape import ModelShape
from harness.model.training.axes import AXES, expert_copies, groups_along, place_of
from harness.model.training.micro_batches import dealt
from harness.model.training.phase import Phase
from harness.model.training.schedule import PHASES_MAX, Schedule, schedule, stages
from harness.model.training.traffic import Lengths, Traffic

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
DENSE = load_profile(PROFILES / "qwen2.5-14b-h800.toml").shape
EXPERTS = load_profile(PROFILES / "qwen3-235b-a22b-h800.toml").shape
PEAK = 4e14
SMALL = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=1000, intermediate=128
)


def laid_out(
    shape: ModelShape, text: str, batches: list[list[int]], scale: float = 1.0
) -> tuple[Traffic, Schedule]:
    """The step of these micro batches' tokens (each one sample), by rank of DP."""
    traffic = Traffic(shape, parse_degrees(text))
    lengths = [[Lengths(tokens, tokens**2) for tokens in rank] for rank in batches]
    return traffic, schedule(traffic, lengths, scale, PEAK)


def of(plan: Schedule, word: str) -> list[Phase]:
    return [move.phase for move in plan.moves if word in move.phase.name]


# -- groups ----------------------------------------------------------------------------------------


def test_ranks_count_along_tp_first_then_dp_then_pp() -> None:
    degrees = parse_degrees("DP4TP2PP2EP2")
    assert groups_along("tp", degrees)[:2] == ((0, 1), (2, 3))
    assert groups_along("dp", degrees) == (
        (0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15),
    )  # fmt: skip
    assert groups_along("pp", degrees)[0] == (0, 8)
    assert groups_along("ep", degrees)[:2] == ((0, 2), (1, 3))
    assert expert_copies(degrees)[:2] == ((0, 4), (2, 6))
    assert place_of(11, degrees) == (1, 1, 1, 1)


@given(st.sampled_from(["DP1", "TP4", "DP4EP2", "DP2TP2PP2", "DP6TP2EP3", "DP4TP2PP3EP4"]))
def test_every_rank_is_in_one_group_along_each_axis(text: str) -> None:
    degrees = parse_degrees(text)
    for groups in (*(groups_along(axis, degrees) for axis in AXES), expert_copies(degrees)):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(degrees.ranks))
        assert len({len(ranks) for ranks in groups}) == 1


# -- micro batches -----------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 9000), max_size=60),
    st.integers(1, 5),
    st.integers(100, 8000),
)
def test_every_sample_is_dealt_once_and_fits_where_it_can(
    tokens: list[int], ranks: int, limit_tokens: int
) -> None:
    shards = dealt(tokens, ranks, limit_tokens)
    assert len(shards) == ranks
    assert len({len(batches) for batches in shards}) == 1, "ranks meet in every micro batch"
    found = sorted(sample for batches in shards for batch in batches for sample in batch)
    assert found == list(range(len(tokens)))
    for batch in (batch for batches in shards for batch in batches if len(batch) > 1):
        assert sum(tokens[sample] for sample in batch) <= limit_tokens
    loads = [sum(tokens[s] for batch in batches for s in batch) for batches in shards]
    assert max(loads) - min(loads) <= max(tokens, default=0)


# -- what is sent ----------------------------------------------------------------------------------


def test_sizes_are_those_of_the_formulas() -> None:
    batches = [[1000, 500], [900, 600]]
    traffic, plan = laid_out(DENSE, "DP2TP2PP2", batches)
    hidden_bytes = 5120 * 2
    assert {phase.bytes for phase in of(plan, "forward, micro batch 0")} == {1000 * hidden_bytes}
    assert {phase.bytes for phase in of(plan, "backward, micro batch 1")} == {600 * hidden_bytes}
    gathered = sum(phase.bytes * phase.times for phase in of(plan, "parameters"))
    scattered = sum(phase.bytes * phase.times for phase in of(plan, "gradients"))
    parameters = DENSE.parameters - DENSE.hidden  # the last norm is not worth a message
    assert gathered == pytest.approx(parameters * 2 / traffic.degrees.tp, rel=1e-6)
    assert scattered == pytest.approx(parameters * 4 / traffic.degrees.tp, rel=1e-6)
    reduces = [move.phase for move in plan.moves if move.phase.axis == "tp"]
    assert sum(phase.times for phase in reduces[:-1]) == 2 * 2 * 2 * DENSE.layers
    assert len(of(plan, "stage")) == 2 * 2, "each micro batch crosses once each way"


def test_experts_are_exchanged_within_ep_and_reduced_among_their_copies() -> None:
    _, plan = laid_out(EXPERTS, "DP4EP2", [[1024]] * 4)
    exchanges = [move.phase for move in plan.moves if move.phase.axis == "ep"]
    assert {phase.op for phase in exchanges} == {"all_to_all"}
    assert {phase.groups for phase in exchanges} == {((0, 1), (2, 3))}
    assert {phase.bytes for phase in exchanges} == {1024 * 8 * 4096 * 2}
    assert sum(phase.times for phase in exchanges) == 2 * 2 * EXPERTS.layers
    copies = of(plan, "gradients of experts")
    assert {phase.groups for phase in copies} == {((0, 2), (1, 3))}
    total = sum(phase.bytes * phase.times for phase in copies)
    assert total == pytest.approx(EXPERTS.expert_parameters * 4 / 2, rel=1e-6)


def test_bytes_are_scaled_and_never_nothing() -> None:
    _, whole = laid_out(DENSE, "DP2", [[1000]] * 2)
    _, small = laid_out(DENSE, "DP2", [[1000]] * 2, scale=1e-3)
    _, least = laid_out(DENSE, "DP2TP2", [[1000]] * 2, scale=1e-12)
    for before, after in zip(whole.moves[:-1], small.moves[:-1], strict=True):
        assert after.phase.bytes == pytest.approx(before.phase.bytes * 1e-3, abs=32)
    assert min(move.phase.bytes for move in least.moves) == 4


def test_tied_embeddings_are_sent_once() -> None:
    _, apart = laid_out(SMALL, "DP2", [[100]] * 2)
    tied = ModelShape(**{f: getattr(SMALL, f) for f in SMALL.__struct_fields__} | {
        "tied_embeddings": True
    })  # fmt: skip
    _, together = laid_out(tied, "DP2", [[100]] * 2)
    assert len(of(apart, "head")) == 2
    assert len(of(together, "head")) == 0


# -- what is computed ------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["DP1", "DP2", "TP2", "PP3", "DP2TP2PP2", "DP4EP2", "DP4TP2PP2EP4"]),
    st.integers(1, 3),
    st.data(),
)
def test_all_operations_are_paid_for_once(text: str, number: int, data: st.DataObject) -> None:
    degrees = parse_degrees(text)
    shape = EXPERTS if degrees.ep > 1 else DENSE
    row = st.lists(st.integers(0, 8000), min_size=number, max_size=number)
    batches = [data.draw(row) for _ in range(degrees.dp)]
    _, plan = laid_out(shape, text, batches)
    paid = sum(sum(move.flops.values()) for move in plan.moves) + sum(plan.after.values())
    tokens = sum(sum(rank) for rank in batches)
    squares = sum(length**2 for rank in batches for length in rank)
    attention = 6 * squares * shape.heads * shape.head_dim * shape.layers
    wanted = 6 * shape.active_parameters * tokens + attention
    if shape.experts:  # the router and its experts are counted alike in both
        assert shape.active_parameters > shape.dense_parameters_read
    assert paid * degrees.tp == pytest.approx(wanted, rel=1e-6, abs=1)


def test_a_gap_is_what_is_computed_before_each_time() -> None:
    _, plan = laid_out(DENSE, "TP2", [[1000]])
    for move in plan.moves:
        longest = max(move.flops.values()) / move.phase.times / PEAK * 1e9
        assert move.phase.gap_ns == round(longest)
    total_ns = sum(move.phase.gap_ns * move.phase.times for move in plan.moves)
    flops = 6 * DENSE.active_parameters * 1000 + 6 * 1000**2 * 5120 * 48
    assert total_ns == pytest.approx(flops / 2 / PEAK * 1e9, rel=1e-4)


# -- order -----------------------------------------------------------------------------------------


def test_a_pipeline_goes_forward_and_back_micro_batch_by_micro_batch() -> None:
    _, plan = laid_out(SMALL, "PP3", [[100, 90]])
    assert [phase.name for phase in of(plan, "stage")] == [
        "stage 0 to 1 forward, micro batch 0",
        "stage 1 to 2 forward, micro batch 0",
        "stage 0 to 1 forward, micro batch 1",
        "stage 1 to 2 forward, micro batch 1",
        "stage 2 to 1 backward, micro batch 0",
        "stage 1 to 0 backward, micro batch 0",
        "stage 2 to 1 backward, micro batch 1",
        "stage 1 to 0 backward, micro batch 1",
    ]
    assert of(plan, "stage 2 to 1")[0].groups == ((2, 1),)


def test_parameters_come_before_the_first_use_and_gradients_after_the_last() -> None:
    _, plan = laid_out(SMALL, "DP2TP2", [[100, 90], [100, 90]])
    names = [move.phase.name for move in plan.moves]
    for layer in range(SMALL.layers):
        first = names.index(f"layer {layer} forward, micro batch 0")
        last = names.index(f"layer {layer} backward, micro batch 1")
        assert names[first - 1] == f"layer {layer} parameters"
        assert names[last + 1] == f"layer {layer} gradients"
    assert names[0] == "embedding parameters"
    assert names[-2:] == ["gradient norm"] * 2
    backward = [name for name in names if "backward, micro batch 0" in name]
    assert backward == [f"layer {layer} backward, micro batch 0" for layer in (3, 2, 1, 0)]


@pytest.mark.parametrize("number", [1, 4, 12])
def test_layers_stand_together_until_a_step_has_few_phases(number: int) -> None:
    for shape, text in ((DENSE, "DP2TP2"), (EXPERTS, "DP4TP2PP2EP2"), (DENSE, "DP2")):
        degrees = parse_degrees(text)
        _, plan = laid_out(shape, text, [[4000] * number] * degrees.dp)
        for rank in range(degrees.ranks):
            own = [m for m in plan.moves if any(rank in g for g in m.phase.groups)]
            assert len(own) <= PHASES_MAX + 10  # stages are not quite equal
        layers = sum(phase.times for phase in of(plan, " parameters") if "layer" in phase.name)
        assert layers == shape.layers * (2 if shape.experts else 1), "all layers, however many"


def test_stages_hold_all_layers() -> None:
    assert stages(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert stages(4, 1) == [range(4)]
    with pytest.raises(ValueError, match="EP 3 does not divide"):
        parse_degrees("DP4EP3")
    assert Degrees(dp=2, tp=3, pp=4).ranks == 24
