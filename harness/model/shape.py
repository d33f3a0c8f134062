"""The shape of a language model: what decides how it may be split and how much it must read.

Read from the ``config.json`` of a model directory (`shape_of_config`) or written in a profile.
Parameters are counted for decoders of the Llama and Qwen families: attention with grouped KV heads,
a gated MLP or routed experts of gated MLPs, RMS norms, input and output embeddings. Sizes in bytes,
lengths in tokens. Pure; what a configuration lacks is told as a list of problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GRADIENT_BYTES = 4
"""Of one gradient on its way: FSDP2's ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``."""
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers, widths, heads and experts of a decoder. No experts: a dense model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    attention_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    length_max_tokens: int = 32768
    source: str = ""

    @property
    def embedding_parameters(self) -> int:
        """One table of vocabulary x hidden; there are two where they are not tied."""
        return self.vocab * self.hidden

    @property
    def expert_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def layer_parameters(self) -> int:
        """One layer without its routed experts: attention, dense MLP or router, norms."""
        query, kept = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * kept)
        attention += (query + 2 * kept) * self.attention_bias + 2 * self.head_dim * self.qk_norm
        mlp = self.hidden * (self.experts or 3 * self.intermediate)
        return attention + mlp + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        layers = self.layers * self.layer_parameters
        return layers + self.expert_parameters + embeddings + self.hidden

    @property
    def parameter_bytes(self) -> int:
        """All weights."""
        return self.parameters * self.dtype_bytes

    @property
    def dense_parameters_read(self) -> int:
        """What each step reads whatever it computes: layers and output embedding, no experts."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with; a token costs twice as many operations."""
        used = self.expert_parameters * self.experts_per_token // max(1, self.experts)
        return self.dense_parameters_read + used

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, each KV head stored once."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes


def shape_of_config(config: Mapping[str, Any]) -> tuple[ModelShape, list[str]]:
    """Return the shape that a parsed ``config.json`` describes, and all that is wrong with it.

    Where there are problems the shape is of no use.
    """
    problems = [f"{key}: missing; expected a whole number" for key in _NEEDED if key not in config]
    problems += [
        f"{key}: expected a whole number"
        for key, found in config.items()
        if key in _INTEGERS and found is not None and type(found) is not int
    ]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        problems.append(f"torch_dtype: {dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    if problems:
        return _NO_SHAPE, problems
    shape = _read(config, DTYPE_BYTES[dtype])
    return shape, list(shape_problems(shape))


def shape_problems(shape: ModelShape) -> list[str]:
    """Return what makes the shape impossible, each with its field."""
    positive = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "length_max_tokens")
    problems = [f"{key}: expected at least 1" for key in positive if getattr(shape, key) < 1]
    if not shape.experts and shape.intermediate < 1:
        problems.append("intermediate: expected at least 1 in a model without experts")
    if shape.experts and not 1 <= shape.experts_per_token <= shape.experts:
        problems.append(f"experts_per_token: expected 1 to {shape.experts}, the number of experts")
    if shape.experts and shape.expert_intermediate < 1:
        problems.append("expert_intermediate: expected at least 1 in a model with experts")
    problems += [
        f"{key}: expected 1, 2 or 4"
        for key in ("dtype_bytes", "kv_dtype_bytes")
        if getattr(shape, key) not in (1, 2, 4)
    ]
    if shape.kv_heads > 0 and shape.heads % shape.kv_heads:
        problems.append(f"kv_heads: {shape.kv_heads} do not divide the {shape.heads} heads")
    return problems


_NO_SHAPE = ModelShape(0, 0, 0, 0, 0, 0, 0)
_INTEGERS = {
    *_NEEDED, "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size",
    "num_experts", "num_local_experts", "num_experts_per_tok", "max_position_embeddings",
}  # fmt: skip


def _read(config: Mapping[str, Any], dtype_bytes: int) -> ModelShape:
    heads, family = config["num_attention_heads"], str(config.get("model_type", ""))
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // max(1, heads),
        vocab=config["vocab_size"],
        intermediate=0 if experts else config.get("intermediate_size") or 0,
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        expert_intermediate=(
            config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
        )
        if experts
        else 0,
        attention_bias=bool(config.get("attention_bias", family.startswith("qwen2"))),
        qk_norm=family.startswith("qwen3"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=dtype_bytes,
        length_max_tokens=config.get("max_position_embeddings") or 32768,
    )
