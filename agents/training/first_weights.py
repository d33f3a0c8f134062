"""The weights that a decoder begins with: whole, by name, in float32.

Imports torch: import this module late.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents import weights_file
from agents.generation.tiny_model import write_model
from agents.training.decoder import Config, Decoder, read_config
from harness.errors import BadFile, UsageError
from harness.model.training.trainer import TrainerSpec

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def first(spec: TrainerSpec) -> tuple[Config, dict[str, Tensor]]:
    """Return the decoder's configuration and its first weights. Raises `UsageError`.

    Those of the directory `spec.model`; else of `spec.shape`, drawn from the seed; else of the tiny
    model: the same that the engine vllm makes of this seed.
    """
    if spec.model:
        return _read(Path(spec.model))
    if spec.shape:
        config = Config(spec.shape)
        return config, _drawn(config, spec.seed)
    with tempfile.TemporaryDirectory(prefix="tiny-model-") as folder:
        write_model(Path(folder), spec.seed)
        return _read(Path(folder))


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name, the output embedding's too where it is tied."""
    with torch.device("meta"):
        return {name: tuple(found.shape) for name, found in Decoder(config).state_dict().items()}


def _read(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    path = folder / "config.json"
    try:
        config = read_config(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise BadFile(str(path), [str(error)]) from error
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= _tensors(file)
    if config.shape.tied_embeddings and "model.embed_tokens.weight" in found:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    wanted = shapes(config)
    problems = [
        f"{name}: {tuple(found[name].shape) if name in found else 'missing'}; expected {shape}"
        for name, shape in wanted.items()
        if name not in found or tuple(found[name].shape) != shape
    ]
    if problems:
        raise BadFile(str(folder / "*.safetensors"), problems)
    return config, found


def _tensors(path: Path) -> dict[str, Tensor]:
    entries = weights_file.read_header(path).entries
    found = {}
    for name, data in weights_file.tensors(path):
        entry = entries[name]
        if entry.dtype not in _DTYPES:
            raise BadFile(str(path), [f"{name}: {entry.dtype} is none of {', '.join(_DTYPES)}"])
        flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[entry.dtype])
        found[name] = flat.view(entry.shape).float()
    return found


def _drawn(config: Config, seed: int) -> dict[str, Tensor]:
    """Draw weights as the tiny model's are: norms of 1, the rest normal, by 1 / sqrt(inputs)."""
    if not config.shape.qk_norm or config.shape.attention_bias:
        raise UsageError("shape: the decoder has norms of queries and keys, and no biases")
    chance = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            found[name] = torch.ones(shape)
        else:
            drawn = chance.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
            found[name] = torch.from_numpy(drawn)
    if config.shape.tied_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found
