"""The one place where chance comes from. Everything else is handed a generator."""

from __future__ import annotations

import random


def unpredictable() -> random.Random:
    """Return a generator for names that must only be unique; never for results."""
    return random.SystemRandom()
