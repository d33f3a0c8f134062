"""Moved to `harness.model.generated`."""

from harness.model.generated import REFERENCE, Numbers, bench_of

__all__ = ["REFERENCE", "Numbers", "bench_of"]
