"""What travels comes back, and what does not belong is named."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from harness.wire import codec
from harness.wire.messages import VERSION, Body, Failure, Hold, Message, RankSamples, Samples


def sent(body: Message, **fields: int) -> bytes:
    return codec.encode(body, run="r1", node="n0", epoch=1, seq=7, t_mono_ns=5, **fields)


def tampered(position: int, value: object) -> bytes:
    fields = msgspec.msgpack.decode(sent(Hold()))
    fields[position] = value
    return msgspec.msgpack.encode(fields)


def test_a_message_comes_back_as_it_was_sent() -> None:
    samples = RankSamples(rank=3, group=(0, 3), size_bytes=64, times_ns=(5, 6), wrong=None)
    envelope = codec.decode(sent(Samples(ranks=(samples,)), re=4, deadline_ns=9))
    assert (envelope.v, envelope.seq, envelope.re, envelope.deadline_ns) == (VERSION, 7, 4, 9)
    assert codec.decode_body(envelope) == Samples(ranks=(samples,))


def test_every_message_of_the_protocol_has_a_kind_of_its_own() -> None:
    kinds = [codec.kind_of(kind) for kind in get_args(Body)]
    assert len(set(kinds)) == len(kinds)
    assert "failure" in kinds


def test_a_body_encoded_once_serves_many_envelopes() -> None:
    body = codec.encode_body(Hold())
    data = codec.encode(body, kind="hold", run="", node="n1", epoch=1, seq=2, t_mono_ns=0)
    assert codec.decode_body(codec.decode(data)) == Hold()


def test_an_unknown_kind_is_named_with_both_versions() -> None:
    envelope = codec.decode(tampered(1, "levitate"))
    with pytest.raises(codec.UnknownKind, match=r"'levitate' from a peer of protocol 1\.0"):
        codec.decode_body(envelope)


def test_fields_that_a_newer_minor_version_adds_are_ignored() -> None:
    fields = msgspec.msgpack.decode(sent(Failure(error="E", text="t")))
    fields[-1]["hint"] = "new"
    fields.append("new")
    envelope = codec.decode(msgspec.msgpack.encode(fields))
    assert codec.decode_body(envelope) == Failure(error="E", text="t")


def test_another_major_version_still_decodes_so_that_it_can_be_refused_by_name() -> None:
    envelope = codec.decode(tampered(0, [2, 3]))
    assert not codec.compatible(envelope.v)
    assert codec.version_text(envelope.v) == "2.3"


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1", b"\x93\x01", b"\xc1" * 40])
def test_bytes_of_strangers_are_refused(data: bytes) -> None:
    with pytest.raises(codec.WireError, match="not a message of this protocol"):
        codec.decode(data)


def test_a_malformed_body_names_its_sender_and_field() -> None:
    envelope = codec.decode(tampered(1, "failure"))
    with pytest.raises(codec.WireError, match="malformed 'failure' message from n0"):
        codec.decode_body(envelope)


def test_a_message_too_large_to_travel_is_refused_before_it_is_sent() -> None:
    text = "x" * (codec.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(codec.WireError, match="exceeds"):
        sent(Failure(error="E", text=text))


def test_probes_and_echoes_carry_their_stamps_and_nothing_else() -> None:
    assert codec.parse_probe(codec.probe(-5)) == -5
    assert codec.parse_echo(codec.echo(1, 2**62, 3)) == (1, 2**62, 3)
    for wrong in (b"", codec.BEAT, codec.probe(1), codec.echo(1, 2, 3) + b"x"):
        with pytest.raises(codec.WireError):
            codec.parse_echo(wrong)
