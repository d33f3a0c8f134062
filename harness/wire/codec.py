"""Bytes on the wire and back: one msgpack array a message, a fixed struct for a clock probe.

Pure: no sockets, no clock. An envelope of another major version still decodes (so that both sides
can name both versions); trailing fields that a newer minor version adds are ignored.

Raises `WireError` for bytes that are no message of ours and `UnknownKind` for a kind that this
version does not know, which an agent answers with a typed `Failure`.
"""

from __future__ import annotations

import struct
from typing import get_args

import msgspec

from harness.errors import InfrastructureError
from harness.wire.generation import GenerationBody
from harness.wire.messages import VERSION, Body, Envelope, Message
from harness.wire.training import TrainingBody
from harness.wire.weights import WeightsBody

MAX_MESSAGE_BYTES = 64 << 20
"""Both sides drop a peer that sends more (samples of a long run fit many times over)."""

_KINDS: dict[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for body in (Body, GenerationBody, TrainingBody, WeightsBody)
    for kind in get_args(body)
}
_BODIES = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in _KINDS.items()}
_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_ENCODER = msgspec.msgpack.Encoder()


class WireError(InfrastructureError):
    """Bytes that are no message of ours, or a message that must not travel."""


class UnknownKind(WireError):
    """A kind that this version of the protocol does not know."""


def version_text(version: tuple[int, int]) -> str:
    """Return ``major.minor``."""
    return f"{version[0]}.{version[1]}"


def compatible(version: tuple[int, int]) -> bool:
    """Tell whether a peer of `version` can be understood: the majors must be equal."""
    return version[0] == VERSION[0]


def encode_body(body: Message) -> bytes:
    """Return the body's msgpack, to be put into any number of envelopes."""
    return _ENCODER.encode(body)


def encode(
    body: Message | bytes,
    *,
    kind: str = "",
    run: str,
    node: str,
    epoch: int,
    seq: int,
    re: int | None = None,
    t_mono_ns: int,
    deadline_ns: int = 0,
) -> bytes:
    """Return a whole message. `body` may be bytes of `encode_body`, then `kind` names it.

    Raises `WireError` when it would exceed `MAX_MESSAGE_BYTES`.
    """
    if isinstance(body, Message):
        kind, body = kind_of(body), encode_body(body)
    data = _ENCODER.encode(
        Envelope(
            v=VERSION,
            kind=kind,
            run=run,
            node=node,
            epoch=epoch,
            seq=seq,
            re=re,
            t_mono_ns=t_mono_ns,
            deadline_ns=deadline_ns,
            body=msgspec.Raw(body),
        )
    )
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {kind!r} message of {len(data)} bytes exceeds the {MAX_MESSAGE_BYTES} bytes that "
            "travel: ask for fewer iterations at once"
        )
    return data


def kind_of(body: Message) -> str:
    """Return the tag that names the body's type on the wire."""
    return str(body.__struct_config__.tag)


def decode(data: bytes) -> Envelope:
    """Return the envelope; its body is decoded by `decode_body`. Raises `WireError`."""
    try:
        return _ENVELOPE.decode(data)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message of this protocol ({error})") from error


def decode_body(envelope: Envelope) -> Message:
    """Return the body. Raises `UnknownKind`, or `WireError` where its content does not fit."""
    decoder = _BODIES.get(envelope.kind)
    if decoder is None:
        raise UnknownKind(
            f"unknown message kind {envelope.kind!r} from a peer of protocol "
            f"{version_text(envelope.v)}; this side speaks {version_text(VERSION)}"
        )
    try:
        return decoder.decode(envelope.body)
    except msgspec.DecodeError as error:
        raise WireError(f"malformed {envelope.kind!r} message from {envelope.node}: {error}") from (
            error
        )


# -- the pulse: heartbeat and clock probe in one ------------------------------------------------

_PROBE = struct.Struct("<cq")
_ECHO = struct.Struct("<cqqq")
BEAT = b"B"
"""Agent to coordinator: I am here (before the first probe, and whenever probes stay away)."""


def probe(t1_ns: int) -> bytes:
    """Coordinator to agent: I am here, and it is `t1_ns` on my clock."""
    return _PROBE.pack(b"P", t1_ns)


def parse_probe(data: bytes) -> int:
    """Return the probe's `t1_ns`. Raises `WireError`."""
    return _fields(_PROBE, b"P", data)[0]


def echo(t1_ns: int, t2_ns: int, t3_ns: int) -> bytes:
    """Agent to coordinator: your probe of `t1_ns` came at `t2_ns` and this left at `t3_ns`."""
    return _ECHO.pack(b"E", t1_ns, t2_ns, t3_ns)


def parse_echo(data: bytes) -> tuple[int, int, int]:
    """Return ``(t1_ns, t2_ns, t3_ns)``. Raises `WireError`."""
    t1, t2, t3 = _fields(_ECHO, b"E", data)
    return t1, t2, t3


def _fields(form: struct.Struct, letter: bytes, data: bytes) -> tuple[int, ...]:
    if len(data) != form.size or data[:1] != letter:
        raise WireError(f"not a pulse message: {len(data)} bytes beginning {data[:8]!r}")
    return tuple(form.unpack(data)[1:])
