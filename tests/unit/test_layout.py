"""Layouts: what they are called, what they hold, and every reason why one cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile
from harness.model.layout import (
    Gpu,
    Layout,
    infeasible,
    kv_bytes_per_gpu_token,
    kv_capacity_tokens,
    parse_layout,
    weight_bytes_per_gpu,
)
from harness.model.load import load_shape
from harness.model.shape import ModelShape, shape_of_config

H800 = Gpu("H800", 85_500_000_000, 11_500_000_000)
QWEN_14B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "intermediate_size": 13824,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def shape(config: dict[str, Any], **changes: Any) -> ModelShape:
    found, problems = shape_of_config(config)
    assert problems == []
    return msgspec.structs.replace(found, **changes)


def test_parameters_and_kv_are_what_the_models_are_published_with() -> None:
    dense, moe = shape(QWEN_14B), shape(QWEN_235B)
    assert dense.parameters == 14_770_033_664
    assert dense.kv_bytes_per_token == 192 * 1024
    assert moe.parameters == 235_093_634_560
    assert moe.kv_bytes_per_token == 188 * 1024
    assert 21.5e9 < moe.active_parameters < 22.5e9


@given(st.tuples(*[st.integers(1, 99999)] * 5))
def test_a_layout_is_read_as_it_is_written(degrees: tuple[int, ...]) -> None:
    layout = Layout(*degrees)
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "TP2", "0xTP2", "2xTP", "2xTP2TP4", "2xXP2", "2xTP-1", "4"])
def test_what_is_no_layout_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="4xTP2"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "config", "reason"),
    [
        ("2xTP8", QWEN_14B, "needs 16 GPUs; there are 8"),
        ("1xTP16", QWEN_14B, "TP 16 would span nodes of 8 GPUs"),
        ("1xTP5", QWEN_14B, "TP 5 does not divide the 8 GPUs of a node"),
        ("1xTP16", QWEN_14B, "TP 16 does not divide the 40 attention heads"),
        ("1xTP5", QWEN_14B, "TP 5 neither divides the 8 KV heads nor is a multiple of them"),
        ("1xTP5", QWEN_14B, "does not divide the vocabulary, 152064 padded to 152064"),
        ("1xTP5", QWEN_14B, "TP 5 does not divide the MLP's width 13824"),
        ("1xTP1PP49", QWEN_14B, "PP 49 exceeds the 48 layers"),
        ("1xTP2EP2", QWEN_14B, "EP 2: the model has no experts"),
        ("1xTP8EP3", QWEN_235B, "EP 3 does not divide the 8 GPUs of TP x DP"),
        ("1xTP3DP4EP12", QWEN_235B, "EP 12 does not divide the 128 experts"),
        ("1xTP5DP2", QWEN_235B, "width 1536 is not divided by the 10 GPUs that share each expert"),
        ("2xTP4", QWEN_235B, "leave no room for KV in the 85.5 GB of H800"),
    ],
)
def test_each_reason_is_told(layout: str, config: dict[str, Any], reason: str) -> None:
    found = infeasible(parse_layout(layout), shape(config), H800, 8, 8)
    assert any(reason in each for each in found), found


def test_all_reasons_are_told_at_once_and_a_good_layout_has_none() -> None:
    assert len(infeasible(parse_layout("2xTP5"), shape(QWEN_14B), H800, 8, 8)) == 5
    for good in ("8xTP1", "4xTP2", "2xTP4", "1xTP8", "1xTP4PP2", "2xTP2DP2"):
        assert infeasible(parse_layout(good), shape(QWEN_14B), H800, 8, 8) == []
    for good in ("1xTP8", "1xTP8EP8", "1xTP4DP2EP8", "1xTP4PP2"):
        assert infeasible(parse_layout(good), shape(QWEN_235B), H800, 8, 8) == []


def test_kv_heads_are_replicated_where_tp_exceeds_them() -> None:
    moe = shape(QWEN_235B)
    at4, at8 = (kv_bytes_per_gpu_token(Layout(1, tp), moe) for tp in (4, 8))
    assert at4 == at8 == moe.kv_bytes_per_token // 4


def test_a_weight_of_every_split_is_somewhere() -> None:
    for config in (QWEN_14B, QWEN_235B):
        model = shape(config)
        whole = weight_bytes_per_gpu(Layout(), model)
        assert whole == model.parameter_bytes
        assert weight_bytes_per_gpu(Layout(tp=8), model) * 8 - whole < 64
        assert 2 * weight_bytes_per_gpu(Layout(tp=4, pp=2), model) > whole // 4


def test_capacity_is_what_is_left_of_memory() -> None:
    model = shape(QWEN_14B)
    for layout in (Layout(4, 2), Layout(2, 2, dp=2), Layout(1, 8)):
        tokens = kv_capacity_tokens(layout, model, H800)
        per_gpu = tokens // layout.dp * kv_bytes_per_gpu_token(layout, model)
        used = weight_bytes_per_gpu(layout, model) + per_gpu + H800.workspace_bytes
        assert 0 <= H800.memory_bytes - used < kv_bytes_per_gpu_token(layout, model)


def test_what_fits_and_what_does_not_is_as_published_for_qwen3_32b_on_h200() -> None:
    model = shape(
        {
            **QWEN_14B,
            "model_type": "qwen3",
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "head_dim": 128,
            "intermediate_size": 25600,
            "vocab_size": 151936,
        }
    )
    h200 = Gpu("H200", 141_000_000_000, 17_100_000_000)
    for tp in (1, 2, 4, 8):
        layout = Layout(8 // tp, tp)
        held = kv_capacity_tokens(layout, model, h200) * layout.instances
        assert 256 * (1024 + 4096) < held < 1024 * (1024 + 4096), layout


def test_a_model_folder_is_read_or_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no such model folder"):
        load_shape(tmp_path / "absent")
    with pytest.raises(BadFile, match="no such file"):
        load_shape(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN_14B))
    assert load_shape(tmp_path) == load_shape(config) == shape(QWEN_14B)
    config.write_text("{")
    with pytest.raises(BadFile, match="not JSON"):
        load_shape(tmp_path)
    config.write_text("[]")
    with pytest.raises(BadFile, match="expected a JSON object"):
        load_shape(tmp_path)
    config.write_text('{"hidden_size": "x", "num_attention_heads": 4, "torch_dtype": "int3"}')
    with pytest.raises(BadFile) as found:
        load_shape(tmp_path)
    assert len(found.value.problems) == 4
    config.write_text(json.dumps({**QWEN_14B, "num_key_value_heads": 7}))
    with pytest.raises(BadFile, match="7 do not divide the 40 heads"):
        load_shape(tmp_path)
