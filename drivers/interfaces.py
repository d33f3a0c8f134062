"""Links, addresses, routes and queues of one network namespace: the one module that uses pyroute2.

An `Interfaces` works on the namespace of the thread that opened it and must stay in that thread
(`drivers.netlink.run_in`): pyroute2 keeps a socket and an event loop per thread. Nothing here
forks; namespaces are handed over as open descriptors. Rates are bits per second, sizes bytes.
Raises `OSError` with the kernel's errno.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from drivers.netlink import namespace_path

_ROOT_HANDLE = 0x10000


@dataclass(frozen=True)
class TokenBucket:
    """A tbf queue: `rate_bytes_per_s` on average, `burst_bytes` at once, `limit_bytes` waiting."""

    rate_bytes_per_s: int
    burst_bytes: int
    limit_bytes: int

    @classmethod
    def of(cls, mbit_per_s: float, *, burst_bytes: int, queue_ms: float) -> TokenBucket:
        """Return the bucket of a port of `mbit_per_s` whose full queue drains in `queue_ms`.

        The queue holds at least two bursts: a shorter one drops part of every burst it is meant to
        smooth. Raises `ValueError` unless the rate is positive and fits tbf's 32 bits (34 Gbit/s).
        """
        rate_bytes_per_s = round(mbit_per_s * 1e6 / 8)
        if not 0 < rate_bytes_per_s < 1 << 32:
            raise ValueError(f"{mbit_per_s} Mbit/s is not a rate that tbf can hold")
        queued = round(rate_bytes_per_s * queue_ms / 1e3)
        return cls(rate_bytes_per_s, burst_bytes, max(queued, 2 * burst_bytes))


@dataclass(frozen=True)
class End:
    """One end of a veth pair: name, namespace ("" is the calling thread's) and MAC address."""

    name: str
    netns: str
    mac: str = ""


class Interfaces:
    """The namespace of the calling thread; use with ``with``."""

    def __init__(self) -> None:
        self._ip: Any = IPRoute(groups=0)

    def __enter__(self) -> Interfaces:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ip.close()

    def veth(self, a: End, b: End, *, mtu: int) -> None:
        """Make a veth pair straight in its two namespaces, both ends down."""
        handles = {
            end.netns: os.open(namespace_path(end.netns), os.O_RDONLY | os.O_CLOEXEC)
            for end in (a, b)
            if end.netns
        }
        try:
            near, far = (_end_options(end, mtu, handles.get(end.netns)) for end in (a, b))
            self._ask("link", "add", kind="veth", peer=far, **near)
        finally:
            for handle in handles.values():
                os.close(handle)

    def bridge(self, name: str) -> None:
        """Make a bridge, down, that does not wait before it forwards."""
        self._ask("link", "add", kind="bridge", ifname=name, br_forward_delay=0)

    def enslave(self, name: str, bridge: str) -> None:
        """Put interface `name` on `bridge`."""
        self._ask("link", "set", index=_index(name), master=_index(bridge))

    def up(self, name: str) -> None:
        """Bring `name` up."""
        self._ask("link", "set", index=_index(name), state="up")

    def down(self, name: str) -> None:
        """Take `name` down; the kernel takes its routes and neighbours away."""
        self._ask("link", "set", index=_index(name), state="down")

    def delete(self, name: str) -> None:
        """Delete a link (of a pair: both ends); not being there is no error."""
        try:
            self._ask("link", "del", index=_index(name))
        except OSError as error:
            if error.errno not in (None, errno.ENODEV):  # None: Python found no index for the name
                raise

    def address(self, name: str, address: str, prefix_length: int) -> None:
        """Give `name` an address."""
        index = _index(name)
        self._ask("addr", "add", index=index, address=address, prefixlen=prefix_length)

    def addresses(self) -> list[tuple[str, int]]:
        """Return (address, prefix length) of every IPv4 address."""
        found = self._ask("get_addr", family=2)
        return [(entry.get_attr("IFA_LOCAL"), entry["prefixlen"]) for entry in found]

    def neighbour(self, name: str, address: str, mac: str) -> None:
        """Make a permanent neighbour, so that no address is ever resolved on the wire."""
        permanent = 0x80
        index = _index(name)
        self._ask("neigh", "replace", ifindex=index, dst=address, lladdr=mac, state=permanent)

    def route(self, prefix: str, *, via: str, name: str, metric: int, protocol: int) -> None:
        """Have a route by way of a gateway that need not be on the interface's own network."""
        self._ask(
            "route", "replace", dst=prefix, gateway=via, oif=_index(name),
            flags=["onlink"], priority=metric, proto=protocol,
        )  # fmt: skip

    def shape(self, name: str, bucket: TokenBucket) -> None:
        """Limit what leaves by `name`, from now on; what waits there is kept."""
        self._ask(
            "tc", "replace", "tbf", _index(name), _ROOT_HANDLE,
            rate=bucket.rate_bytes_per_s, burst=bucket.burst_bytes, limit=bucket.limit_bytes,
        )  # fmt: skip

    def _ask(self, verb: str, *args: object, **options: object) -> Any:
        try:
            return getattr(self._ip, verb)(*args, **options)
        except NetlinkError as error:
            raise OSError(error.code, f"{verb} {args}: {os.strerror(error.code)}") from error


def _end_options(end: End, mtu: int, handle: int | None) -> dict[str, object]:
    options: dict[str, object] = {"ifname": end.name, "mtu": mtu}
    if end.mac:
        options["address"] = end.mac
    if handle is not None:
        options["net_ns_fd"] = handle
    return options


def _index(name: str) -> int:
    return socket.if_nametoindex(name)
