"""The command line with a measure that only reckons: ``sweep_command.py MEASURE sweep FILE``."""

from __future__ import annotations

import sys

import sweep_measures

import harness.sweeps.measure
from harness.cli import main

if __name__ == "__main__":
    harness.sweeps.measure.measure = getattr(sweep_measures, sys.argv[1])
    sys.argv[:2] = ["harness"]
    sys.exit(main())
