"""The streams of the RL loop: what every field of every event means. A literal table.

Part of `harness.model.streams`, which see: stamps are on the coordinator's clock, and what was not
measured is null.
"""

from __future__ import annotations

from harness.model.documents import Field
from harness.model.fields import bytes_of, ms_of, ns_of, pct_of, s_of, text_of, tokens_of, whole_of

RL_STREAMS: dict[str, dict[str, Field]] = {
    # One policy's run of the loop, at its end: what it yielded, and how well its pools were used.
    # `workload_seed` pairs policies that had the same requests. Bubbles: share of the time in which
    # a pool had nothing to do. Switches are taken, refused (planned, not made), or wasted: taken,
    # and in hindsight slower than staying.
    "rl": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "repeat": whole_of("coordinator"),
        "workload_seed": whole_of("coordinator"),
        "steps": whole_of("coordinator"),
        "samples": whole_of("coordinator"),
        "tokens": tokens_of("coordinator"),
        "took_s": s_of("coordinator"),
        "samples_per_s": Field(unit="1/s", source="coordinator"),
        "switches_taken": whole_of("coordinator"),
        "switches_refused": whole_of("coordinator"),
        "switches_wasted": whole_of("coordinator"),
        "moves": whole_of("coordinator"),
        "generation_bubble_pct": pct_of("coordinator"),
        "training_bubble_pct": pct_of("coordinator"),
        "dropped": whole_of("coordinator"),
        "staleness_max": whole_of("coordinator"),
        "digest": text_of("coordinator"),
    },
    # One training step of the loop. `batch_s`: from the first request that could be sent to the
    # last sample that ended; `tail_begin_ns`: when 90 % of them had; `step_s`: from the end of the
    # step before. `staleness` by samples: how many were 0, 1, ... versions old when they were used.
    "rl_step": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "repeat": whole_of("coordinator"),
        "index": whole_of("coordinator"),
        "version": whole_of("coordinator"),
        "samples": whole_of("coordinator"),
        "tokens": tokens_of("coordinator"),
        "begin_ns": ns_of("coordinator"),
        "tail_begin_ns": ns_of("coordinator"),
        "batch_end_ns": ns_of("coordinator"),
        "train_begin_ns": ns_of("coordinator"),
        "train_end_ns": ns_of("coordinator"),
        "sync_end_ns": ns_of("coordinator"),
        "batch_s": s_of("coordinator"),
        "train_s": s_of("coordinator"),
        "step_s": s_of("coordinator"),
        "staleness": Field(dtype="integer", source="coordinator", shape=("versions",)),
        "mixed": whole_of("coordinator"),
        "reward": Field(source="coordinator"),
        "figures": Field(dtype="object", source="rank"),
    },
    # The pool as a policy saw it, now and then: what the timeline of the report is drawn from.
    "pool": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "layout": text_of("coordinator"),
        "batch": whole_of("coordinator"),
        "running": whole_of("coordinator"),
        "waiting": whole_of("coordinator"),
        "queued": whole_of("coordinator"),
        "kv_use_pct": pct_of("coordinator"),
        "tokens": tokens_of("coordinator"),
    },
    # The planner looked. `outcome`: taken, refused (a better layout is not worth its cost), stayed
    # (this one is best), or failed.
    "planned": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "layout": text_of("coordinator"),
        "best": text_of("coordinator"),
        "outcome": text_of("coordinator"),
        "reason": text_of("coordinator"),
        "open": whole_of("coordinator"),
        "stay_s": s_of("coordinator"),
        "change_s": s_of("coordinator"),
        "cost_s": s_of("coordinator"),
        "solve_ms": ms_of("coordinator"),
    },
    # The work that was left of a batch when it was forecast, and what it was in the end, known when
    # the batch has ended. Intervals cover 80 %.
    "forecast": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "batch": whole_of("coordinator"),
        "at_s": s_of("coordinator"),
        "open": whole_of("coordinator"),
        "past_batches": whole_of("coordinator"),
        "total_tokens": tokens_of("coordinator"),
        "total_low_tokens": tokens_of("coordinator"),
        "total_high_tokens": tokens_of("coordinator"),
        "total_true_tokens": tokens_of("coordinator"),
        "longest_tokens": tokens_of("coordinator"),
        "longest_low_tokens": tokens_of("coordinator"),
        "longest_high_tokens": tokens_of("coordinator"),
        "longest_true_tokens": tokens_of("coordinator"),
        "covered_pct": pct_of("coordinator"),
    },
    # New weights got to all that generate, or not. `rpc_s`: asking and answering; `wire_s`: first
    # bucket sent to last one verified; `load_s`: engines; `gather_s`: the trainer wrote them.
    # `outcome`: synced, failed, or noop (sent, and by a fault of ours never loaded).
    "sync": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "version": whole_of("coordinator"),
        "path": text_of("coordinator"),
        "sources": whole_of("coordinator"),
        "receivers": whole_of("coordinator"),
        "attempt": whole_of("coordinator"),
        "bytes": bytes_of("rank"),
        "buckets": whole_of("agent"),
        "gather_s": s_of("rank"),
        "rpc_s": s_of("coordinator"),
        "wire_s": s_of("agent"),
        "load_s": s_of("rank"),
        "total_s": s_of("coordinator"),
        "outcome": text_of("coordinator"),
        "error": text_of("coordinator"),
    },
    # One communication of a training step, as announced and as it was.
    "phase": {
        "step": whole_of("coordinator"),
        "node": text_of("coordinator"),
        "version": whole_of("rank"),
        "index": whole_of("rank"),
        "name": text_of("rank"),
        "op": text_of("rank"),
        "axis": text_of("rank"),
        "bytes": bytes_of("rank"),
        "expected_gap_ms": ms_of("rank"),
        "begin_ns": ns_of("rank"),
        "end_ns": ns_of("rank"),
    },
}
