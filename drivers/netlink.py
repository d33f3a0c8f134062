"""Network namespaces and raw rtnetlink requests: what must be fast, or must not fork.

A named namespace is a bind mount under ``/run/netns``, as `ip netns` makes them, so the usual tools
see ours. Work inside one is done by a thread that has entered it; the calling thread never moves.
Requests are packed by hand and sent many to a datagram, because steering routes and moving light
stand on the critical path of a reconfiguration: a batch of four takes tens of microseconds. Links
and queues, which are made once, go through pyroute2 (`drivers.interfaces`).

All waits end: netlink answers within the sending call, and `Requests` gives up after a second.
Raises `OSError` with the kernel's errno; `RequestFailed` also carries the kernel's own words.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NETNS_FOLDER = Path("/run/netns")

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_SHARED = 0x1000, 0x4000, 1 << 18, 1 << 20
_MNT_DETACH = 2

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK = 270, 10, 11, 12
_ACK_TLVS = 0x200
_NLA_KIND_MASK = 0x3FFF  # the two top bits mark nesting and byte order
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_S = 1.0
_RECEIVE_BYTES = 1 << 16
_BATCH_MAX = 100  # a socket's default receive buffer holds about 250 acknowledgements

_libc = ctypes.CDLL(None, use_errno=True)


# -- namespaces --------------------------------------------------------------------------------


def namespace_path(name: str) -> Path:
    """Return where the namespace `name` is mounted; raise `ValueError` on a name with a slash."""
    if not name or "/" in name or name in {".", ".."}:
        raise ValueError(f"{name!r} is no name for a network namespace")
    return NETNS_FOLDER / name


def namespaces() -> frozenset[str]:
    """Return the names of all namespaces mounted under ``/run/netns``."""
    try:
        return frozenset(entry.name for entry in NETNS_FOLDER.iterdir())
    except FileNotFoundError:
        return frozenset()


def create_namespace(name: str) -> None:
    """Make an empty namespace called `name`; raise `FileExistsError` where there is one."""
    path = namespace_path(name)
    _share_folder()
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    try:
        _in_thread(partial(_mount_new_namespace, path))
    except OSError:
        path.unlink()
        raise


def delete_namespace(name: str) -> None:
    """Take the name `name` away; without processes in it the namespace and its links go too.

    Deleting what is not there is no error. The kernel removes the links shortly after this returns.
    """
    path = namespace_path(name)
    if _libc.umount2(os.fsencode(path), _MNT_DETACH) != 0:
        not_mounted = {errno.EINVAL, errno.ENOENT}
        if ctypes.get_errno() not in not_mounted:
            raise _os_error(str(path))
    path.unlink(missing_ok=True)


def run_in(netns: str, act: Callable[[], T]) -> T:
    """Run `act` in a thread that has entered namespace `netns` ("": ours); return its result."""
    return _in_thread(partial(_enter_and_run, netns, act))


def socket_in(netns: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Open a socket that lives in namespace `netns`; any thread may use it."""
    return run_in(netns, lambda: socket.socket(family, kind, protocol))


def interfaces_in(netns: str) -> dict[str, int]:
    """Return the index of every interface of `netns` by its name."""
    return run_in(netns, lambda: {name: index for index, name in socket.if_nameindex()})


def write_sysctl(name: str, value: str) -> None:
    """Set ``net.`` sysctl `name` (dotted) in the calling thread's namespace.

    A kernel without the feature has no such file, and nothing to be switched off: a missing file is
    left alone.
    """
    path = Path("/proc/sys") / name.replace(".", "/")
    if path.exists():
        path.write_text(value)


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces (`CLONE_NEW*` flags)."""
    if _libc.unshare(flags) != 0:
        raise _os_error("unshare")


def join(pid: int, flags: int) -> None:
    """Move the calling thread into the namespaces (`CLONE_NEW*` flags) of process `pid`."""
    handle = os.pidfd_open(pid)
    try:
        if _libc.setns(handle, flags) != 0:
            raise _os_error(f"namespaces of process {pid}")
    finally:
        os.close(handle)


def mount_fresh_netns_folder() -> None:
    """Give this mount namespace a ``/run/netns`` of its own.

    Where the folder does not exist and may not be made, all of ``/run`` becomes a fresh tmpfs.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    target = NETNS_FOLDER if NETNS_FOLDER.is_dir() else NETNS_FOLDER.parent
    _mount("tmpfs", str(target), "tmpfs", 0)
    NETNS_FOLDER.mkdir(exist_ok=True)


