"""The streams of the fabric: what every field of every event means. A literal table.

Part of `harness.model.streams`, which see. `policy` is the arm, such as ``orchestrl@rfabric``.
"""

from __future__ import annotations

from harness.model.documents import Field
from harness.model.fields import bytes_of, ms_of, text_of, whole_of

FABRIC_STREAMS: dict[str, dict[str, Field]] = {
    # The controller was told of traffic to come, and decided. `kind`: train, sync, layout, ...;
    # `action`: change, keep, electrical, or dropped (decided, and its window was over). Times are
    # predicted: of the traffic over the circuits that are up (keep), over those of the plan
    # (change) and without any (electrical); `window_ms` is idle before, `needed_ms` what a change
    # takes.
    "fabric": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "kind": text_of("coordinator"),
        "action": text_of("coordinator"),
        "reason": text_of("coordinator"),
        "bytes": bytes_of("coordinator"),
        "window_ms": ms_of("coordinator"),
        "needed_ms": ms_of("coordinator"),
        "keep_ms": ms_of("coordinator"),
        "change_ms": ms_of("coordinator"),
        "electrical_ms": ms_of("coordinator"),
        "circuits": Field(dtype="string", source="coordinator", shape=("links",)),
        "unserved": Field(dtype="string", source="coordinator", shape=("edges",)),
        "solve_ms": ms_of("coordinator"),
    },
    # Circuits were changed, with the run going on. `stages` as of a reconfiguration, as far as
    # they apply; `total_ms` from the decision to the last route; `outcome`: changed, degraded (part
    # of it stays electrical, `error` says which and why) or failed.
    "fabric_change": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "kind": text_of("coordinator"),
        "stages": Field(dtype="object", source="coordinator"),
        "device_ms": ms_of("device"),
        "total_ms": ms_of("coordinator"),
        "moved": whole_of("coordinator"),
        "kept": whole_of("coordinator"),
        "lit": Field(dtype="string", source="coordinator", shape=("links",)),
        "outcome": text_of("coordinator"),
        "error": text_of("coordinator"),
    },
    # Something of the fabric broke, or is used again: an uplink, a trunk, a switch, a ToR.
    "fabric_part": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "part": text_of("coordinator"),
        "state": text_of("coordinator"),
        "reason": text_of("coordinator"),
    },
    # What a phase really sent, by the counters of the ToRs' ports, beside what was announced.
    "fabric_traffic": {
        "step": whole_of("coordinator"),
        "policy": text_of("coordinator"),
        "kind": text_of("coordinator"),
        "announced_bytes": bytes_of("coordinator"),
        "measured_bytes": bytes_of("agent"),
        "circuits_bytes": bytes_of("agent"),
        "took_ms": ms_of("coordinator"),
    },
}
