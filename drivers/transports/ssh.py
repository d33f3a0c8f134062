"""A shell on an SSH server as a line to a device.

Host keys are checked against the known_hosts file that we are given and never added to it: an
unknown or changed key is `Untrusted`. paramiko's own timeouts do not cover all of its waiting, so
opening and sending run under our deadline in a thread, and the socket is closed when it passes.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import socket
import threading
from pathlib import Path

import paramiko

from drivers.address import Credentials, SshAddress
from drivers.errors import AccessDenied, LinkLost, Unreachable, Untrusted
from drivers.errors import DeadlineExpired as Expired
from drivers.transports.bounded import bounded, remaining_s
from drivers.transports.tcp import dial

CHUNK_BYTES = 65536
COLUMNS = 511
"""Width of the terminal we claim to be: wide, so that no echo is redrawn at column 80."""
LOG = "drivers.ssh"
SILENT = logging.NullHandler()
"""paramiko logs what it also raises; without a handler that would go to standard error."""


class SshTransport:
    """A shell channel; opening raises `Unreachable`, `Untrusted`, `AccessDenied` or `LinkLost`."""

    def __init__(self, address: SshAddress, credentials: Credentials, deadline_ns: int) -> None:
        self.name = str(address)
        logging.getLogger(LOG).addHandler(SILENT)
        opening = Opening(address, credentials, deadline_ns)
        self._closed = False
        self._client, self._channel, self._socket = bounded(
            opening.run,
            deadline_ns,
            what=f"{self.name}: SSH session",
            abandon=opening.abandon,
            dispose=lambda session: session[0].close(),
        )

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Send all of `data`. A deadline that passes here closes the session."""
        if self._closed:
            raise LinkLost(f"{self.name}: used after it was closed")
        self._channel.settimeout(max(remaining_s(deadline_ns), 0.001))
        try:
            bounded(
                lambda: self._channel.sendall(data),
                deadline_ns,
                what=f"{self.name}: send",
                abandon=lambda: hang_up(self._socket),
            )
        except TimeoutError as error:
            raise Expired(f"{self.name}: not taken in time") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise LinkLost(f"{self.name}: session lost while sending: {error}") from error

    def receive(self, deadline_ns: int) -> bytes:
        """Return at least one byte."""
        if self._closed:
            raise LinkLost(f"{self.name}: used after it was closed")
        self._channel.settimeout(max(remaining_s(deadline_ns), 0.0))
        try:
            data = self._channel.recv(CHUNK_BYTES)
        except TimeoutError as error:
            raise Expired(f"{self.name}: nothing received in time") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise LinkLost(f"{self.name}: session lost while receiving: {error}") from error
        if not data:
            raise LinkLost(f"{self.name}: the device closed the session")
        return data

    def close(self) -> None:
        """End the session and its thread."""
        if not self._closed:
            self._closed = True
            hang_up(self._socket)
            self._client.close()


