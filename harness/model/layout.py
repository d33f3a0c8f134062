"""A layout, and why a model cannot be laid out so: every reason, before anything is torn down.

A layout is what the field calls it: instances x (TP, PP, EP, DP). An instance is one engine of
``tp * pp * dp`` GPUs. TP splits heads and MLPs; PP splits layers; DP, inside an instance, gives
each group of TP GPUs its own share of the requests and their KV; routed experts are split over all
``tp * dp`` GPUs of a stage, into `ep` groups of whole experts, and within a group by width (vLLM:
EP off is ``ep = 1``, EP on is ``ep = tp * dp``). Written ``"4xTP2"`` or ``"1xTP4DP2EP8"``.

The rules of divisibility are those of vLLM 0.32. Sizes in bytes, lengths in tokens. Pure; parsing
raises `ValueError`.
"""

from __future__ import annotations

import re

import msgspec

from harness.model.shape import ModelShape

VOCAB_BLOCK = 64
"""Rows to a multiple of which vLLM pads the vocabulary before it splits it over TP."""

BLOCK_TOKENS = 16
"""Tokens of a KV block, by default; vLLM's CPU build takes 128."""

_LAYOUT = re.compile(r"([1-9]\d{0,4})x((?:(?:TP|PP|DP|EP)[1-9]\d{0,4})+)", re.ASCII)
_DEGREE = re.compile(r"(TP|PP|DP|EP)(\d+)")


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instances x (TP, PP, EP, DP); every instance alike."""

    instances: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def gpus_per_instance(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp * self.dp

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.instances * self.gpus_per_instance

    def __str__(self) -> str:
        parts = (("PP", self.pp), ("DP", self.dp), ("EP", self.ep))
        rest = "".join(f"{word}{degree}" for word, degree in parts if degree != 1)
        return f"{self.instances}xTP{self.tp}{rest}"


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a layout needs to know of a GPU: its memory, and what is not for weights and KV."""

    name: str
    memory_bytes: int
    workspace_bytes: int


def parse_layout(text: str) -> Layout:
    """Read ``"4xTP2"``, ``"2xTP4PP2"``, ``"1xTP4DP2EP8"``. Raises `ValueError`."""
    found = _LAYOUT.fullmatch(text.replace(" ", ""))
    degrees = _DEGREE.findall(found[2]) if found else []
    names = [word for word, _ in degrees]
    if not found or len(set(names)) != len(names):
        raise ValueError(f'{text!r} is not a layout such as "4xTP2" or "1xTP4DP2EP8"')
    return Layout(int(found[1]), **{word.lower(): int(degree) for word, degree in degrees})


class Mix(tuple[Layout, ...]):
    """Layouts side by side, such as ``4xTP1+1xTP4``; one alone is a mix too."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return it as it is written."""
        return "+".join(map(str, self))

    @property
    def gpus(self) -> int:
        """How many all instances take."""
        return sum(layout.gpus for layout in self)


def parse_mix(text: str) -> Mix:
    """Read ``"4xTP1+1xTP4"``; its layouts are kept in their order. Raises `ValueError`."""
    return Mix(map(parse_layout, text.split("+")))


def infeasible(
    layout: Layout, shape: ModelShape, gpu: Gpu, gpus_per_node: int, gpus: int
) -> list[str]:
    """Return every reason why `shape` cannot be laid out so on `gpus` GPUs; none: it can."""
    if min(layout.instances, layout.tp, layout.pp, layout.ep, layout.dp) < 1:
        return [f"{layout}: instances and degrees are at least 1"]
    return [
        *_placement(layout, gpus_per_node, gpus),
        *_division(layout, shape),
        *_experts(layout, shape),
        *_memory(layout, shape, gpu),
    ]


def _placement(layout: Layout, gpus_per_node: int, gpus: int) -> list[str]:
    reasons = []
    if layout.gpus > gpus:
        reasons.append(f"{layout} needs {layout.gpus} GPUs; there are {gpus}")
    if layout.tp > gpus_per_node:
        reasons.append(f"TP {layout.tp} would span nodes of {gpus_per_node} GPUs")
    elif gpus_per_node % layout.tp:
        reasons.append(f"TP {layout.tp} does not divide the {gpus_per_node} GPUs of a node")
    return reasons


