"""The glass ports of one switch: port numbers to interfaces, and the filters they hold."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from drivers.emulators import config
from drivers.emulators.light.filters import (
    RTM_GETTFILTER,
    Filter,
    dump_request,
    make_clsact,
    parse_filter,
)
from drivers.netlink import RequestFailed, Requests, interfaces_in

DARK = 0
"""An interface index that no interface has."""


class Ports:
    """Interfaces that stand for the ports of one switch, made ready for filters.

    Raises `OSError` naming an interface that is missing, or with the kernel's reason for refusing.
    """

    def __init__(self, light: config.Light) -> None:
        found = interfaces_in(light.netns)
        self._tx = _resolve(light.tx, found, light.netns)
        self._rx = _resolve(light.rx, found, light.netns)
        self.index_max = max(found.values())
        self.requests = Requests(light.netns)
        try:
            for index in self.indices:
                self._prepare(index)
        except OSError:
            self.close()
            raise

    @property
    def indices(self) -> list[int]:
        """Interfaces by which light enters, in port order."""
        return [index for _, index in sorted(self._tx.items())]

    def held(self) -> dict[int, Filter]:
        """Return the filter of ours that each interface holds from an earlier life."""
        return {
            index: found
            for index in self.indices
            for body in self.requests.dump(RTM_GETTFILTER, dump_request(index))
            if (found := parse_filter(body)) is not None
        }

    def steps(self, changes: Mapping[int, int | None]) -> list[tuple[int, int]]:
        """Return (interface, interface or `DARK`) in the order to be made: darkness first.

        An ingress port without an interface has no packets to move; an egress port without one
        leads nowhere.
        """
        steps = [
            (self._tx[ingress], DARK if egress is None else self._rx.get(egress, DARK))
            for ingress, egress in changes.items()
            if ingress in self._tx
        ]
        return sorted(steps, key=lambda step: step[1] != DARK)

    def circuits(self, table: Mapping[int, int]) -> dict[int, int]:
        """Return ingress -> egress for a table of interface -> interface, leaving `DARK` out."""
        egress_of = {index: egress for egress, index in self._rx.items()}
        return {
            ingress: egress_of[table[index]]
            for ingress, index in self._tx.items()
            if table.get(index, DARK) in egress_of
        }

    def close(self) -> None:
        """Close the socket; filters stay. Safe to call twice."""
        self.requests.close()

    def _prepare(self, index: int) -> None:
        try:
            self.requests.send([make_clsact(index)])
        except RequestFailed as error:
            if error.errno != errno.EEXIST:
                raise


def _resolve(names: Mapping[int, str], found: Mapping[str, int], netns: str) -> dict[int, int]:
    for port, name in names.items():
        if name not in found:
            raise OSError(
                errno.ENODEV,
                f"port {port}: no interface {name!r} in namespace {netns or 'our own'}",
            )
    return {port: found[name] for port, name in names.items()}
