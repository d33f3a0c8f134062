"""SSH to the unit: password login, then a shell in which the unit's protocol is spoken.

asyncssh on this side, so that it shares no code (and no mistake) with the client's library. There
is no echo and no line editing: bytes go to the unit as they come. Exec and subsystems are refused.
"""

from __future__ import annotations

from functools import partial

import asyncssh

from drivers.emulators.config import Face
from drivers.emulators.servers import Address, SessionMaker
from drivers.emulators.servers.keyfiles import host_key
from drivers.emulators.unit import Dialogue, Unit
from drivers.errors import Misuse

LOGIN_S = 30


class SshServer:
    """Listens for SSH clients."""

    def __init__(
        self,
        acceptor: asyncssh.SSHAcceptor,
        clients: set[asyncssh.SSHServerConnection],
        address: Address,
    ) -> None:
        self._acceptor, self._clients, self.address = acceptor, clients, address

    async def close(self) -> None:
        """Stop listening and drop every client at once."""
        self._acceptor.close()
        for client in tuple(self._clients):
            client.abort()
        await self._acceptor.wait_closed()


class _Login(asyncssh.SSHServer):
    """One client's connection, from the password on."""

    def __init__(
        self,
        unit: Unit,
        session: SessionMaker,
        clients: set[asyncssh.SSHServerConnection],
    ) -> None:
        self._unit, self._make_session, self._clients = unit, session, clients
        self._connection: asyncssh.SSHServerConnection
        self._user = ""

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._clients.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.discard(self._connection)

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        account = self._unit.model.settings.accounts.get(username)
        self._user = username
        return account is not None and account.opens_with(password)

    def session_requested(self) -> asyncssh.SSHServerSession[bytes]:
        return _Shell(self._unit, partial(self._make_session, self._user))


class _Shell(asyncssh.SSHServerSession[bytes]):
    """One shell channel."""

    byte_ns = 0
    ends_with_the_unit = True

    def __init__(self, unit: Unit, session: SessionMaker) -> None:
        self._unit, self._make_session = unit, session
        self._channel: asyncssh.SSHServerChannel[bytes]
        self._dialogue: Dialogue | None = None

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def pty_requested(self, *_: object) -> bool:
        return True

    def shell_requested(self) -> bool:
        return True

    def session_started(self) -> None:
        self._dialogue = self._unit.connect(self._make_session(), self)

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self._dialogue:
            self._dialogue.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._dialogue:
            self._unit.disconnect(self._dialogue)

    def write(self, data: bytes) -> None:
        """Send; a report or a late reply may find the client gone."""
        if not self._channel.is_closing():
            self._channel.write(data)

    def close(self) -> None:
        """Hang up after what was written: a unit that drops the shell drops the connection."""
        self._channel.close()
        self._channel.get_connection().close()


async def serve_ssh(face: Face, unit: Unit, session: SessionMaker) -> SshServer:
    """Listen on the face's host and port (0: a free one); raise `OSError` when it is taken."""
    if face.user is None or face.password_file is None:
        raise Misuse("an ssh face needs user and password_file")
    key = host_key(face.host_key_file)
    clients: set[asyncssh.SSHServerConnection] = set()
    acceptor = await asyncssh.create_server(
        lambda: _Login(unit, session, clients),
        face.host,
        face.port,
        server_host_keys=[key],
        encoding=None,
        line_editor=False,
        login_timeout=LOGIN_S,
        reuse_address=True,
    )
    port = acceptor.get_port()
    public = key.export_public_key().decode().split()
    known = f"[{face.host}]:{port} {public[0]} {public[1]}"
    return SshServer(acceptor, clients, Address(f"ssh://{face.user}@{face.host}:{port}", known))
