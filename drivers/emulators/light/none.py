"""Control plane only: a switch that answers and moves no packet."""

from __future__ import annotations

from collections.abc import Mapping


class NoLight:
    """Remembers what would be lit. See `drivers.emulators.light.Light`."""

    kind = "none"

    def __init__(self) -> None:
        self._lit: dict[int, int] = {}

    def set(self, changes: Mapping[int, int | None]) -> None:
        """Remember the changes."""
        for ingress, egress in changes.items():
            self._lit.pop(ingress, None)
            if egress is not None:
                self._lit[ingress] = egress

    def lit(self) -> dict[int, int]:
        """Return what would be lit."""
        return dict(self._lit)

    def close(self) -> None:
        """Nothing is held."""
