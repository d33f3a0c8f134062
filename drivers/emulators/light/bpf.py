"""The ``bpf()`` system call, and the one program we load: redirect by a table of interfaces.

No compiler and no library: the program is fourteen instructions of bytecode, assembled here. An
array map holds, at the index of the interface a packet came in by, the index of the interface it
leaves by; zero is dark. Moving a circuit is one map update, a few microseconds.

Raises `OSError` with the kernel's errno; when the verifier refuses, its log is in the message.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from enum import IntEnum

SYSCALL = {"x86_64": 321, "aarch64": 280}

MAP_TYPE_ARRAY, PROG_TYPE_SCHED_CLS = 2, 3

TC_ACT_SHOT = 2
_NAME = b"orchestrl_light"
_SKB_IFINDEX = 40  # offset of `ifindex` in struct __sk_buff (linux/bpf.h)
_LOOKUP_ELEM, _REDIRECT = 1, 23
_PSEUDO_MAP_FD = 1
_LOG_BYTES = 1 << 16

_LDX_W, _STX_W, _LD_DW = 0x61, 0x63, 0x18
_MOV64_X, _MOV64_K, _ADD64_K, _JEQ_K, _CALL, _EXIT = 0xBF, 0xB7, 0x07, 0x15, 0x85, 0x95

_libc = ctypes.CDLL(None, use_errno=True)


class Command(IntEnum):
    """What is asked of ``bpf()``, from linux/bpf.h."""

    MAP_CREATE = 0
    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    PROG_LOAD = 5
    PROG_GET_FD_BY_ID = 13
    MAP_GET_FD_BY_ID = 14
    OBJ_GET_INFO_BY_FD = 15


def instruction(
    code: int, dst: int = 0, src: int = 0, offset: int = 0, immediate: int = 0
) -> bytes:
    """Pack one eBPF instruction: opcode, registers, signed offset, signed immediate."""
    return struct.pack("=BBhi", code, src << 4 | dst, offset, immediate)


def redirect_program(map_fd: int) -> bytes:
    """Assemble the program: look the packet's interface up in the map, redirect or drop."""
    r0, r1, r2, r10 = 0, 1, 2, 10
    return b"".join(
        (
            instruction(_LDX_W, r2, r1, _SKB_IFINDEX),  # r2 = skb->ifindex
            instruction(_STX_W, r10, r2, -4),  # the key, on the stack
            instruction(_MOV64_X, r2, r10),
            instruction(_ADD64_K, r2, immediate=-4),  # r2 = &key
            instruction(_LD_DW, r1, _PSEUDO_MAP_FD, immediate=map_fd),  # r1 = map (two slots)
            instruction(0),
            instruction(_CALL, immediate=_LOOKUP_ELEM),
            instruction(_JEQ_K, r0, offset=5),  # beyond the table: dark
            instruction(_LDX_W, r1, r0),  # r1 = egress interface
            instruction(_JEQ_K, r1, offset=3),  # zero: dark
            instruction(_MOV64_K, r2),  # flags 0: leave by its egress side
            instruction(_CALL, immediate=_REDIRECT),
            instruction(_EXIT),
            instruction(_MOV64_K, r0, immediate=TC_ACT_SHOT),
            instruction(_EXIT),
        )
    )


def create_array(entries: int) -> int:
    """Create an array map of `entries` 32-bit numbers, all zero; return its descriptor."""
    return _bpf(Command.MAP_CREATE, struct.pack("=5I", MAP_TYPE_ARRAY, 4, 4, entries, 0))


def load_classifier(program: bytes) -> int:
    """Load a tc classifier; return its descriptor. The verifier's log is in the error."""
    code = ctypes.create_string_buffer(program, len(program))
    licence = ctypes.create_string_buffer(b"Apache-2.0")
    log = ctypes.create_string_buffer(_LOG_BYTES)

    def request(log_level: int) -> bytes:
        size, address = (_LOG_BYTES, ctypes.addressof(log)) if log_level else (0, 0)
        return struct.pack(
            "=IIQQIIQII16s",
            PROG_TYPE_SCHED_CLS, len(program) // 8,
            ctypes.addressof(code), ctypes.addressof(licence),
            log_level, size, address, 0, 0, _NAME,
        )  # fmt: skip

    try:
        return _bpf(Command.PROG_LOAD, request(0))
    except OSError as error:
        if error.errno == errno.EPERM:  # no right to load programs; the verifier was not asked
            raise
        # Asked for only now: a log costs time, and a buffer too small for it is its own error.
        try:
            return _bpf(Command.PROG_LOAD, request(1))
        except OSError as again:
            words = log.value.decode(errors="replace").strip()
            raise OSError(error.errno, f"{error.strerror}; verifier: {words}") from again


class ArrayMap:
    """An array of 32-bit numbers shared with a program. Owns the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # One request, prepared once: an update is two stores and a system call.
        self._cell = (ctypes.c_uint32 * 2)()
        address = ctypes.addressof(self._cell)
        request = struct.pack("=I4xQQQ", fd, address, address + 4, 0)
        self._request = ctypes.create_string_buffer(request, len(request))

    def __getitem__(self, index: int) -> int:
        self._cell[0] = index
        _call(Command.MAP_LOOKUP, self._request)
        return int(self._cell[1])

    def __setitem__(self, index: int, value: int) -> None:
        self._cell[0], self._cell[1] = index, value
        _call(Command.MAP_UPDATE, self._request)

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_of_program(program_id: int) -> tuple[int, int]:
    """Return (descriptor, entries) of the one map that the loaded program `program_id` uses."""
    program_fd = _bpf(Command.PROG_GET_FD_BY_ID, struct.pack("=III", program_id, 0, 0))
    try:
        map_id = ctypes.c_uint32()
        info = bytearray(64)  # struct bpf_prog_info up to and with its map_ids
        struct.pack_into("=IQ", info, 52, 1, ctypes.addressof(map_id))
        _info(program_fd, info)
    finally:
        os.close(program_fd)
    map_fd = _bpf(Command.MAP_GET_FD_BY_ID, struct.pack("=III", map_id.value, 0, 0))
    try:
        info = bytearray(20)  # struct bpf_map_info up to and with its max_entries
        _info(map_fd, info)
    except OSError:
        os.close(map_fd)
        raise
    return map_fd, int(struct.unpack_from("=I", info, 16)[0])


def _info(fd: int, info: bytearray) -> None:
    """Fill `info`, the head of the kernel's struct that describes the object `fd`."""
    view = (ctypes.c_char * len(info)).from_buffer(info)
    _bpf(Command.OBJ_GET_INFO_BY_FD, struct.pack("=IIQ", fd, len(info), ctypes.addressof(view)))


def _bpf(command: Command, attributes: bytes) -> int:
    return _call(command, ctypes.create_string_buffer(attributes, len(attributes)))


def _call(command: Command, attributes: ctypes.Array[ctypes.c_char]) -> int:
    number = SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of bpf() is not known on {platform.machine()}")
    result = int(_libc.syscall(number, command, attributes, len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf({command.name}): {os.strerror(code)}")
    return result
