"""Benchmarks: ``python -m tests.benchmarks NAME [--json]``.

Each module has ``run() -> dict`` (figures and marks, JSON-ready) and ``table(figures) -> str``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = {
    "collective": "all-reduce of the harness against a bare torch loop, on loopback",
    "coordinator": "barrier and one command to 64 agents; round trip to four",
    "circuits": "all-reduce over circuits and electrical, harness and bare; needs root",
    "reconfigure": "our overhead for 1, 4 and 16 pairs moved; needs root",
    "pacing": "paced engine: real time against the profile's, and what pacing costs",
    "switches": "200 switches of layouts and 2,000 migrations, paced: is a token lost or doubled?",
    "leaks": "50 cycles of switches: files, threads, processes, memory early and late",
    "vllm": "real vLLM on CPU: switches under load, tokens compared, rebuild against restart",
    "calibration": "paced at vLLM's measured speed against vLLM itself, CPU build",
    "sync": "weights down chains and trees of porters against a bare broadcast; needs root",
    "training": "paced training: a step against formula and bare collectives; announcing",
    "learns": "the real trainer on its task, drawing by itself: does the reward rise, how fast?",
    "loop": "300 runs of the RL loop with faults, in virtual time: is a sample lost or too old?",
    "balancer": "the fast loop: one decision for 64 instances and 16,384 requests",
    "policies": "samples/s under every policy, in virtual time; has options of its own",
    "forecast": "remaining work: errors against simpler forecasts on all workloads; time",
    "planner": "the slow loop: time of a look at 64 instances; distance to the exact optimum",
    "circuits_planner": "circuits on matrices: time at 256 nodes x 32 planes; beside the optimum",
    "fluid": "flows over shared links beside SimGrid: equal, and how much faster; the first run",
    "fabric_planner": "circuits on uplinks and trunks: time on large fabrics; beside the optimum",
    "fabric_cases": "the RL loop over every fabric, in several cases; needs root, half an hour",
    "fabric_decision": "one decision about circuits, the course of a step, a correction: time",
    "tors": "one apply by each ToR driver beside a bare ip; needs root",
    "two_tier_loss": "packets and goodput lost to changes of circuits across pods; needs root",
    "scale": "one RL step of 64 to 8,192 GPUs, simulated: time, memory, and how they grow",
    "agreement": "simulations beside the emulated bench, on what was not fitted; root, 20 minutes",
    "nccl_tables": "collective times against public NCCL tables: sizes and GPU counts held out",
    "light": "map updates, dark times on packets, throughput, steering; needs root",
}


def main() -> int:
    about = "\n".join(f"  {name:14} {text}" for name, text in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        epilog=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="figures as JSON, nothing else")
    given = parser.parse_args()
    benchmark = importlib.import_module(f"tests.benchmarks.{given.name}")
    figures = benchmark.run()
    sys.stdout.write((json.dumps(figures) if given.json else benchmark.table(figures)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