def _division(layout: Layout, shape: ModelShape) -> list[str]:
    tp, reasons = layout.tp, []
    if shape.heads % tp:
        reasons.append(f"TP {tp} does not divide the {shape.heads} attention heads")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        reasons.append(
            f"TP {tp} neither divides the {shape.kv_heads} KV heads nor is a multiple of them "
            "(then they would be replicated)"
        )
    if padded_vocab(shape) % tp:
        reasons.append(
            f"TP {tp} does not divide the vocabulary, {shape.vocab} padded to {padded_vocab(shape)}"
        )
    if shape.intermediate % tp:
        reasons.append(f"TP {tp} does not divide the MLP's width {shape.intermediate}")
    if layout.pp > shape.layers:
        reasons.append(f"PP {layout.pp} exceeds the {shape.layers} layers")
    return reasons


def _experts(layout: Layout, shape: ModelShape) -> list[str]:
    if not shape.experts:
        return [f"EP {layout.ep}: the model has no experts"] if layout.ep > 1 else []
    ranks = layout.tp * layout.dp
    if ranks % layout.ep:
        return [f"EP {layout.ep} does not divide the {ranks} GPUs of TP x DP"]
    reasons = []
    if shape.experts % layout.ep:
        reasons.append(f"EP {layout.ep} does not divide the {shape.experts} experts")
    if shape.expert_intermediate % (ranks // layout.ep):
        reasons.append(
            f"the experts' width {shape.expert_intermediate} is not divided by the "
            f"{ranks // layout.ep} GPUs that share each expert"
        )
    return reasons


def _memory(layout: Layout, shape: ModelShape, gpu: Gpu) -> list[str]:
    weights = weight_bytes_per_gpu(layout, shape)
    needed = weights + gpu.workspace_bytes
    if needed < gpu.memory_bytes and kv_capacity_tokens(layout, shape, gpu) >= BLOCK_TOKENS:
        return []
    reason = (
        f"weights of {weights / 1e9:.1f} GB and workspace of {gpu.workspace_bytes / 1e9:.1f} GB "
        f"a GPU leave no room for KV in the {gpu.memory_bytes / 1e9:.1f} GB of {gpu.name}"
    )
    return [reason]


def padded_vocab(shape: ModelShape) -> int:
    """Return the rows of the embedding as they are split over TP."""
    return -(-shape.vocab // VOCAB_BLOCK) * VOCAB_BLOCK


def kv_copies(layout: Layout, shape: ModelShape) -> int:
    """Return how many GPUs of a TP group hold the same KV head: 1 unless TP exceeds them."""
    return max(1, layout.tp // shape.kv_heads)


def weight_bytes_per_gpu(layout: Layout, shape: ModelShape) -> int:
    """Return the weights of the fullest GPU, which holds the larger stage and an embedding."""
    stage_layers = -(-shape.layers // layout.pp)
    embeddings = 1 if layout.pp > 1 or shape.tied_embeddings else 2
    dense = stage_layers * shape.layer_parameters
    dense += embeddings * padded_vocab(shape) * shape.hidden + shape.hidden
    experts = stage_layers * shape.expert_parameters // shape.layers
    per_gpu = -(-dense // layout.tp) + -(-experts // (layout.tp * layout.dp))
    return per_gpu * shape.dtype_bytes


def kv_bytes_per_gpu_token(layout: Layout, shape: ModelShape) -> int:
    """Return what one token of context takes on a GPU of the group that holds it."""
    stage_layers = -(-shape.layers // layout.pp)
    heads = max(1, shape.kv_heads // layout.tp)
    return 2 * stage_layers * heads * shape.head_dim * shape.kv_dtype_bytes


def kv_capacity_tokens(layout: Layout, shape: ModelShape, gpu: Gpu) -> int:
    """Return the tokens whose KV one *instance* can hold: of its DP groups together.

    What is lost in half-filled blocks (about 4 % in the field) is left to `harness.model.batching`,
    which counts blocks.
    """
    free = gpu.memory_bytes - gpu.workspace_bytes - weight_bytes_per_gpu(layout, shape)
    return max(0, free // kv_bytes_per_gpu_token(layout, shape)) * layout.dp
