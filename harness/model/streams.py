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


def _ms(source: str) -> Field:
    return Field(unit="ms", source=source)


def _text(source: str) -> Field:
    return Field(dtype="string", source=source)


def _whole(source: str) -> Field:
    return Field(dtype="integer", source=source)


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
