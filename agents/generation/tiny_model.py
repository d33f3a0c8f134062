"""A tiny random model for vLLM: a model directory made on the spot, so that nothing is fetched.

Qwen3 in float32, a few hundred thousand weights: its tokens mean nothing, but it splits over TP,
keeps KV and continues a greedy sequence as a real one does. The weights follow from a seed and a
version alone. They are real files: vLLM's dummy weights would be drawn anew by each rank for its
own shard, and then TP 1 and TP 2 would be two different models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from agents.weights_file import Tensor, read_header, write
from harness.errors import BadFile

_HIDDEN, _INTERMEDIATE, _VOCAB, _LAYERS = 64, 128, 512, 2
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 32  # vLLM's attention on CPU wants heads of 32 at least

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": _VOCAB,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Its ``config.json``. It splits over TP 1, 2 and 4."""


def write_model(folder: Path, seed: int, version: int = 0) -> None:
    """Write ``config.json`` and the weights of `version` into an existing folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = [Tensor(name, "F32", w.shape, w) for name, w in _weights(seed, version).items()]
    write(folder / "model.safetensors", tensors)


def model_of_file(folder: Path, weights: str, model: str = "") -> None:
    """Make an existing folder the model of a file of weights: with `model`'s, or our, other files.

    Raises `BadFile` for a file that is none.
    """
    try:
        read_header(weights)
    except OSError as error:
        raise BadFile(weights, [str(error.strerror)]) from error
    (folder / "model.safetensors").symlink_to(Path(weights).absolute())
    if not model:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        return
    for path in Path(model).absolute().iterdir():
        if path.is_file() and "safetensors" not in path.name:
            (folder / path.name).symlink_to(path)


def _weights(seed: int, version: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    chance = np.random.default_rng([seed, version])
    found = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN), "lm_head.weight": (_VOCAB, _HIDDEN)}
    ones = {"model.norm.weight": _HIDDEN}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        queries, kept = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
        found |= {
            f"{prefix}.self_attn.q_proj.weight": (queries, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (kept, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (kept, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (_HIDDEN, queries),
            f"{prefix}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        }
        ones |= {
            f"{prefix}.input_layernorm.weight": _HIDDEN,
            f"{prefix}.post_attention_layernorm.weight": _HIDDEN,
            f"{prefix}.self_attn.q_norm.weight": _HEAD_DIM,
            f"{prefix}.self_attn.k_norm.weight": _HEAD_DIM,
        }
    weights = {
        name: chance.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        for name, shape in found.items()
    }
    return weights | {name: np.ones(size, np.float32) for name, size in ones.items()}
