"""What a wrong baud rate does to bytes, and which reply a fault strikes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.emulators.config import Faults
from drivers.emulators.faces import Answer
from drivers.emulators.faults import Fate, Fates
from drivers.emulators.model import Change
from drivers.emulators.servers.wire import byte_ns, received

SPEEDS = st.sampled_from([9600, 19200, 38400, 57600, 115200])
CHANGE = Answer(changes=(Change(),))
QUERY = Answer(b"(@),(@)\r\n", is_query=True)


@given(st.binary(max_size=40), SPEEDS)
def test_a_small_difference_of_speed_does_no_harm(data, baud):
    assert received(data, baud, baud) == data
    assert received(data, baud, baud + baud // 100) == data


@given(SPEEDS, SPEEDS)
def test_another_speed_reads_as_something_else(sent, read):
    text = b":OXC:SWIT:CONN:STAT?\r\n"
    assert (received(text, sent, read) == text) == (sent == read)


def test_a_slow_sender_reads_as_more_bytes_and_a_fast_one_as_fewer():
    assert len(received(b"U" * 8, 9600, 38400)) > 8 > len(received(b"U" * 8, 38400, 9600)) > 0


def test_a_byte_is_ten_bit_times():
    assert byte_ns(38400) == 260_416


@pytest.mark.parametrize(
    ("faults", "answers", "fates"),
    [
        (Faults(), [CHANGE, QUERY], [Fate.SEND, Fate.SEND]),
        (Faults(die_on_command=2), [CHANGE, QUERY, CHANGE], [Fate.SEND, Fate.SEND, Fate.DIE]),
        (Faults(lose_reply=1), [QUERY, CHANGE, CHANGE], [Fate.SEND, Fate.LOSE, Fate.SEND]),
        (Faults(cut_reply=2), [QUERY, CHANGE, QUERY, QUERY],
         [Fate.SEND, Fate.SEND, Fate.CUT, Fate.SEND]),
        (Faults(die_on_command=2), [Answer(changes=(Change(), Change(), Change()))], [Fate.DIE]),
    ],
)  # fmt: skip
def test_faults_strike_the_reply_they_name_and_no_other(faults, answers, fates):
    judge = Fates(faults)
    assert [judge.of(answer) for answer in answers] == fates
