"""A rank's trace in MLCommons' Chakra schema, as it is written: protobuf, or JSON made of it.

The schema is mlcommons/chakra, ``schema/protobuf/et_def.proto`` (Apache-2.0), of which this takes

    GlobalMetadata   version 1, attr 2 (attr 1 in its first form, without a version)
    Node             id 1, name 2, type 3, ctrl_deps 4, data_deps 5, duration_micros 7, attr 10
    AttributeProto   name 1, and one of double 3, float 5, int32 7, int64 9, uint32 11, uint64 13,
                     sint32 15, sint64 17, fixed32 19, fixed64 21, sfixed32 23, sfixed64 25,
                     bool 27, bool_list 28, string 29; other lists and bytes are not looked at

A file is GlobalMetadata and then its nodes, each after its length, gzipped or not. The JSON is that
of ``chakra_jsonizer``: the same messages as protobuf's own JSON, one after another. What is neither
raises `ValueError`. Pure.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.rlsim.traces.protobuf import Field, fields, fixed, messages, signed, zigzag

TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
    "STORAGE_NODE",
    "BATCH_NODE",
    "CHECKPOINT_NODE",
)
"""By number, as in enum NodeType."""
GZIP = b"\x1f\x8b"
BEFORE = "no GlobalMetadata comes first: a trace of a Chakra schema before 0.0.4, or none at all"

Value = float | bool | str | tuple[bool, ...]
Attributes = Mapping[str, Value]


class Record(NamedTuple):
    """One node as it is written. `type` is a word of enum NodeType, or a number that has none."""

    id: int
    name: str
    type: str
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    duration_us: int
    attributes: Attributes


class Recorded(NamedTuple):
    """One rank's file. `version`: "" where it does not say."""

    version: str
    records: tuple[Record, ...]


# -- protobuf --------------------------------------------------------------------------------------


def of_protobuf(data: bytes) -> Recorded:
    """Read a file of messages."""
    if data.startswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"not gzip, though it begins so: {error}") from error
    each = messages(data)
    head = next(each, None)
    if head is None:
        raise ValueError("empty")
    return Recorded(_version(head), tuple(map(_record, each)))


def _version(head: bytes) -> str:
    stated, attributes = "", []
    for field in fields(head):
        if field.number not in (1, 2) or not isinstance(field.value, bytes):
            raise ValueError(BEFORE)
        if field.number == 1 and _VERSION.fullmatch(field.value):
            stated = field.text()
        else:
            attributes.append(field.content())
    try:
        schema = dict(filter(None, map(_attribute, attributes))).get("schema", "")
    except ValueError as error:
        raise ValueError(BEFORE) from error
    return stated or _of_schema(str(schema))


_VERSION = re.compile(rb"[\w.+-]*")


def _of_schema(schema: str) -> str:
    """Return the version in what PyTorch calls a schema: ``1.1.1-chakra.0.0.4``."""
    return schema.rpartition("chakra.")[2]


def _record(data: bytes) -> Record:
    id_ = kind = duration_us = 0
    name = ""
    ctrl: list[int] = []
    deps: list[int] = []
    attributes: dict[str, Value] = {}
    for field in fields(data):
        match field.number:
            case 1:
                id_ = field.whole()
            case 2:
                name = field.text()
            case 3:
                kind = field.whole()
            case 4:
                ctrl += field.wholes()
            case 5:
                deps += field.wholes()
            case 7:
                duration_us = field.whole()
            case 10:
                attributes |= filter(None, (_attribute(field.content()),))
    return Record(id_, name, _type(kind), tuple(ctrl), tuple(deps), duration_us, attributes)


def _type(number: int) -> str:
    return TYPES[number] if number < len(TYPES) else str(number)


def _attribute(data: bytes) -> tuple[str, Value] | None:
    """Return an attribute and its value; None where it has none, or one of another kind."""
    name, value = "", None
    for field in fields(data):
        if field.number == 1:
            name = field.text()
        elif field.number in _VALUES:
            value = _VALUES[field.number](field)
    return None if value is None else (name, value)


_VALUES: dict[int, Callable[[Field], Value]] = {
    3: lambda field: fixed("d", field.content()),
    5: lambda field: fixed("f", field.content()),
    7: lambda field: signed(field.whole()),
    9: lambda field: signed(field.whole()),
    11: Field.whole,
    13: Field.whole,
    15: lambda field: zigzag(field.whole()),
    17: lambda field: zigzag(field.whole()),
    19: lambda field: fixed("I", field.content()),
    21: lambda field: fixed("Q", field.content()),
    23: lambda field: fixed("i", field.content()),
    25: lambda field: fixed("q", field.content()),
    27: lambda field: bool(field.whole()),
    28: lambda field: _bools(field.content()),
    29: Field.text,
}


def _bools(data: bytes) -> tuple[bool, ...]:
    return tuple(bool(one) for field in fields(data) for one in field.wholes())


# -- JSON ------------------------------------------------------------------------------------------


def of_json(data: bytes) -> Recorded:
    """Read a file of JSON objects, one after another."""
    tables = list(_objects(data.decode()))
    if not tables:
        raise ValueError("empty")
    head, *nodes = tables
    if "nodes" in head:
        raise ValueError(
            "a host trace of PyTorch, not a Chakra trace: chakra_trace_link and chakra_converter"
            " make one of it"
        )
    if "workload_graph" in head:
        raise ValueError("a workload_graph of ASTRA-sim's JSON feeder: chakra_jsonizer's is read")
    if "type" in head or "id" in head:
        raise ValueError(BEFORE)
    attributes = _attributes(head)
    version = str(head.get("version") or _of_schema(str(attributes.get("schema", ""))))
    return Recorded(version, tuple(_of_table(node, place) for place, node in enumerate(nodes)))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            found, at = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError("not JSON: nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError("expected JSON objects, one after another")  # noqa: TRY004 - of the data, not the program
        yield found


def _of_table(node: Mapping[str, Any], place: int) -> Record:
    def whole(key: str) -> int:
        return int(node.get(key, 0))

    def wholes(key: str) -> tuple[int, ...]:
        return tuple(map(int, node.get(key, ())))

    try:
        kind = node.get("type", 0)
        return Record(
            whole("id"),
            str(node.get("name", "")),
            _type(kind) if isinstance(kind, int) else str(kind),
            wholes("ctrlDeps"),
            wholes("dataDeps"),
            whole("durationMicros"),
            _attributes(node),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"object {place + 2}: not a node as chakra_jsonizer writes it") from error


def _attributes(table: Mapping[str, Any]) -> Attributes:
    found: dict[str, Value] = {}
    for attribute in table.get("attr", ()):
        for key, value in attribute.items():
            if key == "boolList":
                found[attribute["name"]] = tuple(map(bool, value.get("values", ())))
            elif key == "stringVal":
                found[attribute["name"]] = str(value)
            elif key in ("doubleVal", "floatVal"):
                found[attribute["name"]] = float(value)
            elif key == "boolVal":
                found[attribute["name"]] = bool(value)
            elif key.endswith("Val") and key != "bytesVal":
                found[attribute["name"]] = int(value)  # 64 bits are written as text
    return found


def by_content(files: Sequence[tuple[int, bytes]]) -> dict[bytes, list[int]]:
    """Return ranks by what their files hold: those that do the same are read once."""
    found: dict[bytes, list[int]] = {}
    for rank, data in files:
        found.setdefault(data, []).append(rank)
    return found
