"""Passwords and host keys of emulated units: files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.errors import Misuse

if TYPE_CHECKING:  # it takes 0.1 s, and a unit without SSH needs only its secrets
    import asyncssh

OWNER_ONLY = 0o600


def read_secret(path: str) -> str:
    """Return the first line of a secret file; raise `Misuse` when others may read it."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & ~OWNER_ONLY & 0o777:
                raise Misuse(f"{path}: mode is {mode:04o}, must be 0600")
            return file.readline().rstrip("\r\n")
    except OSError as error:
        raise Misuse(f"{path}: cannot read the secret: {error.strerror}") from error


def write_secret(path: str, data: bytes) -> None:
    """Create a file of mode 0600; raise `FileExistsError` rather than overwrite."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def host_key(path: str | None) -> asyncssh.SSHKey:
    """Read the SSH host key at `path`; make it where there is none yet. Raises `Misuse`."""
    import asyncssh  # noqa: PLC0415

    if path is not None and Path(path).exists():
        try:
            return asyncssh.read_private_key(path)
        except (OSError, asyncssh.KeyImportError) as error:
            raise Misuse(f"{path}: cannot read the host key: {error}") from error
    key = asyncssh.generate_private_key("ssh-ed25519")
    if path is not None:
        write_secret(path, key.export_private_key())
    return key
