"""Traces as they are read: our JSON with its paths, and Chakra's files, byte for byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_bench import SCENARIOS, compute, reduce, trace

from harness.errors import BadFile, UsageError
from harness.rlsim.traces.checks import checked
from harness.rlsim.traces.json_trace import dump, parse, parse_ranges
from harness.rlsim.traces.model import Collective, Compute, Mark, Memory, Recv, Send, ranges
from harness.rlsim.traces.protobuf import fields, varint
from harness.rlsim.traces.reading import read
from harness.rlsim.traces.record import of_json, of_protobuf

GOLDEN = bytes.fromhex(
    "260a05302e302e34121d0a06736368656d61ea0112312e312e312d6368616b72612e302e302e349d021209616c"
    "6c207479706573180152110a06646f75626c6519000000000000f83f520c0a05666c6f61742d000000bf52120a"
    "05696e74333238fdffffffffffffffff0152120a05696e7436344896d2bf9adbffffffff01520a0a0675696e74"
    "3332580752130a0675696e7436346881808080808080808001520a0a0673696e743332780952100a0673696e74"
    "36348801ffffffffff3f520f0a07666978656433329d010900000052130a0766697865643634a9010a00000000"
    "00000052100a087366697865643332bd01f5ffffff52140a087366697865643634c901f4ffffffffffffff5209"
    "0a04626f6f6cd8010152120a09626f6f6c5f6c697374e201040a020100520c0a06737472696e67ea010178520b"
    "0a056279746573fa01017919080112056c617965721804220100300538dc0b42040a025b5d4008ac021203616c"
    "6c18072201012a020001520d0a09636f6d6d5f747970654802520f0a09636f6d6d5f73697a6568808040520d0a"
    "0770675f6e616d65ea010130"
)
"""Written by Google's protobuf with Chakra's schema: GlobalMetadata, and three nodes."""


# -- our form --------------------------------------------------------------------------------------


def said(data: object) -> list[str]:
    with pytest.raises(BadFile) as caught:
        parse(json.dumps(data).encode(), "t.json")
    return caught.value.problems


def a_file(**changes: Any) -> dict[str, Any]:
    programs = [{"ranks": "0-1", "nodes": [compute(1), reduce(2)]}]
    return {"schema": "rlsim-trace/1", "programs": programs, **changes}


def test_every_slip_of_form_is_told_at_once_with_its_path() -> None:
    node = {"kind": "collective", "id": 1, "op": "all_reduced", "byts": 4}
    program = {"ranks": "0", "nodes": [node, {"kind": "kernel", "id": 2}], "rank": 3}
    problems = said(a_file(programs=[program], groups={"tp": {"size": "two"}}))
    told = "\n".join(problems)
    assert "programs[0].nodes[0].byts: unknown key; did you mean 'bytes'?" in told
    assert "programs[0].nodes[0].op: 'all_reduced' is not one of" in told
    assert "programs[0].nodes[1].kind: 'kernel' is not one of" in told
    assert "programs[0].rank: unknown key" in told
    assert "groups.tp.size: expected a whole number, found text" in told


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"groups": {"tp": {"size": 3}}}, "groups.tp: size 3 does not divide 2 ranks"),
        ({"groups": {"dp": {"size": 2, "stride": 2}}}, "size 2 x stride 2 = 4 does not divide 2"),
        ({"groups": {"x": {"size": 2, "ranks": [[0]]}}}, "groups.x: expected ranks, or size"),
        ({"groups": {"x": {"size": 0}}}, "groups.x: expected a size and a stride of 1 or more"),
        ({"programs": [{"ranks": "1-0", "nodes": []}]}, "programs[0].ranks: '1-0' is not a rank"),
        ({"schema": "rlsim-trace/2"}, "schema: 'rlsim-trace/2' is not one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert problem in said(a_file(**changes))[0]


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"schema": "rlsim-trace/1"', b"\xff\xfe"])
def test_what_is_no_such_file_is_a_bad_file(data: bytes) -> None:
    with pytest.raises(BadFile):
        parse(data, "t.json")


def test_groups_of_a_size_and_a_stride_are_blocks_and_columns() -> None:
    found = trace(
        {"0-7": [reduce(1, group="dp")]}, {"tp": {"size": 4}, "dp": {"size": 2, "stride": 4}}
    )
    assert found.groups["tp"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.groups["dp"] == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(st.sets(st.integers(0, 200), min_size=1).map(sorted))
def test_ranks_are_read_as_they_are_told(ranks: list[int]) -> None:
    assert parse_ranges(ranges(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    "path", sorted((SCENARIOS / "traces").glob("*.json")), ids=lambda p: p.stem
)
def test_every_trace_of_the_house_asks_a_question_and_is_sound(path: Path) -> None:
    found = read(path)
    assert found.question.endswith("?")
    assert checked(found).meetings.all
    assert parse(dump(found).encode(), str(path)) == found, "what is written is read as it was"


# -- Chakra ----------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def field(place: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return number(place << 3) + number(value % 2**64)
    data = value.encode() if isinstance(value, str) else value
    return number(place << 3 | 2) + number(len(data)) + data


def attribute(name: str, value: int | str, kind: int = 9) -> bytes:
    return field(10, field(1, name) + field(29 if isinstance(value, str) else kind, value))


def node(id_: int, kind: int, *attributes: bytes, deps: tuple[int, ...] = (), us: int = 0) -> bytes:
    named = field(1, id_) + field(2, f"op{id_}") + field(3, kind)
    waits = b"".join(field(5, dep) for dep in deps)  # one by one: packed is what GOLDEN has
    return named + waits + field(7, us) + b"".join(attributes)


def file(*messages: bytes, version: str = "0.0.4") -> bytes:
    return b"".join(number(len(one)) + one for one in (field(1, version), *messages))


def written(folder: Path, *ranks: bytes, ending: str = "et") -> Path:
    for rank, data in enumerate(ranks):
        (folder / f"llm.{rank}.{ending}").write_bytes(data)
    return folder / f"llm.0.{ending}"


def refusal(folder: Path, *ranks: bytes) -> str:
    with pytest.raises(BadFile) as caught:
        read(written(folder, *ranks))
    return "\n".join(caught.value.problems)


def test_what_google_writes_is_read_field_by_field() -> None:
    found = of_protobuf(GOLDEN)
    assert found.version == "0.0.4"
    every, comp, coll = found.records
    assert every.attributes == {
        "double": 1.5, "float": -0.5, "int32": -3, "int64": -9876543210, "uint32": 7,
        "uint64": 2**63 + 1, "sint32": -5, "sint64": -(2**40), "fixed32": 9, "fixed64": 10,
        "sfixed32": -11, "sfixed64": -12, "bool": True, "bool_list": (True, False), "string": "x",
    }  # fmt: skip
    assert (comp.id, comp.name, comp.type) == (1, "layer", "COMP_NODE")
    assert (comp.duration_us, comp.ctrl_deps) == (1500, (0,))
    assert (coll.id, coll.data_deps, coll.ctrl_deps) == (300, (0, 1), (1,))
    assert coll.attributes == {"comm_type": 2, "comm_size": 1 << 20, "pg_name": "0"}
    assert of_protobuf(gzip.compress(GOLDEN)) == found


def test_json_of_the_same_messages_is_read_alike() -> None:
    tables = [
        {"version": "0.0.4"},
        {"id": "1", "name": "layer", "type": "COMP_NODE", "durationMicros": "1500"},
        {
            "id": "300", "name": "all", "type": "COMM_COLL_NODE", "dataDeps": ["0", "1"],
            "ctrlDeps": ["1"],
            "attr": [
                {"name": "comm_type", "int64Val": "2"},
                {"name": "comm_size", "uint64Val": "1048576"},
                {"name": "pg_name", "stringVal": "0"},
            ],
        },
    ]  # fmt: skip
    found = of_json("\n".join(json.dumps(table, indent=2) for table in tables).encode())
    assert found.records[1] == of_protobuf(GOLDEN).records[2]


def test_each_kind_of_node_becomes_what_it_means(tmp_path: Path) -> None:
    size, tag = attribute("comm_size", 64), attribute("comm_tag", 7)
    first = file(
        node(0, 1),
        node(1, 4, attribute("is_cpu_op", 1, kind=27), us=3),
        node(2, 4, attribute("num_ops", 9), attribute("tensor_size", 8, kind=13)),
        node(3, 2, attribute("tensor_size", 512, kind=13)),
        node(4, 7, attribute("comm_type", 2), attribute("comm_size", 64, kind=13), deps=(1, 2)),
        node(5, 7, attribute("comm_type", 9)),
        node(6, 5, size, tag, attribute("comm_dst", 1, kind=7)),
    )
    second = file(
        node(4, 7, attribute("comm_type", 2), size),
        node(5, 7, attribute("comm_type", 9)),
        node(6, 6, size, tag, attribute("comm_src", 0, kind=7)),
    )
    found = read(written(tmp_path, first, second))
    mark, cpu, flops, load, gather, barrier, sent = found.programs[0].nodes
    assert isinstance(mark, Mark)
    assert isinstance(cpu, Compute)
    assert (cpu.duration_ns, cpu.on) == (3000, "cpu")
    assert isinstance(flops, Compute)
    assert (flops.duration_ns, flops.flops, flops.bytes) == (None, 9, 8)
    assert isinstance(load, Memory)
    assert (load.to, load.bytes) == ("load", 512)
    assert isinstance(gather, Collective)
    assert (gather.op, gather.bytes, gather.data_deps) == ("all_gather", 128, (1, 2))
    assert isinstance(barrier, Collective)
    assert (barrier.op, barrier.bytes) == ("all_reduce", 0)
    assert isinstance(sent, Send)
    assert (sent.peer, sent.bytes, sent.tag) == (1, 64, 7)
    assert isinstance(got := found.programs[1].nodes[2], Recv)
    assert got.peer == 0


def test_ranks_whose_files_are_the_same_share_a_program(tmp_path: Path) -> None:
    same = file(node(1, 4, us=5))
    found = read(written(tmp_path, same, file(node(1, 4, us=6)), same))
    assert [program.ranks for program in found.programs] == [(0, 2), (1,)]
    assert read(tmp_path / "llm") == found, "by what the names of its files begin with"


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (node(7, 8), "node 7 'op7': type STORAGE_NODE is not supported"),
        (node(7, 0), "type INVALID_NODE is not supported"),
        (node(7, 99), "type 99 is not supported"),
        (node(7, 7, attribute("comm_size", 4)), "no attribute comm_type"),
        (node(7, 7, attribute("comm_type", 0)), "no attribute comm_size"),
        (node(7, 7, attribute("comm_type", 3)), "GATHER is not supported; supported are ALL"),
        (node(7, 7, attribute("comm_type", 17)), "comm_type 17 is not known"),
        (node(7, 7, attribute("comm_type", "x")), "attribute comm_type is 'x'"),
        (node(7, 5, attribute("comm_size", 4)), "no attribute comm_dst"),
        (node(7, 2), "no attribute tensor_size"),
        (
            node(7, 7, attribute("comm_type", 0), attribute("pg_name", "3")),
            "who is in process group '3'? Say it with --groups FILE",
        ),
        (
            node(
                7, 7, attribute("comm_type", 0), attribute("comm_size", 4),
                field(10, field(1, "involved_dim") + field(28, field(1, b"\1\0"))),
            ),
            "involved_dim is [true, false]",
        ),
    ],
)  # fmt: skip
def test_what_is_not_meant_is_named_and_never_takes_no_time(
    tmp_path: Path, bad: bytes, problem: str
) -> None:
    told = refusal(tmp_path, file(bad, node(8, 8)))
    assert problem in told
    assert "llm.0.et: node 8 'op8'" in told, "all problems at once"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (file(version="0.0.1"), "version '0.0.1' of the Chakra schema; read are 0.0.4 and 1.0.0"),
        (b"".join((number(2), field(1, 5))), "a trace of a Chakra schema before 0.0.4"),
        (b"", "empty"),
        (file(node(1, 4))[:-3], "it ends in the middle of a message"),
        (GOLDEN[:-1], "it ends in the middle of a message"),
        (b"\x1f\x8bnot gzip", "not gzip, though it begins so"),
        (b"\xff" * 12, "a number of more than 64 bits"),
    ],
)
def test_other_schemas_and_broken_files_are_named(
    tmp_path: Path, data: bytes, problem: str
) -> None:
    assert problem in refusal(tmp_path, data)


def test_a_version_is_found_where_pytorch_writes_it_and_missed_aloud(tmp_path: Path) -> None:
    schema = attribute("schema", "1.0.2-chakra.1.0.0")[2:]
    for head in (field(2, schema), field(1, schema)):  # now, and in the schema's first form
        data = number(len(head)) + head + file(node(1, 4, us=1))[7 + 1 :]
        assert of_protobuf(data).version == "1.0.0"
    found = read(written(tmp_path, file(node(1, 4, us=1), version="")))
    assert found.notes == ("no version of the Chakra schema is stated: read as 0.0.4",)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"schema": "1.1.1-chakra.0.0.4", "nodes": []}, "a host trace of PyTorch"),
        ({"workload_graph": []}, "a workload_graph of ASTRA-sim's JSON feeder"),
        ({"id": "1", "type": "COMP_NODE"}, "a trace of a Chakra schema before 0.0.4"),
    ],
)
def test_other_json_that_goes_with_chakra_is_named(
    tmp_path: Path, table: object, problem: str
) -> None:
    with pytest.raises(BadFile, match=problem):
        read(written(tmp_path, json.dumps(table).encode(), ending="json"))


def test_process_groups_are_those_of_astra_sim(tmp_path: Path) -> None:
    gather = node(
        1, 7, attribute("comm_type", 2), attribute("comm_size", 10), attribute("pg_name", "a")
    )
    path = written(tmp_path, file(gather), file(node(1, 4, us=1)), file(gather))
    (tmp_path / "groups").write_text('{"a": [0, 2]}')
    found = read(path, tmp_path / "groups")
    assert found.groups == {"a": ((0, 2),)}
    assert isinstance(got := found.programs[0].nodes[0], Collective)
    assert got.bytes == 20, "an all-gather of two ranks that put in 10 bytes each"
    assert checked(found).meetings.all[0].ranks == (0, 2)


def test_a_rank_without_a_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, *[file(node(1, 4, us=1))] * 3)
    (tmp_path / "llm.1.et").unlink()
    with pytest.raises(BadFile, match=r"no file llm\.1\.et, though ranks go up to 2"):
        read(path)


def test_what_is_no_trace_is_told_what_one_is(tmp_path: Path) -> None:
    (tmp_path / "trace.et").write_bytes(b"")
    for name in ("trace.et", "missing", "nowhere/missing"):
        with pytest.raises(BadFile, match=r"NAME\.0\.et"):
            read(tmp_path / name)
    with pytest.raises(UsageError, match="--groups"):
        read(SCENARIOS / "traces" / "overlap.json", tmp_path / "trace.et")


@given(st.binary(max_size=60))
def test_no_bytes_are_more_than_a_value_error(data: bytes) -> None:
    for reader in (of_protobuf, of_json, lambda data: list(fields(data))):
        try:
            reader(data)
        except ValueError:
            continue


@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_one_wrong_byte_is_no_more_than_a_value_error_either(at: int, byte: int) -> None:
    try:
        of_protobuf(GOLDEN[:at] + bytes([byte]) + GOLDEN[at + 1 :])
    except ValueError:
        return


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_read_as_they_are_written(value: int) -> None:
    assert varint(b"x" + number(value), 1) == (value, len(number(value)) + 1)
