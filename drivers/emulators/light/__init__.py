"""Who moves the packets of an emulated switch: light that enters here leaves there.

Interfaces in the *glass*, a network namespace without addresses, stand for fibre pairs. A packet
that arrives on the interface of an ingress port leaves by the interface of the egress port that is
lit, or is gone. Like a mirror that latches, light outlives the process that set it: an emulator
that was killed leaves its circuits lit, and the next one takes the ports over without a moment of
darkness.

`open_light` raises `OSError` where an interface or the right to move packets is missing, with the
reason; `drivers.emulators.light.abilities.probe` tells beforehand what can be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, assert_never

from drivers.emulators import config


class Light(Protocol):
    """The light of one switch, in its own port numbers."""

    kind: str

    def set(self, changes: Mapping[int, int | None]) -> None:
        """Send the light of each ingress port to an egress port, or nowhere (None).

        Ports not named stay as they are, without the loss of a packet. A port that no interface
        stands for swallows its light. Darkness comes first, so that no two ingress ports ever
        share an egress port on the way.
        """

    def lit(self) -> dict[int, int]:
        """Return ingress -> egress of every circuit that moves packets now."""

    def close(self) -> None:
        """Let go of the ports; they keep their light. Safe to call twice."""


def open_light(light: config.Light) -> Light:
    """Take the ports named by `light` and return what moves their packets.

    Ports that already hold light (of an emulator that died) keep it.
    """
    # Imported late: control plane only must work on systems without namespaces.
    from drivers.emulators.light.ebpf import EbpfLight  # noqa: PLC0415
    from drivers.emulators.light.mirred import MirredLight  # noqa: PLC0415
    from drivers.emulators.light.none import NoLight  # noqa: PLC0415

    match light.kind:
        case "none":
            return NoLight()
        case "ebpf":
            return EbpfLight(light)
        case "mirred":
            return MirredLight(light)
        case unknown:
            assert_never(unknown)