class Opening:
    """The steps from nothing to a shell, in one thread, which `abandon` makes fail from another."""

    def __init__(self, address: SshAddress, credentials: Credentials, deadline_ns: int) -> None:
        self._address, self._credentials = address, credentials
        self._deadline_ns = deadline_ns
        self._name = str(address)
        self._abandoned = threading.Event()
        self._socket: socket.socket | None = None

    def abandon(self) -> None:
        """Make `run` fail soon, from another thread."""
        self._abandoned.set()
        if self._socket is not None:
            hang_up(self._socket)

    def run(self) -> tuple[paramiko.SSHClient, paramiko.Channel, socket.socket]:
        """Dial, check the host key, log in; raise what opening raises."""
        address = self._address
        client = paramiko.SSHClient()
        client.set_log_channel(LOG)
        _trust(client, self._credentials.known_hosts, self._name)
        self._socket = dial(address.host, address.port, self._deadline_ns, self._name)
        client.set_missing_host_key_policy(_RefuseUnknown(self._name, self._credentials))
        try:
            if self._abandoned.is_set():
                hang_up(self._socket)  # whoever waited has left before there was a socket
            self._connect(client, self._socket)
            return client, self._shell(client), self._socket
        except BaseException:
            hang_up(self._socket)
            client.close()
            self._socket.close()
            raise

    def _connect(self, client: paramiko.SSHClient, connected: socket.socket) -> None:
        address, credentials = self._address, self._credentials
        left_s = max(remaining_s(self._deadline_ns), 0.001)
        nothing_given = credentials.password is None and credentials.key_file is None
        try:
            client.connect(
                address.host,
                address.port,
                address.user,
                credentials.password,
                key_filename=str(credentials.key_file) if credentials.key_file else None,
                timeout=left_s,
                banner_timeout=left_s,
                auth_timeout=left_s,
                channel_timeout=left_s,
                allow_agent=nothing_given,
                look_for_keys=False,
                sock=connected,
            )
        except paramiko.BadHostKeyException as error:
            raise _changed(self._name, credentials, address, error) from error
        except paramiko.AuthenticationException as error:
            raise AccessDenied(f"{self._name}: {_denial(credentials, error)}") from error
        except paramiko.ssh_exception.IncompatiblePeer as error:
            raise Unreachable(
                f"{self._name}: no SSH algorithm in common ({error}); firmware that knows only"
                " ssh-rsa or SHA-1 key exchange needs 'paramiko<5'"
            ) from error
        except FileNotFoundError as error:
            raise AccessDenied(f"{self._name}: no key file {credentials.key_file}") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            if nothing_given and "No authentication methods" in str(error):
                raise AccessDenied(f"{self._name}: {_denial(credentials, error)}") from error
            raise Unreachable(f"{self._name}: no SSH session: {error}") from error

    def _shell(self, client: paramiko.SSHClient) -> paramiko.Channel:
        try:
            return client.invoke_shell(term="dumb", width=COLUMNS)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise LinkLost(f"{self._name}: logged in, but no shell: {error}") from error


class _RefuseUnknown(paramiko.MissingHostKeyPolicy):
    """Says which line would make the offered key trusted, and refuses."""

    def __init__(self, name: str, credentials: Credentials) -> None:
        self._name, self._file = name, credentials.known_hosts

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        del client
        raise Untrusted(
            f"{self._name}: host key {fingerprint(key)} is not in {_file(self._file)}. If that is"
            f" the device's fingerprint, add this line: {known_hosts_line(hostname, key)}"
        )


def fingerprint(key: paramiko.PKey) -> str:
    """Return the fingerprint as OpenSSH prints it, ``SHA256:...``."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def known_hosts_line(hostname: str, key: paramiko.PKey) -> str:
    """Return the line of a known_hosts file; `hostname` is ``host`` or ``[host]:port``."""
    return f"{hostname} {key.get_name()} {key.get_base64()}"


def _changed(
    name: str,
    credentials: Credentials,
    address: SshAddress,
    error: paramiko.BadHostKeyException,
) -> Untrusted:
    host = address.host if address.port == paramiko.config.SSH_PORT else None
    line = known_hosts_line(host or f"[{address.host}]:{address.port}", error.key)
    return Untrusted(
        f"{name}: the host key has CHANGED: {_file(credentials.known_hosts)} says"
        f" {fingerprint(error.expected_key)}, the device offers {fingerprint(error.key)}. If the"
        f" device was re-imaged, replace its line by: {line}"
    )


def _trust(client: paramiko.SSHClient, file: Path | None, name: str) -> None:
    """Load the trusted keys. Nothing is ever saved to the file."""
    if file is None or not file.exists():
        return
    try:
        client.load_system_host_keys(str(file))
    except (OSError, UnicodeError, paramiko.SSHException) as error:
        raise Untrusted(f"{name}: cannot read known_hosts file {file}: {error}") from error


def _file(known_hosts: Path | None) -> str:
    if known_hosts is None:
        return "any known_hosts file, because none was given (known_hosts = PATH)"
    return f"{known_hosts}" + ("" if known_hosts.exists() else " (which does not exist)")


def _denial(credentials: Credentials, error: Exception) -> str:
    if credentials.key_file is not None:
        return f"key {credentials.key_file} was refused: {error}"
    if credentials.password is not None:
        return f"the password was refused: {error}"
    return f"no password and no key file given, and no key of an SSH agent was taken: {error}"


def hang_up(connected: socket.socket) -> None:
    """Make everybody who waits on the socket fail now; closing alone would not wake them."""
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already gone
