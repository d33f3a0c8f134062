"""How clients reach an emulated unit: a serial line, TCP, SSH."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from drivers.emulators.faces import Session


class SessionMaker(Protocol):
    """Makes the dialogue of one new client; `user` is who the server has let in by password."""

    def __call__(self, user: str = "") -> Session:
        """Return a new dialogue."""


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
