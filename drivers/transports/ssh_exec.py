"""Commands on an SSH server: one session, in which each command has a channel and a status.

For devices that are computers (a Linux ToR) rather than a line with a dialect. The session is
opened, and the host key checked, as in `drivers.transports.ssh`. A command whose deadline passes
ends the session: whether the device has obeyed it is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import paramiko

from drivers.address import Credentials, SshAddress
from drivers.errors import DeadlineExpired, LinkLost
from drivers.transports.bounded import bounded, remaining_s
from drivers.transports.commands import Finished
from drivers.transports.ssh import CHUNK_BYTES, LOG, SILENT, Opening, hang_up

NO_STATUS = -1
"""paramiko's word for a channel that ended without a status."""


class SshCommands:
    """A session; opening raises `Unreachable`, `Untrusted`, `AccessDenied` or `LinkLost`."""

    def __init__(self, address: SshAddress, credentials: Credentials, deadline_ns: int) -> None:
        self.name = str(address)
        logging.getLogger(LOG).addHandler(SILENT)
        opening = _Login(address, credentials, deadline_ns)
        self._client, self._next, self._socket = bounded(
            opening.run,
            deadline_ns,
            what=f"{self.name}: SSH session",
            abandon=opening.abandon,
            dispose=lambda session: session[0].close(),
        )
        self._closed = False

    def run(self, command: str, stdin: str, deadline_ns: int) -> Finished:
        """Run `command` with `stdin` and wait for its end; raise `DeadlineExpired`, `LinkLost`."""
        if self._closed:
            raise LinkLost(f"{self.name}: used after it was closed")
        try:
            return bounded(
                partial(self._run, command, stdin.encode(), deadline_ns),
                deadline_ns,
                what=f"{self.name}: {command.partition(' ')[0]}",
                abandon=lambda: hang_up(self._socket),
            )
        except TimeoutError as error:
            raise DeadlineExpired(f"{self.name}: no answer in time") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise LinkLost(f"{self.name}: session lost: {error}") from error

    def close(self) -> None:
        """End the session and its thread."""
        if not self._closed:
            self._closed = True
            hang_up(self._socket)
            self._client.close()

    def _run(self, command: str, stdin: bytes, deadline_ns: int) -> Finished:
        channel = self._next if not self._next.closed else _channel(self._client, deadline_ns)
        with channel:
            channel.settimeout(max(remaining_s(deadline_ns), 0.001))
            channel.exec_command(command)
            channel.sendall(stdin)
            channel.shutdown_write()
            out, err = _all(channel.recv), _all(channel.recv_stderr)
            status = channel.recv_exit_status()
        if status == NO_STATUS:
            raise LinkLost(f"{self.name}: the device ended the session in the middle of a command")
        return Finished(status, out.decode(errors="replace"), err.decode(errors="replace"))


class _Login(Opening):
    """Ends in a channel for the first command, where its parent ends in a shell."""

    def _shell(self, client: paramiko.SSHClient) -> paramiko.Channel:
        try:
            return _channel(client, self._deadline_ns)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise LinkLost(f"{self._name}: logged in, but no session: {error}") from error


def _channel(client: paramiko.SSHClient, deadline_ns: int) -> paramiko.Channel:
    transport = client.get_transport()
    if transport is None:
        raise EOFError("the session has ended")
    return transport.open_session(timeout=max(remaining_s(deadline_ns), 0.001))


def _all(receive: Callable[[int], bytes]) -> bytes:
    """Return everything up to the end of a stream."""
    data = b""
    while chunk := receive(CHUNK_BYTES):
        data += chunk
    return data
