"""What a UART reads when the other end sends at another speed.

Pure. The sender's 8N1 waveform (idle high, start bit low, eight data bits from the lowest, stop bit
high) is sampled as a receiver does: from each falling edge, in the middle of each of its own bits.
At equal speeds that gives the bytes back.
"""

from __future__ import annotations

BITS = 10
"""Bit times a byte takes: start, eight data bits, stop."""


def byte_ns(baud: int) -> int:
    """Return the time one byte takes at `baud`, in ns."""
    return BITS * 1_000_000_000 // baud


def received(data: bytes, sent_baud: int, read_baud: int) -> bytes:
    """Return the bytes that a receiver at `read_baud` makes of `data` sent at `sent_baud`."""
    if sent_baud == read_baud:
        return data
    levels = [bit for byte in data for bit in (0, *((byte >> i) & 1 for i in range(8)), 1)]

    def level(half_bits: int) -> int:
        # Time is counted in half bits of the reader; integers keep it exact.
        index = half_bits * sent_baud // (2 * read_baud)
        return levels[index] if index < len(levels) else 1

    out = bytearray()
    now, before, end = 0, 1, len(levels) * 2 * read_baud // sent_baud
    while now <= end:
        here = level(now)
        if before == 1 and here == 0:
            out.append(sum(level(now + 3 + 2 * i) << i for i in range(8)))
            now += 2 * BITS - 1
            here = level(now)
        before = here
        now += 1
    return bytes(out)
