"""The streams of a journal: what every field of every event means. A literal table.

The orchestrator describes all of them at the start of a run and writes events; everything in
`harness.record` reads them. A field that was not measured is null. Stamps (``t_ns``) are on the
coordinator's monotonic clock.
"""

from __future__ import annotations

from harness.model.documents import Field
from harness.model.fabric_streams import FABRIC_STREAMS
from harness.model.fields import (
    bytes_of,
    ms_of,
    pct_of,
    s_of,
    text_of,
    tokens_of,
    tokens_per_s_of,
    whole_of,
)
from harness.model.rl_streams import RL_STREAMS

STAGES = (
    "intent",
    "quiesced",
    "groups_destroyed",
    "steered_away",
    "command_sent",
    "device_acknowledged",
    "device_done",
    "light",
    "path_verified",
    "steered",
    "groups_ready",
    "first_good",
    "steady",
)
"""Of one reconfiguration, in order. `steered_away` is the first half of what is called steering."""

SWITCH_STAGES = (
    "prepare",
    "stop_admitting",
    "drain",
    "migrate",
    "withdraw",
    "teardown",
    "processes",
    "groups",
    "weights",
    "kv_cache",
    "resubmit",
    "first_token",
    "steady",
)
"""Of one switch of layouts, in order; of what runs, what does not end or move is withdrawn."""


