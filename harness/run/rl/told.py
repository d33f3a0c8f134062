"""The rows of a loop: one per training step, one for the whole, and the pool now and then."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from harness.clock import NS_PER_S
from harness.run.generation.fleet import Fleet
from harness.run.generation.ledger import Entry
from harness.run.rl.trainees import Stepped
from harness.wire.training import Sample

if TYPE_CHECKING:
    from harness.run.rl.loop import Loop


@dataclass
class Bubbles:
    """How much of the time GPUs that generate had nothing to do, noted again and again."""

    idle_gpu_ns: float = 0.0
    all_gpu_ns: float = 0.0
    _last_ns: int = 0

    def note(self, now_ns: int, fleet: Fleet) -> None:
        """Take the pool as it is now for the time since the last note."""
        took_ns, self._last_ns = now_ns - (self._last_ns or now_ns), now_ns
        busy = sum(
            len(place.instance.gpus)
            for place in fleet.places.values()
            if place.stats and place.stats.running and not place.dead
        )
        total = sum(fleet.gpus_of.values())
        self.idle_gpu_ns += took_ns * (total - busy)
        self.all_gpu_ns += took_ns * total

    @property
    def pct(self) -> float:
        """Share of the time, all GPUs together."""
        return 100 * self.idle_gpu_ns / self.all_gpu_ns if self.all_gpu_ns else 0.0


@dataclass
class Totals:
    """Sums over the steps of a loop."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    staleness_max: int = 0


def step_row(
    loop: Loop,
    used: Sequence[Entry],
    samples: Sequence[Sample],
    made: Stepped,
) -> dict[str, object]:
    """Return the row of the step that has just been made and synced; it is added to the totals."""
    version, now_ns = made.trained.version - loop.trainees.base, loop.clock.now_ns()
    begin_ns = loop.asked_ns.get(version, loop.begin_ns)
    # what ended before its batch began to be timed, or in the run before this one, took nothing
    ends_ns = sorted(max(begin_ns, entry.last_token_ns) for entry in used)
    batch_end_ns = ends_ns[-1]
    ages = Counter(version - sample.version_first for sample in samples)
    tokens = sum(sample.response_tokens for sample in samples)
    totals = loop.totals
    totals.steps, totals.samples = totals.steps + 1, totals.samples + len(samples)
    totals.tokens += tokens
    totals.staleness_max = max(totals.staleness_max, *ages)
    return {
        "step": loop.number,
        "policy": loop.name,
        "repeat": loop.repeat,
        "index": version,
        "version": version + 1,
        "samples": len(samples),
        "tokens": tokens,
        "begin_ns": begin_ns,
        "tail_begin_ns": ends_ns[math.ceil(0.9 * len(ends_ns)) - 1],
        "batch_end_ns": batch_end_ns,
        "train_begin_ns": made.begin_ns,
        "train_end_ns": made.end_ns,
        "sync_end_ns": now_ns,
        "batch_s": (batch_end_ns - begin_ns) / NS_PER_S,
        "train_s": (made.end_ns - made.begin_ns) / NS_PER_S,
        "step_s": (now_ns - loop.step_end_ns) / NS_PER_S,
        "staleness": [ages.get(age, 0) for age in range(max(ages) + 1)],
        "mixed": sum(sample.version_first != sample.version_last for sample in samples),
        "reward": fmean(sample.reward for sample in samples) if samples[0].response else None,
        "figures": {k: value for k, value in made.trained.figures.items() if math.isfinite(value)},
    }


def loop_row(loop: Loop) -> dict[str, object]:
    """Return the row of a whole loop, at its end."""
    took_s = (loop.step_end_ns - loop.begin_ns) / NS_PER_S
    totals, counts = loop.totals, loop.pilot.counts
    return {
        "step": loop.number,
        "policy": loop.name,
        "repeat": loop.repeat,
        "workload_seed": loop.workload_seed,
        "steps": totals.steps,
        "samples": totals.samples,
        "tokens": totals.tokens,
        "took_s": took_s,
        "samples_per_s": totals.samples / took_s if took_s else None,
        "switches_taken": counts.taken,
        "switches_refused": counts.refused,
        "switches_wasted": counts.wasted,
        "moves": counts.moves,
        "generation_bubble_pct": loop.bubbles.pct,
        "training_bubble_pct": 100 * max(0.0, 1 - loop.trainees.busy_ns / NS_PER_S / took_s)
        if took_s
        else None,
        "dropped": loop.rollouts.dropped,
        "staleness_max": totals.staleness_max,
        "digest": loop.digest,
    }


def pool_row(loop: Loop) -> dict[str, object]:
    """Return what the pool looks like now."""
    places = [p for p in loop.fleet.places.values() if not p.dead]
    told = [place.stats for place in places if place.stats]
    blocks = sum(stats.kv_blocks for stats in told)
    return {
        "step": loop.number,
        "policy": loop.name,
        "layout": str(loop.fleet.layout),
        "batch": loop.rollouts.asked - 1,
        "running": sum(stats.running for stats in told),
        "waiting": sum(stats.waiting for stats in told),
        "queued": loop.fleet.queued,
        "kv_use_pct": 100 * sum(s.kv_blocks_used for s in told) / blocks if blocks else None,
        "tokens": loop.fleet.ledger.tokens - loop.tokens_before,
    }
