"""Light as tc filters: u32 matching everything, with a mirred redirection; dark is no filter.

The fallback where programs may not be loaded, as in an unprivileged user namespace. A packet
without a filter is handed to the glass, which has no address and forwards nothing: it ends there.
All filters of one change travel in one batch; each takes tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from drivers.emulators import config
from drivers.emulators.light.filters import put_redirect, take_filters
from drivers.emulators.light.ports import DARK, Ports


class MirredLight:
    """See `drivers.emulators.light.Light`."""

    kind = "mirred"

    def __init__(self, light: config.Light) -> None:
        self._ports = Ports(light)
        try:
            self._lit = {
                index: held.redirect_to
                for index, held in self._ports.held().items()
                if held.redirect_to
            }
        except OSError:
            self.close()
            raise

    def set(self, changes: Mapping[int, int | None]) -> None:
        """See `drivers.emulators.light.Light.set`."""
        steps = [
            (index, to)
            for index, to in self._ports.steps(changes)
            if to != self._lit.get(index, DARK)
        ]
        self._ports.requests.send(
            [take_filters(index) if to == DARK else put_redirect(index, to) for index, to in steps]
        )
        for index, to in steps:
            self._lit[index] = to

    def lit(self) -> dict[int, int]:
        """See `drivers.emulators.light.Light.lit`."""
        return self._ports.circuits(self._lit)

    def close(self) -> None:
        """See `drivers.emulators.light.Light.close`."""
        self._ports.close()
