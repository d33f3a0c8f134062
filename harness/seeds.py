"""The one place where chance comes from. Everything else is handed a generator."""

from __future__ import annotations

import random


def unpredictable() -> random.Random:
    """Return a generator for names that must only be unique; never for results."""
    return random.SystemRandom()


def seeded(seed: int, purpose: str) -> random.Random:
    """Return the generator of one purpose in a run: the same for the same seed, on any machine."""
    return random.Random(f"{seed} {purpose}")  # noqa: S311 - choices of a run, no secret
