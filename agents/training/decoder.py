"""A decoder as Qwen3's, in plain torch: its parameters have the names that Hugging Face gives them.

RMS norms, rotary positions, grouped KV heads with norms of queries and keys, gated MLPs or routed
experts of them. Imports torch: import this module late. A batch is padded on the right, where
causal attention keeps the padding from what comes before it, so that there is no mask.

Shapes: tokens ``[batch, length]`` of ids; hidden states ``[batch, length, hidden]`` and logits
``[batch, length, vocab]`` in float32. A pipeline's stage has some of the layers: the first one
takes tokens, the last one gives logits, between them go hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from harness.errors import UsageError
from harness.model.shape import ModelShape, shape_of_config

_FAMILIES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True)
class Config:
    """What a ``config.json`` says of a decoder that can be trained here."""

    shape: ModelShape
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    normalized_routing: bool = True
    """The weights of a token's experts add up to 1."""


def read_config(found: Mapping[str, Any]) -> Config:
    """Read a parsed ``config.json``. Raises `UsageError` for what this decoder does not compute."""
    shape, problems = shape_of_config(found)
    if found.get("model_type") not in _FAMILIES:
        problems.append(f"model_type: {found.get('model_type')!r} is not {' or '.join(_FAMILIES)}")
    odd = {
        "hidden_act": found.get("hidden_act", "silu") != "silu",
        "attention_bias": shape.attention_bias,
        "rope_scaling": _scales(found.get("rope_scaling") or found.get("rope_parameters")),
        "use_sliding_window": found.get("use_sliding_window", False),
        "mlp_only_layers": found.get("mlp_only_layers", ()),
        "decoder_sparse_step": found.get("decoder_sparse_step", 1) != 1,
    }
    problems += [f"{key}: {found.get(key)!r} is not trained here" for key in odd if odd[key]]
    if problems:
        raise UsageError(f"config.json: {'; '.join(problems)}")
    return Config(
        shape,
        norm_epsilon=found.get("rms_norm_eps", 1e-6),
        rope_theta=found.get("rope_theta") or found["rope_parameters"]["rope_theta"],
        normalized_routing=found.get("norm_topk_prob", False),
    )


def _scales(rope: Mapping[str, Any] | None) -> bool:
    return rope is not None and rope.get("rope_type", rope.get("type", "default")) != "default"


class Decoder(nn.Module):
    """The whole model, or the `layers` of it that a pipeline's stage has."""

    model: Any

    def __init__(self, config: Config, layers: range | None = None) -> None:
        super().__init__()
        shape = config.shape
        own = range(shape.layers) if layers is None else layers
        self.is_first, self.is_last = own.start == 0, own.stop == shape.layers
        self.model = nn.Module()
        if self.is_first:
            self.model.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.model.layers = nn.ModuleDict({str(n): Layer(config) for n in own})
        if self.is_last:
            self.model.norm = nn.RMSNorm(shape.hidden, config.norm_epsilon)
            self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
            if shape.tied_embeddings:
                self.lm_head.weight = self.model.get_submodule("embed_tokens").weight
        self._rotary = config.shape.head_dim, config.rope_theta

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens, or the hidden states of the stage before; logits, or hidden states."""
        hidden: Tensor = self.model.embed_tokens(inputs) if self.is_first else inputs
        turns = rotations(hidden.shape[1], *self._rotary, hidden.device)
        for layer in self.model.layers.values():
            hidden = layer(hidden, turns)
        if not self.is_last:
            return hidden
        logits: Tensor = self.lm_head(self.model.norm(hidden))
        return logits


class Layer(nn.Module):
    """Attention, then an MLP or experts, each added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, epsilon = config.shape.hidden, config.norm_epsilon
        self.input_layernorm = nn.RMSNorm(hidden, epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, epsilon)
        self.mlp = (
            Experts(config) if config.shape.experts else Mlp(hidden, config.shape.intermediate)
        )

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states in and out."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turns)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Attention(nn.Module):
    """Causal attention. With TP a rank has some of the heads: it counts them by what comes out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = config.shape
        self._head_dim = shape.head_dim
        queries, kept = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kept, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kept, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, config.norm_epsilon)
        self.k_norm = nn.RMSNorm(shape.head_dim, config.norm_epsilon)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states in and out."""
        heads = (*hidden.shape[:2], -1, self._head_dim)
        query = turned(self.q_norm(self.q_proj(hidden).view(heads)), turns).transpose(1, 2)
        key = turned(self.k_norm(self.k_proj(hidden).view(heads)), turns).transpose(1, 2)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """A gated MLP (SwiGLU)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states in and out."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Experts(nn.Module):
    """Routed experts: every token goes through its `experts_per_token` likeliest ones.

    `exchange` is there under EP: this rank then keeps a share of them, and sends each token where
    its experts are.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = config.shape
        self._each, self._normalized = shape.experts_per_token, config.normalized_routing
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleDict(
            {str(n): Mlp(shape.hidden, shape.expert_intermediate) for n in range(shape.experts)}
        )
        self.exchange: Any = None

    def keep(self, place: int, ranks: int) -> None:
        """Keep one of as many equal shares of the experts as there are ranks."""
        for name in list(self.experts):
            if int(name) * ranks // self.gate.out_features != place:
                del self.experts[name]

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states in and out."""
        flat = hidden.flatten(0, 1)
        shares, chosen = self.gate(flat).softmax(-1).topk(self._each)
        if self._normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # copies of tokens, expert by expert
        counts = chosen.flatten().bincount(minlength=self.gate.out_features)
        copies = flat[order // self._each]
        through = self._own if self.exchange is None else partial(self.exchange, compute=self._own)
        answers = through(copies, counts)
        weighted = answers * shares.flatten()[order].unsqueeze(1)
        return torch.zeros_like(flat).index_add(0, order // self._each, weighted).view_as(hidden)

    def _own(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Put copies of tokens, sorted by this rank's experts, `counts` for each, through them."""
        parts = torch.split(copies, counts.tolist())
        return torch.cat([mlp(p) for mlp, p in zip(self.experts.values(), parts, strict=True)])


def rotations(
    length: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[length, 1, head_dim]`` by position (RoPE; Su et al. 2021)."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), theta**-steps)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def turned(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads ``[batch, length, heads, head_dim]`` by their positions, halves as pairs."""
    cosines, sines = turns
    left, right = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-right, left), dim=-1) * sines
