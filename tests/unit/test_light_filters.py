"""What is put on a port is what is read from it: the kernel answers in the same layout."""

import socket
import struct

from drivers.emulators.light import filters
from drivers.emulators.light.filters import Filter
from drivers.netlink import attribute


def test_a_redirection_is_read_back_with_both_its_interfaces() -> None:
    assert filters.parse_filter(filters.put_redirect(7, 12).body) == Filter(7, None, 12)


def test_our_program_is_known_by_its_name() -> None:
    def answer(name: bytes) -> bytes:
        options = attribute(7, name + b"\0") + attribute(11, struct.pack("=I", 98))
        place = 1 << 16 | socket.htons(3)
        head = struct.pack("=B3xiIII", 0, 7, 1, 0xFFFFFFF2, place)
        return head + attribute(1, b"bpf\0") + attribute(2, options)

    assert filters.parse_filter(answer(filters.FILTER_NAME)) == Filter(7, 98, None)
    assert filters.parse_filter(answer(b"of somebody else")) is None


def test_a_filter_at_another_preference_is_not_ours() -> None:
    body = bytearray(filters.put_redirect(7, 12).body)
    body[18] = 9  # the preference, in the upper half of tcm_info
    assert filters.parse_filter(bytes(body)) is None
