"""Traffic-control requests that put light on a port: clsact, and what is attached to it.

Pure packing and reading of rtnetlink messages (linux/pkt_cls.h, linux/tc_act/tc_mirred.h); one
filter per port, at a fixed place, so that putting another there replaces it in one step.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from drivers.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attribute,
    attributes,
)

RTM_NEWQDISC, RTM_GETQDISC = 36, 38
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46
FILTER_NAME = b"orchestrl_light"

_TCMSG = struct.Struct("=B3xiIII")
_CLSACT, _CLSACT_HANDLE, _INGRESS = 0xFFFFFFF1, 0xFFFF0000, 0xFFFFFFF2
_PLACE = 1 << 16 | socket.htons(3)  # preference 1, every protocol
_BPF_HANDLE, _U32_HANDLE = 1, 0x80000800
_TCA_KIND, _TCA_OPTIONS = 1, 2
_BPF_FD, _BPF_NAME, _BPF_FLAGS, _BPF_ID = 6, 7, 8, 11
_BPF_DIRECT_ACTION = 1
_U32_SELECTOR, _U32_ACTIONS = 5, 7
_U32_TERMINAL = 1
_ACT_KIND, _ACT_OPTIONS, _MIRRED_PARMS = 1, 2, 2
_ACT_STOLEN, _EGRESS_REDIRECT = 4, 1
_MIRRED = struct.Struct("=IIiiiiI")


@dataclass(frozen=True)
class Filter:
    """What is attached to the ingress of interface `index`: our program's id, or a redirection."""

    index: int
    program_id: int | None
    redirect_to: int | None


def make_clsact(index: int) -> Request:
    """Prepare interface `index` for filters; fails with EEXIST where that was done before."""
    body = _TCMSG.pack(0, index, _CLSACT_HANDLE, _CLSACT, 0) + attribute(_TCA_KIND, b"clsact\0")
    return Request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body)


def put_program(index: int, program_fd: int) -> Request:
    """Let the loaded program decide about every packet that enters by `index`, replacing ours."""
    options = (
        attribute(_BPF_FD, struct.pack("=I", program_fd))
        + attribute(_BPF_NAME, FILTER_NAME + b"\0")
        + attribute(_BPF_FLAGS, struct.pack("=I", _BPF_DIRECT_ACTION))
    )
    return _put(index, _BPF_HANDLE, b"bpf\0", options)


def put_redirect(index: int, to: int) -> Request:
    """Send every packet that enters by `index` out of interface `to`, replacing ours."""
    selector = struct.pack("=BBBxHHhhI", _U32_TERMINAL, 0, 1, 0, 0, 0, 0, 0)
    any_packet = struct.pack("=IIii", 0, 0, 0, 0)
    mirred = _MIRRED.pack(0, 0, _ACT_STOLEN, 0, 0, _EGRESS_REDIRECT, to)
    action = attribute(_ACT_KIND, b"mirred\0") + attribute(
        _ACT_OPTIONS, attribute(_MIRRED_PARMS, mirred)
    )
    options = attribute(_U32_SELECTOR, selector + any_packet) + attribute(
        _U32_ACTIONS, attribute(1, action)
    )
    return _put(index, _U32_HANDLE, b"u32\0", options)


def take_filters(index: int) -> Request:
    """Take what we put on `index` away; fails with ENOENT or EINVAL where there is nothing."""
    return Request(RTM_DELTFILTER, 0, _TCMSG.pack(0, index, 0, _INGRESS, _PLACE))


def dump_request(index: int) -> bytes:
    """Pack the request for all filters on the ingress of `index` (a dump of RTM_GETTFILTER)."""
    return _TCMSG.pack(0, index, 0, _INGRESS, 0)


def parse_filter(body: bytes) -> Filter | None:
    """Read one answer to the dump; None where it is not a filter of ours."""
    _, index, handle, _, place = _TCMSG.unpack_from(body)
    found = dict(attributes(body[_TCMSG.size :]))
    options = dict(attributes(found.get(_TCA_OPTIONS, b"")))
    if place != _PLACE:
        return None
    match found.get(_TCA_KIND):
        case b"bpf\0" if options.get(_BPF_NAME) == FILTER_NAME + b"\0":
            return Filter(index, struct.unpack("=I", options[_BPF_ID])[0], None)
        case b"u32\0" if handle == _U32_HANDLE:
            return Filter(index, None, _redirection(options))
    return None


def _redirection(options: dict[int, bytes]) -> int | None:
    for _, action in attributes(options.get(_U32_ACTIONS, b"")):
        fields = dict(attributes(action))
        if fields.get(_ACT_KIND) == b"mirred\0":
            parms = dict(attributes(fields[_ACT_OPTIONS]))[_MIRRED_PARMS]
            return int(_MIRRED.unpack_from(parms)[-1])
    return None


def _put(index: int, handle: int, kind: bytes, options: bytes) -> Request:
    body = (
        _TCMSG.pack(0, index, handle, _INGRESS, _PLACE)
        + attribute(_TCA_KIND, kind)
        + attribute(_TCA_OPTIONS, options)
    )
    return Request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, body)