def _in_thread(act: Callable[[], T]) -> T:
    """Run `act` in a thread of its own: what it does to its namespaces ends with the thread."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="netns") as pool:
        return pool.submit(act).result()


def _enter_and_run(netns: str, act: Callable[[], T]) -> T:
    if netns:
        handle = os.open(namespace_path(netns), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.setns(handle, CLONE_NEWNET) != 0:
                raise _os_error(netns)
        finally:
            os.close(handle)
    return act()


def _mount_new_namespace(path: Path) -> None:
    unshare(CLONE_NEWNET)
    _mount("/proc/thread-self/ns/net", str(path), None, _MS_BIND)


def _share_folder() -> None:
    """Make ``/run/netns`` a shared mount, as `ip netns` does.

    Otherwise a mount namespace made later keeps a copy of each bind mount, and with it a deleted
    namespace alive.
    """
    NETNS_FOLDER.mkdir(parents=True, exist_ok=True)
    folder = str(NETNS_FOLDER)
    try:
        _mount("", folder, None, _MS_SHARED | _MS_REC)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: not a mount point yet
            raise
        _mount(folder, folder, None, _MS_BIND | _MS_REC)
        _mount("", folder, None, _MS_SHARED | _MS_REC)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    kind_bytes = kind.encode() if kind else None
    arguments = (source.encode(), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), None)
    if _libc.mount(*arguments) != 0:
        raise _os_error(target)


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


# -- raw requests ------------------------------------------------------------------------------


class RequestFailed(OSError):
    """The kernel refused one request of a batch; the others stand.

    `errno` is the kernel's, `strerror` its own words where it has any, `request` the position in
    the batch.
    """

    def __init__(self, number: int, words: str, request: int) -> None:
        super().__init__(number, words or os.strerror(number))
        self.request = request


@dataclass(frozen=True)
class Request:
    """One rtnetlink message: its type, its flags beyond REQUEST and ACK, and its packed body."""

    kind: int
    flags: int
    body: bytes


def attribute(kind: int, payload: bytes) -> bytes:
    """Pack one attribute, padded to four bytes."""
    size = 4 + len(payload)
    return _ATTRIBUTE.pack(size, kind) + payload + bytes(-size % 4)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, payload) of each attribute packed in `data`."""
    at = 0
    while at + 4 <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < 4:
            return
        yield kind & _NLA_KIND_MASK, data[at + 4 : at + size]
        at += size + (-size % 4)


class Requests:
    """An rtnetlink socket in one namespace: batches that are all acknowledged, and dumps."""

    def __init__(self, netns: str) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket_in(netns, socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        self._socket.settimeout(_ANSWER_S)
        for option in (_NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._sequence = 0

    def send(self, requests: Sequence[Request]) -> None:
        """Send all in order, in one datagram where they are no more than `_BATCH_MAX`.

        Raises the first `RequestFailed` once all of a datagram are answered.
        """
        for at in range(0, len(requests), _BATCH_MAX):
            self._send(requests[at : at + _BATCH_MAX], at)

    def _send(self, requests: Sequence[Request], at: int) -> None:
        first = self._sequence + 1
        self._sequence += len(requests)
        self._socket.send(
            b"".join(
                _pack(request, NLM_F_REQUEST | NLM_F_ACK | request.flags, first + i)
                for i, request in enumerate(requests)
            )
        )
        failures: list[RequestFailed] = []
        waiting = set(range(first, self._sequence + 1))
        while waiting:
            for kind, flags, sequence, body in self._receive():
                if kind == _NLMSG_ERROR and sequence in waiting:
                    waiting.remove(sequence)
                    if number := -struct.unpack_from("=i", body)[0]:
                        words = _words(flags, body)
                        failures.append(RequestFailed(number, words, at + sequence - first))
        if failures:
            raise failures[0]

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Return the bodies of the answers to a dump request of type `kind`."""
        self._sequence += 1
        asked = self._sequence
        self._socket.send(_pack(Request(kind, 0, body), NLM_F_REQUEST | NLM_F_DUMP, asked))
        found: list[bytes] = []
        while True:
            for answer, _, sequence, content in self._receive():
                if sequence != asked:
                    continue
                if answer in (_NLMSG_DONE, _NLMSG_ERROR):
                    if number := -struct.unpack_from("=i", content)[0]:
                        raise RequestFailed(number, "", 0)
                    return found
                found.append(content)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self._socket.close()

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._socket.recv(_RECEIVE_BYTES)
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            yield kind, flags, sequence, data[at + _HEADER.size : at + size]
            at += size + (-size % 4)


def _pack(request: Request, flags: int, sequence: int) -> bytes:
    size = _HEADER.size + len(request.body)
    header = _HEADER.pack(size, request.kind, flags, sequence, 0)
    return header + request.body + bytes(-size % 4)


def _words(flags: int, body: bytes) -> str:
    """Return the kernel's own words from an acknowledgement (error number and capped header)."""
    if not flags & _ACK_TLVS:
        return ""
    return next(
        (text.rstrip(b"\0").decode(errors="replace") for kind, text in attributes(body[20:])
         if kind == 1),
        "",
    )  # fmt: skip