STREAMS: dict[str, dict[str, Field]] = {
    # An agent that is in.
    "agent": {
        "agent": text_of("coordinator"),
        "host": text_of("agent"),
        "pid": whole_of("agent"),
        "facts": Field(dtype="object", source="agent"),
    },
    # The mapping of an agent's clock onto the coordinator's.
    "clock": {
        "agent": text_of("coordinator"),
        "offset_ns": Field(unit="ns", dtype="integer", source="coordinator"),
        "bound_ns": Field(unit="ns", dtype="integer", source="coordinator"),
        "drift_ppb": Field(unit="ppb", source="coordinator"),
        "delay_ns": Field(unit="ns", dtype="integer", source="coordinator"),
        "samples": whole_of("coordinator"),
    },
    # A switch that answered.
    "switch": {
        "switch": text_of("coordinator"),
        "vendor": text_of("device"),
        "model": text_of("device"),
        "serial": text_of("device"),
        "firmware": text_of("device"),
        "url": text_of("coordinator"),
    },
    # A ToR that is steered.
    "tor": {
        "tor": text_of("coordinator"),
        "driver": text_of("coordinator"),
        "url": text_of("coordinator"),
    },
    # A step begins or ends; `ok` and `error` belong to the end. `index` counts through repeats.
    "step": {
        "index": whole_of("coordinator"),
        "repeat": whole_of("coordinator"),
        "do": text_of("coordinator"),
        "phase": text_of("coordinator"),
        "ok": Field(dtype="boolean", source="coordinator"),
        "error": text_of("coordinator"),
    },
    # How much of a step (of an rl step, by arm) some task waited for a CPU, since what the step
    # starts was up; only of an emulated bench, whose nodes share one machine's cores.
    "pressure": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "duration_s": s_of("coordinator"),
        "cpu_waited_pct": pct_of("coordinator"),
    },
    # Circuits were brought up (or down) without traffic: what is lit now, as "tor0-tor1@agg0",
    # the edges that stay electrical because no switch can carry them, and what failed.
    "shape": {
        "step": whole_of("coordinator"),
        "shape": text_of("coordinator"),
        "lit": Field(dtype="string", source="coordinator", shape=("circuits",)),
        "unserved": Field(dtype="string", source="coordinator", shape=("edges",)),
        "failures": Field(dtype="object", source="coordinator"),
    },
    # One operation at one size in one group of ranks: raw samples, one row a rank in rank order.
    # `group` is "all" or its global ranks, as in "0-1"; `wrong` is null where not verified.
    "collective": {
        "op": text_of("coordinator"),
        "path": text_of("coordinator"),
        "size_bytes": Field(unit="bytes", dtype="integer", source="rank"),
        "ranks": whole_of("coordinator"),
        "group": text_of("coordinator"),
        "dtype": text_of("coordinator"),
        "times_ns": Field(unit="ns", dtype="integer", source="rank", shape=("ranks", "iterations")),
        "wrong": whole_of("rank"),
        "backend": text_of("rank"),
    },
    # One reconfiguration; `stages` maps each of STAGES to its stamp in ns, or null. `mode`: drain,
    # ride_through, or refused with its reason; `error` says what failed and stays electrical.
    "reconfigure": {
        "index": whole_of("coordinator"),
        "step": whole_of("coordinator"),
        "path_from": text_of("coordinator"),
        "path_to": text_of("coordinator"),
        "mode": text_of("coordinator"),
        "groups": text_of("coordinator"),
        "stages": Field(dtype="object", source="coordinator"),
        "device_ms": ms_of("device"),
        "link_ms": ms_of("agent"),
        "communicator_ms": ms_of("rank"),
        "cost_ms": ms_of("coordinator"),
        "overhead_ms": ms_of("coordinator"),
        "dark_ms": ms_of("agent"),
        "dark_plus_minus_ms": ms_of("agent"),
        "moved": whole_of("coordinator"),
        "kept": whole_of("coordinator"),
        "kept_lost": whole_of("agent"),
        "refused_reason": text_of("coordinator"),
        "error": text_of("coordinator"),
    },
    # An instance that was built. `device` is what it computes on; `layout` that of it alone, "TP2".
    "engine": {
        "instance": text_of("coordinator"),
        "node": text_of("coordinator"),
        "gpus": Field(dtype="integer", source="coordinator", shape=("ranks",)),
        "layout": text_of("coordinator"),
        "engine": text_of("rank"),
        "version": text_of("rank"),
        "device": text_of("rank"),
        "blocks": whole_of("rank"),
        "block_tokens": tokens_of("rank"),
        "weights_bytes": bytes_of("rank"),
    },
    # One point of a calibration: steps of `batch` sequences at a context, or (batch 0) of a prompt.
    # `step_us` is their median, `spread_pct` the distance of their quartiles as a share of it.
    "calibration": {
        "layout": text_of("coordinator"),
        "batch": whole_of("coordinator"),
        "context_tokens": tokens_of("coordinator"),
        "prefill_tokens": tokens_of("coordinator"),
        "step_us": Field(unit="us", source="rank"),
        "spread_pct": pct_of("rank"),
        "times_ns": Field(unit="ns", dtype="integer", source="rank", shape=("steps",)),
    },
    # What an instance did between two looks at it; `generated_tokens` and `preemptions` in between,
    # by the engine's own count, the rest as of `t1_ns`.
    "progress": {
        "instance": text_of("coordinator"),
        "t0_ns": Field(unit="ns", dtype="integer", source="rank"),
        "t1_ns": Field(unit="ns", dtype="integer", source="rank"),
        "generated_tokens": tokens_of("rank"),
        "running": whole_of("rank"),
        "waiting": whole_of("rank"),
        "kv_use_pct": pct_of("rank"),
        "preemptions": whole_of("rank"),
    },
    # One switch of layouts under load. `stages` maps each of SWITCH_STAGES to its ms, or null where
    # there was none; with `residual_ms` (messages, waiting) they sum to `total_ms`. `outcome`:
    # switched, refused, rolled_back (the old layout is up again) or lost; `error` says why.
    "parallelism": {
        "index": whole_of("coordinator"),
        "step": whole_of("coordinator"),
        "layout_from": text_of("coordinator"),
        "layout_to": text_of("coordinator"),
        "strategy": text_of("coordinator"),
        "requests": text_of("coordinator"),
        "order": text_of("coordinator"),
        "nodes": Field(dtype="string", source="coordinator", shape=("nodes",)),
        "stages": Field(dtype="object", source="rank"),
        "residual_ms": ms_of("coordinator"),
        "total_ms": ms_of("coordinator"),
        "blackout_ms": ms_of("rank"),
        "carried": whole_of("coordinator"),
        "recomputed_tokens": tokens_of("coordinator"),
        "before_tokens_per_s": tokens_per_s_of("coordinator"),
        "during_tokens_per_s": tokens_per_s_of("coordinator"),
        "after_tokens_per_s": tokens_per_s_of("coordinator"),
        "outcome": text_of("coordinator"),
        "error": text_of("coordinator"),
    },
    # A request that was to go to another instance, its KV sent or computed anew (`by`: kv,
    # recompute). `outcome`: moved, ended (it finished first), elsewhere, failed. `total_ms`:
    # withdrawn to the first token there, null where it gave none.
    "migration": {
        "step": whole_of("coordinator"),
        "request": text_of("coordinator"),
        "source": text_of("coordinator"),
        "target": text_of("coordinator"),
        "by": text_of("coordinator"),
        "context_tokens": tokens_of("coordinator"),
        "sent_bytes": bytes_of("rank"),
        "cached_tokens": tokens_of("rank"),
        "send_ms": ms_of("rank"),
        "total_ms": ms_of("coordinator"),
        "expected_ms": ms_of("model"),
        "outcome": text_of("coordinator"),
        "error": text_of("coordinator"),
    },
    # A generate step as a whole, by the coordinator's ledger: `lost` and `doubled` count tokens.
    # `digest` is that of the requests: equal digests, equal lengths. `responses_digest` is that of
    # what finished, repeats that are equal counted once: equal digests, equal tokens (of engines
    # that give any).
    "generated": {
        "step": whole_of("coordinator"),
        "layout": text_of("coordinator"),
        "requests": whole_of("coordinator"),
        "finished": whole_of("coordinator"),
        "refused": whole_of("coordinator"),
        "tokens": tokens_of("coordinator"),
        "lost": whole_of("coordinator"),
        "doubled": whole_of("coordinator"),
        "took_s": s_of("coordinator"),
        "tokens_per_s": tokens_per_s_of("coordinator"),
        "preemptions": whole_of("rank"),
        "digest": text_of("coordinator"),
        "responses_digest": text_of("coordinator"),
    },
    # An instance that died, or stalled, and whose requests went elsewhere.
    "given_up": {
        "instance": text_of("coordinator"),
        "reason": text_of("coordinator"),
        "requests": whole_of("coordinator"),
    },
    # How a switch was left. `outcome`: restored, unchanged, or failed; `difference` is what was
    # undone, or what still differs.
    "restore": {
        "switch": text_of("coordinator"),
        "outcome": text_of("coordinator"),
        "difference": text_of("coordinator"),
    },
    # Something a reader should know, with the level of the logging module's names.
    "note": {
        "level": text_of("coordinator"),
        "who": text_of("coordinator"),
        "text": text_of("coordinator"),
    },
    **RL_STREAMS,
    **FABRIC_STREAMS,
}
