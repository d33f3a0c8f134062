"""Counters of network devices, as the kernel lists them."""

from agents.probe import counters

LISTED = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:       0       0    0    0    0     0          0         0        0       0    0    0    0
    u1: 1500500    1001    0    0    0     0          0         0     9000       6    0    0    0
u2:12 1 0 0 0 0 0 0 34 1 0 0 0 0 0 0
"""


def test_bytes_received_and_sent_are_told_apart_by_device() -> None:
    received, sent = counters(LISTED)
    assert received == {"lo": 0, "u1": 1_500_500, "u2": 12}
    assert sent == {"lo": 0, "u1": 9000, "u2": 34}
