"""The SCPI codec: the unit's words, in any chunks and with any line end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.dialects import scpi
from drivers.errors import Garbled

REPLIES = ["(@1,2,3),(@19,18,22)", '0,"No error"', '"18"', "16,16", "(D,E,F)"]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.tuples(st.sampled_from(REPLIES), st.sampled_from(["\r", "\n", "\r\n"]))),
    st.lists(st.integers(0, 1000)),
)
def test_any_chunking_and_any_terminator_give_the_same_lines(
    lines: list[tuple[str, str]], cuts: list[int]
) -> None:
    data = "".join(text + end for text, end in lines).encode()
    reader = scpi.ReplyReader()
    found = [line for piece in cut(data, cuts) for line in reader.feed(piece)]
    assert found == [text for text, _ in lines]
    assert reader.partial == b""


@given(st.lists(st.tuples(st.integers(1, 512), st.integers(513, 1024)), max_size=40))
def test_a_map_that_is_written_is_read_again(circuits: list[tuple[int, int]]) -> None:
    assert scpi.parse_pairs(scpi.pairs(circuits)) == circuits


def test_the_unit_s_own_forms() -> None:
    assert scpi.pairs([(1, 17), (2, 18)]) == "(@1,2),(@17,18)"
    assert scpi.parse_pairs("(@),(@)") == []
    assert scpi.parse_powers("(-3.21,-60.00)") == [-3.21, -60.0]
    assert scpi.parse_list("(D,E,F)") == ["D", "E", "F"]
    assert scpi.parse_error('-222,"Data out of range;99"') == scpi.ErrorEntry(
        -222, "Data out of range;99"
    )
    assert scpi.parse_error("0").code == 0
    assert scpi.parse_size("16,16") == (16, 16)
    assert scpi.parse_peer('"18"') == 18
    assert scpi.parse_peer('""') is None
    assert scpi.parse_identity("Polatis,I-OST-24x24-LU1-DMHNS,002414,6.5.2.18") == (
        "Polatis",
        "I-OST-24x24-LU1-DMHNS",
        "002414",
        "6.5.2.18",
    )


@pytest.mark.parametrize(
    ("parse", "reply"),
    [
        (scpi.parse_pairs, "(@1,2),(@17)"),
        (scpi.parse_pairs, '0,"No error"'),
        (scpi.parse_powers, "(-3.21,dark)"),
        (scpi.parse_powers, "-3.21"),
        (scpi.parse_error, "\x9f\xe3~"),
        (scpi.parse_identity, "16,16"),
        (scpi.parse_identity, '0,"No error"'),
        (scpi.parse_identity, "P\xf6latis,a,b,c"),
        (scpi.parse_size, "16"),
        (scpi.parse_peer, '"x"'),
    ],
)
def test_what_is_not_scpi_is_garbled_and_shown(parse: object, reply: str) -> None:
    assert callable(parse)
    with pytest.raises(Garbled) as caught:
        parse(reply)
    assert repr(reply) in str(caught.value)
