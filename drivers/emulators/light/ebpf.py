"""Light as an eBPF table: a cross-connect is one map update, a few microseconds.

Every glass port has the same program at its ingress and all share one array map; see
`drivers.emulators.light.bpf`. Needs CAP_NET_ADMIN over the glass, and the right to load programs,
which no unprivileged user has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from drivers.emulators import config
from drivers.emulators.light import bpf
from drivers.emulators.light.filters import put_program
from drivers.emulators.light.ports import DARK, Ports


class EbpfLight:
    """See `drivers.emulators.light.Light`."""

    kind = "ebpf"

    def __init__(self, light: config.Light) -> None:
        with ExitStack() as undo:
            self._ports = Ports(light)
            undo.callback(self._ports.close)
            self._table = bpf.ArrayMap(bpf.create_array(self._ports.index_max + 1))
            undo.callback(self._table.close)
            self._take_over()
            undo.pop_all()

    def set(self, changes: Mapping[int, int | None]) -> None:
        """See `drivers.emulators.light.Light.set`."""
        for index, to in self._ports.steps(changes):
            self._table[index] = to

    def lit(self) -> dict[int, int]:
        """See `drivers.emulators.light.Light.lit`."""
        return self._ports.circuits({index: self._table[index] for index in self._ports.indices})

    def close(self) -> None:
        """See `drivers.emulators.light.Light.close`."""
        self._table.close()
        self._ports.close()

    def _take_over(self) -> None:
        """Copy what is lit, then put our program in place of an earlier life's, port by port.

        Both send a packet the same way, so it does not matter which of them sees it.
        """
        for index, held in self._ports.held().items():
            if held.program_id is not None:
                self._table[index] = _lit_by(held.program_id, index)
        program_fd = bpf.load_classifier(bpf.redirect_program(self._table.fd))
        try:
            self._ports.requests.send(
                [put_program(index, program_fd) for index in self._ports.indices]
            )
        finally:
            os.close(program_fd)  # the ports hold it now


def _lit_by(program_id: int, index: int) -> int:
    fd, entries = bpf.map_of_program(program_id)
    table = bpf.ArrayMap(fd)
    try:
        return table[index] if index < entries else DARK
    finally:
        table.close()
