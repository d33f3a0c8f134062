"""Step times from the shape of the model and the figures of the GPU: the roofline.

Of one instance, per step (GEMM = matrix products with weights; T = tokens computed, decoded and
prefilled, per DP group)::

    max(weights / (TP * bandwidth), operations / (TP * PP * peak))      GEMM
    + KV / (TP * PP * DP * bandwidth) + pairs / (TP * PP * DP * peak)   attention
    + 2 * layers * (latency(TP) + T * hidden * 2 (TP-1)/TP / link)      all-reduce
    + 2 * layers * (latency(TP*DP) + exchanged bytes / link)            experts' all-to-all, DP > 1
    + PP * hop + overheads

Source of the form: the decode model ``a + b * batch + c * KV`` that serving planners share, with
the batch's operations bounded by the peak. Of the experts, a step reads those that its tokens
chose: ``E * (1 - (1 - k/E)^T)`` expected, if the router chooses evenly; with EP the fullest GPU
reads `expert_imbalance` times its even share. PP is taken in its steady state, a micro-batch in
each stage: it divides KV and operations, not the weights that each micro-batch reads again. With
fewer sequences than stages the KV term is too small by at most PP. Pure; SI units inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.model.layout import Layout, kv_copies
from harness.model.shape import ModelShape
from harness.model.steptime import FS_PER_NS, Line, outside

FS_PER_S = 1e15


@dataclass(frozen=True)
class Rates:
    """What the hardware reaches in practice, for one layout."""

    weights_bytes_per_s: float
    kv_bytes_per_s: float
    gemm_flop_per_s: float
    attention_flop_per_s: float
    link_bytes_per_s: float
    step_overhead_s: float
    layer_overhead_s: float
    sequence_s: float
    hop_s: float
    all_reduce_s: float
    all_to_all_s: float
    expert_imbalance: float
    batch_max: int
    prefill_max_tokens: int


class RooflineCosts:
    """Step times of one instance of `layout`."""

    basis = "roofline"

    def __init__(self, layout: Layout, shape: ModelShape, rates: Rates) -> None:
        self._layout, self._shape, self._rates = layout, shape, rates
        gpus = layout.gpus_per_instance
        kv_bytes = shape.kv_bytes_per_token * kv_copies(layout, shape)
        self._kv_fs = round(kv_bytes / gpus / rates.kv_bytes_per_s * FS_PER_S)
        operations = 4 * shape.layers * shape.heads * shape.head_dim
        self._pair_s = operations / gpus / rates.attention_flop_per_s
        self._decode_fs: dict[int, int] = {}

    def line(self, batch: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: int) -> Line:
        """Return the step time; one line serves all of KV."""
        del kv_tokens
        if not prefill_tokens:
            if (base := self._decode_fs.get(batch)) is None:
                base = self._decode_fs[batch] = self._base_fs(batch, batch)
            return Line(base, self._kv_fs, FS_PER_NS)
        base = self._base_fs(batch + prefill_tokens, batch)
        return Line(base + round(prefill_pairs * self._pair_s * FS_PER_S), self._kv_fs, FS_PER_NS)

    def beyond(self, batch: int, kv_tokens: int, prefill_tokens: int) -> frozenset[str]:
        """Compare with the range that the profile states for its roofline."""
        del kv_tokens  # memory bounds it, and the term is linear
        found = outside("batch", batch, 0, self._rates.batch_max)
        return outside("prefill tokens", prefill_tokens, 0, self._rates.prefill_max_tokens, found)

    def _base_fs(self, tokens: int, batch: int) -> int:
        """Return all that does not depend on KV."""
        layout, rates = self._layout, self._rates
        overhead = rates.step_overhead_s + self._shape.layers * rates.layer_overhead_s
        overhead += batch * rates.sequence_s / layout.dp
        overhead += (layout.pp - 1) * rates.hop_s
        return round((self._gemm_s(tokens) + self._exchange_s(tokens) + overhead) * FS_PER_S)

    def _gemm_s(self, tokens: int) -> float:
        layout, shape, rates = self._layout, self._shape, self._rates
        per_group, stage = -(-tokens // layout.dp), layout.tp * layout.dp
        dense = shape.dense_parameters_read
        read = dense * shape.dtype_bytes / layout.tp
        operations = 2 * dense * per_group / (layout.tp * layout.pp)
        if shape.experts:
            chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
            skew = rates.expert_imbalance if layout.ep > 1 else 1.0
            read += skew * chosen * shape.expert_parameters * shape.dtype_bytes / stage
            routed = shape.active_parameters - dense
            operations += skew * 2 * routed * tokens / (stage * layout.pp)
        return max(read / rates.weights_bytes_per_s, operations / rates.gemm_flop_per_s)

    def _exchange_s(self, tokens: int) -> float:
        layout, shape, rates = self._layout, self._shape, self._rates
        per_group = -(-tokens // layout.dp) / layout.pp
        message = per_group * shape.hidden * shape.dtype_bytes / rates.link_bytes_per_s
        total = 0.0
        if layout.tp > 1:
            total += rates.all_reduce_s + message * 2 * (layout.tp - 1) / layout.tp
        if layout.dp > 1 and shape.experts:
            ranks = layout.tp * layout.dp
            copies = min(shape.experts_per_token, ranks - 1)
            total += rates.all_to_all_s + message * copies / layout.tp
        total *= 2 * shape.layers
        return total + (layout.pp - 1) * message
