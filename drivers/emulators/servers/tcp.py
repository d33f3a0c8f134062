"""A raw TCP socket to the unit. Callback protocol, not streams: a reply costs microseconds."""

from __future__ import annotations

import asyncio
from typing import cast

from drivers.emulators.config import Face
from drivers.emulators.servers import Address, SessionMaker
from drivers.emulators.unit import Dialogue, Unit


class TcpServer:
    """Listens for clients; each has a dialogue of its own."""

    def __init__(self, server: asyncio.Server, clients: set[TcpLine], address: Address) -> None:
        self._server, self._clients, self.address = server, clients, address

    async def close(self) -> None:
        """Stop listening and drop every client at once."""
        self._server.close()
        for client in tuple(self._clients):
            client.abort()
        await self._server.wait_closed()


class TcpLine(asyncio.Protocol):
    """One client's connection."""

    byte_ns = 0
    ends_with_the_unit = True

    def __init__(self, unit: Unit, session: SessionMaker, clients: set[TcpLine]) -> None:
        self._unit, self._make_session, self._clients = unit, session, clients
        self._transport: asyncio.Transport
        self._dialogue: Dialogue

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet a client."""
        self._transport = cast("asyncio.Transport", transport)
        self._clients.add(self)
        self._dialogue = self._unit.connect(self._make_session(), self)

    def data_received(self, data: bytes) -> None:
        """Hear a client."""
        self._dialogue.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a client."""
        self._clients.discard(self)
        self._unit.disconnect(self._dialogue)

    def write(self, data: bytes) -> None:
        """Send."""
        self._transport.write(data)

    def close(self) -> None:
        """Hang up after what was written."""
        self._transport.close()

    def abort(self) -> None:
        """Hang up now."""
        self._transport.abort()


async def serve_tcp(face: Face, unit: Unit, session: SessionMaker) -> TcpServer:
    """Listen on the face's host and port (0: a free one); raise `OSError` when it is taken."""
    clients: set[TcpLine] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: TcpLine(unit, session, clients), face.host, face.port, reuse_address=True
    )
    port = server.sockets[0].getsockname()[1]
    login = f"{face.user}@" if face.user else ""
    return TcpServer(server, clients, Address(f"tcp://{login}{face.host}:{port}"))
