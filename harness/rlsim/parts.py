"""A file of weights as a simulated hop carries it: in few parts, of however many buckets. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Parts(NamedTuple):
    """What is carried at once, in bytes, in this order.

    Of one bucket there is only `last`; of two, `first` and `last`.
    """

    first: int
    between: int
    full: int
    """The last one before `last`."""
    last: int
    """It may be shorter."""

    @classmethod
    def of(cls, size_bytes: int, bucket_bytes: int) -> Parts:
        """Return the parts of a file in buckets of such a size."""
        full = -(-size_bytes // bucket_bytes) - 1
        first, more = min(full, 1) * bucket_bytes, min(max(full - 1, 0), 1) * bucket_bytes
        before = full * bucket_bytes
        return cls(first, before - first - more, more, size_bytes - before)
