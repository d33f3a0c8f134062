"""What one training step of a decoder computes and sends, from its shape and degrees. Pure.

Bytes are of one rank, as nccl-tests counts a size, before scaling. A layer is a transformer block;
its routed experts are counted apart, for they are split and reduced along other axes.

- activations between the halves of a layer that TP splits: two all-reduces forward, two backward,
  of tokens x hidden (Shoeybi et al. 2019, arXiv 1909.08053, section 3);
- between pipeline stages: tokens x hidden (Narayanan et al. 2021, arXiv 2104.04473, section 2.2);
- to experts and back: every token's hidden state to each of its experts; each TP rank exchanges
  its share of the tokens (Megatron Core's MoE with sequence parallelism; an even router);
- parameters and gradients as FSDP2 moves them with ``reshard_after_forward=False`` and gradients
  reduced in 32 bits: a layer's shards are gathered once a step, its gradients scattered once.
- operations: 2 a parameter and token forward, 4 backward; attention multiplies each token with
  those before it, 2 x s^2 x heads x head_dim a layer and sequence of s (causal, half of the
  4 x s^2 that are counted in Narayanan et al. 2021, appendix), and twice that backward.
  Nothing is computed twice: no recomputation of activations.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.model.degrees import Degrees
from harness.model.shape import ModelShape


class Lengths(NamedTuple):
    """Samples of a micro batch on one rank: tokens, and the sum of their lengths squared."""

    tokens: int
    squares: int


class Traffic(NamedTuple):
    """Of one model on some degrees."""

    shape: ModelShape
    degrees: Degrees

    # -- bytes ---------------------------------------------------------------------------------

    def activation_bytes(self, tokens: int) -> int:
        """Return the hidden states of `tokens`."""
        return tokens * self.shape.hidden * self.shape.dtype_bytes

    def exchange_bytes(self, tokens: int) -> int:
        """Return hidden states on their way to (or from) the experts of one layer."""
        copies = -(-tokens // self.degrees.tp) * self.shape.experts_per_token
        return self.activation_bytes(copies)

    def layer_bytes(self, item_bytes: int) -> int:
        """Return what TP leaves of one layer without routed experts."""
        return self.shape.layer_parameters * item_bytes // self.degrees.tp

    def experts_bytes(self, item_bytes: int) -> int:
        """Return what TP and EP leave of one layer's routed experts."""
        shape, degrees = self.shape, self.degrees
        parameters = shape.expert_parameters // max(1, shape.layers)
        return parameters * item_bytes // (degrees.tp * degrees.ep)

    def table_bytes(self, item_bytes: int) -> int:
        """Return what TP leaves of one table of embeddings."""
        return self.shape.embedding_parameters * item_bytes // self.degrees.tp

    # -- operations, of one model-parallel rank ------------------------------------------------

    def layer_flops(self, lengths: Lengths) -> float:
        """Return the operations of one layer, forward; backward takes twice as many."""
        shape = self.shape
        active = shape.layer_parameters
        active += 3 * shape.hidden * shape.expert_intermediate * shape.experts_per_token
        attention = 2 * lengths.squares * shape.heads * shape.head_dim
        return (2 * active * lengths.tokens + attention) / self.degrees.tp

    def head_flops(self, lengths: Lengths) -> float:
        """Return those of the last norm and the output embedding, forward."""
        parameters = self.shape.embedding_parameters + self.shape.hidden
        return 2 * parameters * lengths.tokens / self.degrees.tp
