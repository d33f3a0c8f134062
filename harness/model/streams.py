"""The streams of a journal: what every field of every event means. A literal table.

The orchestrator describes all of them at the start of a run and writes events; everything in
`harness.record` reads them. A field that was not measured is null. Stamps (``t_ns``) are on the
coordinator's monotonic clock.
"""

from __future__ import annotations

from harness.model.documents import Field

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


def _ms(source: str) -> Field:
    return Field(unit="ms", source=source)


def _s(source: str) -> Field:
    return Field(unit="s", source=source)


def _ns(source: str) -> Field:
    return Field(unit="ns", dtype="integer", source=source)


def _text(source: str) -> Field:
    return Field(dtype="string", source=source)


def _whole(source: str) -> Field:
    return Field(dtype="integer", source=source)


def _bytes(source: str) -> Field:
    return Field(unit="bytes", dtype="integer", source=source)


def _tokens(source: str) -> Field:
    return Field(unit="tokens", dtype="integer", source=source)


def _tokens_per_s(source: str) -> Field:
    return Field(unit="tokens/s", source=source)


STREAMS: dict[str, dict[str, Field]] = {
    # An agent that is in.
    "agent": {
        "agent": _text("coordinator"),
        "host": _text("agent"),
        "pid": _whole("agent"),
        "facts": Field(dtype="object", source="agent"),
    },
    # The mapping of an agent's clock onto the coordinator's.
    "clock": {
        "agent": _text("coordinator"),
        "offset_ns": Field(unit="ns", dtype="integer", source="coordinator"),
        "bound_ns": Field(unit="ns", dtype="integer", source="coordinator"),
        "drift_ppb": Field(unit="ppb", source="coordinator"),
        "delay_ns": Field(unit="ns", dtype="integer", source="coordinator"),
        "samples": _whole("coordinator"),
    },
    # A switch that answered.
    "switch": {
        "switch": _text("coordinator"),
        "vendor": _text("device"),
        "model": _text("device"),
        "serial": _text("device"),
        "firmware": _text("device"),
        "url": _text("coordinator"),
    },
    # A step begins or ends; `ok` and `error` belong to the end. `index` counts through repeats.
    "step": {
        "index": _whole("coordinator"),
        "repeat": _whole("coordinator"),
        "do": _text("coordinator"),
        "phase": _text("coordinator"),
        "ok": Field(dtype="boolean", source="coordinator"),
        "error": _text("coordinator"),
    },
    # Circuits were brought up (or down) without traffic: what is lit now, as "tor0-tor1@agg0",
    # the edges that stay electrical because no switch can carry them, and what failed.
    "shape": {
        "step": _whole("coordinator"),
        "shape": _text("coordinator"),
        "lit": Field(dtype="string", source="coordinator", shape=("circuits",)),
        "unserved": Field(dtype="string", source="coordinator", shape=("edges",)),
        "failures": Field(dtype="object", source="coordinator"),
    },
    # One operation at one size in one group of ranks: raw samples, one row a rank in rank order.
    # `group` is "all" or its global ranks, as in "0-1"; `wrong` is null where not verified.
    "collective": {
        "op": _text("coordinator"),
        "path": _text("coordinator"),
        "size_bytes": Field(unit="bytes", dtype="integer", source="rank"),
        "ranks": _whole("coordinator"),
        "group": _text("coordinator"),
        "dtype": _text("coordinator"),
        "times_ns": Field(unit="ns", dtype="integer", source="rank", shape=("ranks", "iterations")),
        "wrong": _whole("rank"),
        "backend": _text("rank"),
    },
    # One reconfiguration; `stages` maps each of STAGES to its stamp in ns, or null. `mode`: drain,
    # ride_through, or refused with its reason; `error` says what failed and stays electrical.
    "reconfigure": {
        "index": _whole("coordinator"),
        "step": _whole("coordinator"),
        "path_from": _text("coordinator"),
        "path_to": _text("coordinator"),
        "mode": _text("coordinator"),
        "groups": _text("coordinator"),
        "stages": Field(dtype="object", source="coordinator"),
        "device_ms": _ms("device"),
        "link_ms": _ms("agent"),
        "communicator_ms": _ms("rank"),
        "cost_ms": _ms("coordinator"),
        "overhead_ms": _ms("coordinator"),
        "dark_ms": _ms("agent"),
        "dark_plus_minus_ms": _ms("agent"),
        "moved": _whole("coordinator"),
        "kept": _whole("coordinator"),
        "kept_lost": _whole("agent"),
        "refused_reason": _text("coordinator"),
        "error": _text("coordinator"),
    },
    # An instance that was built. `device` is what it computes on; `layout` that of it alone, "TP2".
    "engine": {
        "instance": _text("coordinator"),
        "node": _text("coordinator"),
        "gpus": Field(dtype="integer", source="coordinator", shape=("ranks",)),
        "layout": _text("coordinator"),
        "engine": _text("rank"),
        "version": _text("rank"),
        "device": _text("rank"),
        "blocks": _whole("rank"),
        "block_tokens": _tokens("rank"),
        "weights_bytes": _bytes("rank"),
    },
    # One point of a calibration: steps of `batch` sequences at a context, or (batch 0) of a prompt.
    # `step_us` is their median, `spread_pct` the distance of their quartiles as a share of it.
    "calibration": {
        "layout": _text("coordinator"),
        "batch": _whole("coordinator"),
        "context_tokens": _tokens("coordinator"),
        "prefill_tokens": _tokens("coordinator"),
        "step_us": Field(unit="us", source="rank"),
        "spread_pct": Field(unit="%", source="rank"),
        "times_ns": Field(unit="ns", dtype="integer", source="rank", shape=("steps",)),
    },
    # What an instance did between two looks at it; `generated_tokens` and `preemptions` in between,
    # by the engine's own count, the rest as of `t1_ns`.
    "progress": {
        "instance": _text("coordinator"),
        "t0_ns": Field(unit="ns", dtype="integer", source="rank"),
        "t1_ns": Field(unit="ns", dtype="integer", source="rank"),
        "generated_tokens": _tokens("rank"),
        "running": _whole("rank"),
        "waiting": _whole("rank"),
        "kv_use_pct": Field(unit="%", source="rank"),
        "preemptions": _whole("rank"),
    },
    # One switch of layouts under load. `stages` maps each of SWITCH_STAGES to its ms, or null where
    # there was none; with `residual_ms` (messages, waiting) they sum to `total_ms`. `outcome`:
    # switched, refused, rolled_back (the old layout is up again) or lost; `error` says why.
    "parallelism": {
        "index": _whole("coordinator"),
        "step": _whole("coordinator"),
        "layout_from": _text("coordinator"),
        "layout_to": _text("coordinator"),
        "strategy": _text("coordinator"),
        "requests": _text("coordinator"),
        "order": _text("coordinator"),
        "nodes": Field(dtype="string", source="coordinator", shape=("nodes",)),
        "stages": Field(dtype="object", source="rank"),
        "residual_ms": _ms("coordinator"),
        "total_ms": _ms("coordinator"),
        "blackout_ms": _ms("rank"),
        "carried": _whole("coordinator"),
        "recomputed_tokens": _tokens("coordinator"),
        "before_tokens_per_s": _tokens_per_s("coordinator"),
        "during_tokens_per_s": _tokens_per_s("coordinator"),
        "after_tokens_per_s": _tokens_per_s("coordinator"),
        "outcome": _text("coordinator"),
        "error": _text("coordinator"),
    },
    # A request that was to go to another instance, its KV sent or computed anew (`by`: kv,
    # recompute). `outcome`: moved, ended (it finished first), elsewhere, failed. `total_ms`:
    # withdrawn to the first token there, null where it gave none.
    "migration": {
        "step": _whole("coordinator"),
        "request": _text("coordinator"),
        "source": _text("coordinator"),
        "target": _text("coordinator"),
        "by": _text("coordinator"),
        "context_tokens": _tokens("coordinator"),
        "sent_bytes": _bytes("rank"),
        "cached_tokens": _tokens("rank"),
        "send_ms": _ms("rank"),
        "total_ms": _ms("coordinator"),
        "expected_ms": _ms("model"),
        "outcome": _text("coordinator"),
        "error": _text("coordinator"),
    },
    # A generate step as a whole, by the coordinator's ledger: `lost` and `doubled` count tokens.
    # `digest` is that of the requests: equal digests, equal lengths. `responses_digest` is that of
    # what finished, repeats that are equal counted once: equal digests, equal tokens (of engines
    # that give any).
    "generated": {
        "step": _whole("coordinator"),
        "layout": _text("coordinator"),
        "requests": _whole("coordinator"),
        "finished": _whole("coordinator"),
        "refused": _whole("coordinator"),
        "tokens": _tokens("coordinator"),
        "lost": _whole("coordinator"),
        "doubled": _whole("coordinator"),
        "took_s": _s("coordinator"),
        "tokens_per_s": _tokens_per_s("coordinator"),
        "preemptions": _whole("rank"),
        "digest": _text("coordinator"),
        "responses_digest": _text("coordinator"),
    },
    # An instance that died, or stalled, and whose requests went elsewhere.
    "given_up": {
        "instance": _text("coordinator"),
        "reason": _text("coordinator"),
        "requests": _whole("coordinator"),
    },
    # One policy's run of the loop, at its end: what it yielded, and how well its pools were used.
    # `workload_seed` pairs policies that had the same requests. Bubbles: share of the time in which
    # a pool had nothing to do. Switches are taken, refused (planned, not made), or wasted: taken,
    # and in hindsight slower than staying.
    "rl": {
        "step": _whole("coordinator"),
        "policy": _text("coordinator"),
        "repeat": _whole("coordinator"),
        "workload_seed": _whole("coordinator"),
        "steps": _whole("coordinator"),
        "samples": _whole("coordinator"),
        "tokens": _tokens("coordinator"),
        "took_s": _s("coordinator"),
        "samples_per_s": Field(unit="1/s", source="coordinator"),
        "switches_taken": _whole("coordinator"),
        "switches_refused": _whole("coordinator"),
        "switches_wasted": _whole("coordinator"),
        "moves": _whole("coordinator"),
        "generation_bubble_pct": Field(unit="%", source="coordinator"),
        "training_bubble_pct": Field(unit="%", source="coordinator"),
        "dropped": _whole("coordinator"),
        "staleness_max": _whole("coordinator"),
        "digest": _text("coordinator"),
    },
    # One training step of the loop. `batch_s`: from the first request that could be sent to the
    # last sample that ended; `tail_begin_ns`: when 90 % of them had; `step_s`: from the end of the
    # step before. `staleness` by samples: how many were 0, 1, ... versions old when they were used.
    "rl_step": {
        "step": _whole("coordinator"),
        "policy": _text("coordinator"),
        "repeat": _whole("coordinator"),
        "index": _whole("coordinator"),
        "version": _whole("coordinator"),
        "samples": _whole("coordinator"),
        "tokens": _tokens("coordinator"),
        "begin_ns": _ns("coordinator"),
        "tail_begin_ns": _ns("coordinator"),
        "batch_end_ns": _ns("coordinator"),
        "train_begin_ns": _ns("coordinator"),
        "train_end_ns": _ns("coordinator"),
        "sync_end_ns": _ns("coordinator"),
        "batch_s": _s("coordinator"),
        "train_s": _s("coordinator"),
        "step_s": _s("coordinator"),
        "staleness": Field(dtype="integer", source="coordinator", shape=("versions",)),
        "mixed": _whole("coordinator"),
        "reward": Field(unit="1", source="coordinator"),
        "figures": Field(dtype="object", source="rank"),
    },
    # The pool as a policy saw it, now and then: what the timeline of the report is drawn from.
    "pool": {
        "step": _whole("coordinator"),
        "policy": _text("coordinator"),
        "layout": _text("coordinator"),
        "batch": _whole("coordinator"),
        "running": _whole("coordinator"),
        "waiting": _whole("coordinator"),
        "queued": _whole("coordinator"),
        "kv_use_pct": Field(unit="%", source="coordinator"),
        "tokens": _tokens("coordinator"),
    },
    # The planner looked. `outcome`: taken, refused (a better layout is not worth its cost), stayed
    # (this one is best), or failed.
    "planned": {
        "step": _whole("coordinator"),
        "policy": _text("coordinator"),
        "layout": _text("coordinator"),
        "best": _text("coordinator"),
        "outcome": _text("coordinator"),
        "reason": _text("coordinator"),
        "open": _whole("coordinator"),
        "stay_s": _s("coordinator"),
        "change_s": _s("coordinator"),
        "cost_s": _s("coordinator"),
        "solve_ms": _ms("coordinator"),
    },
    # The work that was left of a batch when it was forecast, and what it was in the end, known when
    # the batch has ended. Intervals cover 80 %.
    "forecast": {
        "step": _whole("coordinator"),
        "policy": _text("coordinator"),
        "batch": _whole("coordinator"),
        "at_s": _s("coordinator"),
        "open": _whole("coordinator"),
        "past_batches": _whole("coordinator"),
        "total_tokens": _tokens("coordinator"),
        "total_low_tokens": _tokens("coordinator"),
        "total_high_tokens": _tokens("coordinator"),
        "total_true_tokens": _tokens("coordinator"),
        "longest_tokens": _tokens("coordinator"),
        "longest_low_tokens": _tokens("coordinator"),
        "longest_high_tokens": _tokens("coordinator"),
        "longest_true_tokens": _tokens("coordinator"),
        "covered_pct": Field(unit="%", source="coordinator"),
    },
    # New weights got to all that generate, or not. `rpc_s`: asking and answering; `wire_s`: first
    # bucket sent to last one verified; `load_s`: engines; `gather_s`: the trainer wrote them.
    # `outcome`: synced, failed, or noop (sent, and by a fault of ours never loaded).
    "sync": {
        "step": _whole("coordinator"),
        "policy": _text("coordinator"),
        "version": _whole("coordinator"),
        "path": _text("coordinator"),
        "receivers": _whole("coordinator"),
        "attempt": _whole("coordinator"),
        "bytes": _bytes("rank"),
        "buckets": _whole("agent"),
        "gather_s": _s("rank"),
        "rpc_s": _s("coordinator"),
        "wire_s": _s("agent"),
        "load_s": _s("rank"),
        "total_s": _s("coordinator"),
        "outcome": _text("coordinator"),
        "error": _text("coordinator"),
    },
    # One communication of a training step, as announced and as it was.
    "phase": {
        "step": _whole("coordinator"),
        "node": _text("coordinator"),
        "version": _whole("rank"),
        "index": _whole("rank"),
        "name": _text("rank"),
        "op": _text("rank"),
        "axis": _text("rank"),
        "bytes": _bytes("rank"),
        "expected_gap_ms": _ms("rank"),
        "begin_ns": _ns("rank"),
        "end_ns": _ns("rank"),
    },
    # How a switch was left. `outcome`: restored, unchanged, or failed; `difference` is what was
    # undone, or what still differs.
    "restore": {
        "switch": _text("coordinator"),
        "outcome": _text("coordinator"),
        "difference": _text("coordinator"),
    },
    # Something a reader should know, with the level of the logging module's names.
    "note": {
        "level": _text("coordinator"),
        "who": _text("coordinator"),
        "text": _text("coordinator"),
    },
}
