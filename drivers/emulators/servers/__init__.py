"""How clients reach an emulated unit: a serial line, TCP, SSH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from drivers.emulators.faces import Session

SessionMaker = Callable[[], Session]
"""Makes the dialogue of one new client."""


@dataclass(frozen=True)
class Address:
    """Where a face answers: its device URL and, for SSH, its known_hosts line."""

    url: str
    host_key: str = ""


class Server(Protocol):
    """A face that is being served."""

    address: Address

    async def close(self) -> None:
        """Hang up on every client and give back the port, the pty and its link."""
