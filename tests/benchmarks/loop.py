"""300 runs of the RL loop with faults, each drawn from a seed, in virtual time: do all hold?

Instances die and stall, syncs and loads fail, migrations are refused, trainers are slow or lose a
rank. Whatever happens, no sample may be lost, used twice, or older than the bound, and a run that
cannot go on must say why. ``python -m tests.benchmarks.loop --seed N`` replays one seed and prints
all of it; ``--first N --runs N`` runs others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

UNIT = Path(__file__).parents[1] / "unit"
RUNS = 300


def run(first: int = 0, runs: int = RUNS) -> dict[str, Any]:
    """Run seeds; returns how they ended, and those that did not hold."""
    ended: Counter[str] = Counter()
    broken: dict[int, str] = {}
    for seed in range(first, first + runs):
        try:
            _, _, reason, _ = _one(seed)
        except Exception as error:  # whatever it is, the others are to run
            broken[seed] = f"{type(error).__name__}: {error}"[:300]
        else:
            ended["well" if not reason else "with its reason"] += 1
    return {"runs": runs, "ended": dict(ended), "broken": broken, "held": not broken}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [
        f"{figures['runs']} runs: " + ", ".join(f"{n} {k}" for k, n in figures["ended"].items())
    ]
    lines += [
        f"seed {seed} broke: {text}\n  python -m tests.benchmarks.loop --seed {seed}"
        for seed, text in figures["broken"].items()
    ]
    return "\n".join([*lines, "held" if figures["held"] else "DID NOT HOLD"])


def _one(seed: int) -> Any:
    sys.path[:0] = [str(UNIT)] if str(UNIT) not in sys.path else []
    import rl_random  # noqa: PLC0415 - beside the unit tests, which use it too

    from harness.virtual import run_virtually  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        return run_virtually(rl_random.run(seed, Path(folder)))


def main() -> int:
    """Replay one seed, or run many."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.loop")
    parser.add_argument("--seed", type=int, help="replay this one and print all of it")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    if given.seed is None:
        figures = run(given.first, given.runs)
        sys.stdout.write(table(figures) + "\n")
        return 0 if figures["held"] else 1
    events, _, ended, happened = _one(given.seed)
    import rl_random  # noqa: PLC0415

    sys.stdout.write(rl_random.text_of(given.seed, events, ended, happened) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
