"""Files of weights in the safetensors format: a JSON header, then every tensor's bytes on end.

A file begins with the header's length (8 bytes, little endian), then the header: by name, a
tensor's dtype (``F32``, ``BF16``, ...), shape, and first and last byte among the data. Ours are
without gaps, in the header's order, and carry the CRC-32 of each tensor among the metadata, so that
whoever loads one can tell that it is as it was written. A short reader of our own, because it must
give memory, not tensors of a library, and run where neither torch nor vLLM is installed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from harness.errors import BadFile, InfrastructureError

_LENGTH_BYTES = 8
_HEADER_MOST_BYTES = 100 << 20
_ALIGN_BYTES = 8
_METADATA, _CHECKSUMS = "__metadata__", "crc32"
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one item by the format's name of its dtype."""


class Tensor(NamedTuple):
    """A tensor to be written; `data` is any contiguous buffer of its bytes, row by row.

    A numpy array is one; of a torch tensor, ``tensor.contiguous().view(torch.uint8).numpy()``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any


class Corrupt(InfrastructureError):
    """A tensor that is not as it was written; the message names it and its file."""


class Entry(msgspec.Struct, frozen=True):
    """What the header says of one tensor; `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(NamedTuple):
    """Of a file: its tensors in the order of their bytes, and where the data begins.

    `checksums`: CRC-32 by tensor; empty in files that others have written.
    """

    entries: dict[str, Entry]
    begins: int
    checksums: dict[str, int]


def write(path: str | Path, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Write a file; return its bytes and its CRC-32 (zlib).

    `path` appears, or is replaced, only when all of it is written. Raises `BadFile` for a tensor
    whose data are not what its dtype and shape need; `OSError` where there is no room.
    """
    path = Path(path)
    blocks = [memoryview(tensor.data).cast("B") for tensor in tensors]
    head = _packed_header(path, tensors, blocks)
    written, crc = 0, 0
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            for block in (memoryview(head), *blocks):
                file.write(block)
                written, crc = written + len(block), crc32(block, crc)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return written, crc


def _packed_header(path: Path, tensors: Sequence[Tensor], blocks: Sequence[memoryview]) -> bytes:
    checksums = {tensor.name: crc32(block) for tensor, block in zip(tensors, blocks, strict=True)}
    metadata = {"format": "pt", _CHECKSUMS: msgspec.json.encode(checksums).decode()}
    entries: dict[str, Any] = {_METADATA: metadata}
    problems, offset = [], 0
    for tensor, size in zip(tensors, map(len, blocks), strict=True):
        item_bytes = ITEM_BYTES.get(tensor.dtype, 0)
        if size != prod(tensor.shape) * item_bytes or not item_bytes:
            problems.append(f"{tensor.name}: {size} bytes are no {tensor.dtype}{[*tensor.shape]}")
        if tensor.name in entries:
            problems.append(f"{tensor.name}: there are two of that name")
        entries[tensor.name] = Entry(tensor.dtype, tensor.shape, (offset, offset + size))
        offset += size
    if problems:
        raise BadFile(str(path), problems)
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: str | Path) -> Header:
    """Return what a file says it holds. Raises `BadFile` unless the file holds just that."""
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _HEADER_MOST_BYTES):
            raise BadFile(str(path), [f"{size} bytes that begin with no safetensors header"])
        text = file.read(length)
    begins = _LENGTH_BYTES + length
    entries, checksums = _parsed(str(path), text)
    if problems := _misplaced(entries, size - begins):
        raise BadFile(str(path), problems)
    return Header(entries, begins, checksums)


def _parsed(path: str, text: bytes) -> tuple[dict[str, Entry], dict[str, int]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(found.pop(_METADATA, b"{}"), type=dict[str, str])
        checksums = msgspec.json.decode(metadata.get(_CHECKSUMS, "{}"), type=dict[str, int])
        entries = {name: msgspec.json.decode(raw, type=Entry) for name, raw in found.items()}
    except msgspec.MsgspecError as error:
        raise BadFile(path, [f"no safetensors header: {error}"]) from error
    return dict(sorted(entries.items(), key=lambda item: item[1].data_offsets)), checksums


def _misplaced(entries: Mapping[str, Entry], data_bytes: int) -> list[str]:
    """Return what does not fit: the tensors must fill the data, one after the other."""
    problems, offset = [], 0
    for name, entry in entries.items():
        first, last = entry.data_offsets
        if entry.dtype not in ITEM_BYTES:
            problems.append(f"{name}: its dtype {entry.dtype} is none of {', '.join(ITEM_BYTES)}")
        elif last - first != prod(entry.shape) * ITEM_BYTES[entry.dtype] or first != offset:
            problems.append(
                f"{name}: bytes {first} to {last} are no {entry.dtype}{[*entry.shape]} "
                f"that begins at {offset}"
            )
        offset = last
    if offset != data_bytes and not problems:
        problems.append(f"its tensors take {offset} bytes; it has {data_bytes}: was it cut short?")
    return problems


def tensors(path: str | Path) -> Iterator[tuple[str, memoryview]]:
    """Yield each tensor's name and bytes (read-only, mapped) in the order of the file.

    Raises `BadFile` before the first. A view stays good for as long as it is held.
    """
    header = read_header(path)
    with Path(path).open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for name, entry in header.entries.items():
        first, last = entry.data_offsets
        yield name, mapped[header.begins + first : header.begins + last]


def check(path: str | Path, name: str, data: memoryview, checksums: Mapping[str, int]) -> None:
    """Raise `Corrupt` unless a tensor's bytes are those that were written, as far as is known."""
    if name in checksums and (found := crc32(data)) != checksums[name]:
        raise Corrupt(f"{path}: {name} is corrupt: CRC-32 {found:08x}, not {checksums[name]:08x}")
