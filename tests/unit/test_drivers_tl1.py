"""The TL1 codec: frames, denials, events and prompts, however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.dialects import tl1
from drivers.errors import Misuse

STREAM = (
    "Legal notice; no trespassing\r\n>"
    "RTRV-PATCH:::7:;\r\n"
    "\r\n\n   agg0 26-01-31 12:00:00\r\n"
    "A  12 REPT EVT PATCH\r\n"
    '   "1,17:CONNECTED"\r\n'
    ";\r\n>"
    '\r\n\n   "North Hall" 26-01-31 12:00:01\r\n'
    "M  7 COMPLD\r\n"
    '   "1,17"\r\n'
    '   "2,18;odd"\r\n'
    "   /* two circuits\r\n"
    "; not the end */\r\n"
    ";\r\n>"
    "\r\n\n   ( nil ) 2026-01-31 12:00:02\r\n"
    "M  8 DENY\r\n"
    "   IDNV\r\n"
    "   /* Invalid OXC port: 1000 */\r\n"
    ";\r\n<"
    "\r\n\n    26-01-31 12:00:03\r\n"
    "*C 13 REPT ALM EQPT\r\n"
    ";\r\nagent>"
    "Not logged in\r\n"
    "\r\n\n   agg0 26-01-31 12:00:04\r\n"
    "M  9 PRTL\r\n"
    "   SROF\r\n"
    "   /* 1,17 */\r\n"
    ";"
)
STAMP = "26-01-31 12:00:0"
FRAMES = [
    tl1.Stray("Legal notice; no trespassing"),
    tl1.Stray("RTRV-PATCH:::7:;"),
    tl1.Event("A", "12", "REPT EVT PATCH", ("1,17:CONNECTED",), sid="agg0", stamp=STAMP + "0"),
    tl1.Response(
        "7",
        "COMPLD",
        ("1,17", "2,18;odd"),
        text="two circuits ; not the end",
        sid="North Hall",
        stamp=STAMP + "1",
    ),
    tl1.Response(
        "8", "DENY", error="IDNV", text="Invalid OXC port: 1000", stamp="20" + STAMP + "2"
    ),
    tl1.Event("*C", "13", "REPT ALM EQPT", stamp=STAMP + "3"),
    tl1.Stray("Not logged in"),
    tl1.Response("9", "PRTL", error="SROF", text="1,17", sid="agg0", stamp=STAMP + "4"),
]


def test_the_unit_s_frames_are_read() -> None:
    assert tl1.FrameParser().feed(STREAM.encode()) == FRAMES


@given(st.lists(st.integers(0, len(STREAM)), max_size=60))
def test_any_chunking_gives_the_same_frames(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = tl1.FrameParser()
    found = []
    for start, end in itertools.pairwise(edges):
        found += parser.feed(STREAM[start:end].encode())
    assert found == FRAMES


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_noise_neither_raises_nor_depends_on_its_chunks(noise: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(c % (len(noise) + 1) for c in cuts), len(noise)]
    parser = tl1.FrameParser()
    found = [f for a, b in itertools.pairwise(edges) for f in parser.feed(noise[a:b])]
    assert found == tl1.FrameParser().feed(noise)


@given(st.binary(max_size=40).filter(lambda b: b";" not in b and b"/*" not in b))
def test_after_noise_on_its_own_line_the_next_frame_is_read(noise: bytes) -> None:
    reply = b"\r\n\n   agg0 26-01-31 12:00:04\r\nM  1 COMPLD\r\n;\r\n>"
    frames = tl1.FrameParser().feed(noise + reply)
    assert tl1.Response("1", "COMPLD", sid="agg0", stamp=STAMP + "4") in frames


def test_a_frame_is_complete_at_its_semicolon_without_a_line_end() -> None:
    parser = tl1.FrameParser()
    assert parser.feed(b"\r\n\n   s 26-01-31 12:00:04\r\nM  1 COMPLD\r\n") == []
    assert len(parser.feed(b";")) == 1


def test_delay_and_retrieve_are_not_final() -> None:
    codes = {code: tl1.Response("1", code).final for code in tl1.COMPLETION_CODES}
    assert codes == {"COMPLD": True, "DENY": True, "PRTL": True, "DELAY": False, "RTRV": False}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (tl1.Request("RTRV-HDR"), "RTRV-HDR:::5:;"),
        (tl1.Request("ENT-PATCH", tl1.pair_aid([(1, 193)])), "ENT-PATCH::1,193:5:;"),
        (
            tl1.Request("ENT-PATCH", tl1.pair_aid([(1, 193), (2, 194), (3, 195)])),
            "ENT-PATCH::1&&3,193&&195:5:;",
        ),
        (
            tl1.Request("ENT-PATCH", tl1.pair_aid([(1, 193), (2, 195), (3, 194)])),
            "ENT-PATCH::1&2&3,193&195&194:5:;",
        ),
        (tl1.Request("DLT-PATCH", tl1.aid([4])), "DLT-PATCH::4:5:;"),
        (
            tl1.Request("RTRV-EQPT", "SYSTEM", ("", "", "PARAMETER=SIZE")),
            "RTRV-EQPT::SYSTEM:5:::PARAMETER=SIZE;",
        ),
        (
            tl1.Request("ACT-USER", "root", ("", tl1.quote("pa:ss"))),
            'ACT-USER::root:5::"pa:ss";',
        ),
    ],
)
def test_commands_are_written_as_the_unit_wants_them(request_: tl1.Request, text: str) -> None:
    assert request_.command("5") == text


def test_a_value_that_cannot_be_carried_is_refused() -> None:
    with pytest.raises(Misuse):
        tl1.quote('say "hi"')
