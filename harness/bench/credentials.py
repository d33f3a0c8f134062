"""What opens a device: secrets from where the bench file points to, which never holds them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from drivers.address import Credentials
from harness.errors import UsageError
from harness.model.bench import Bench, Switch, Tor


def secret_variables(bench: Bench) -> tuple[str, ...]:
    """Return the environment variables that hold secrets: no child needs to see them."""
    return tuple(spec.password_env for spec in _devices(bench).values() if spec.password_env)


def passwords(bench: Bench) -> list[str]:
    """Fetch all passwords, which must never reach a log; raises as `credentials_of` does."""
    found = (credentials_of(name, spec).password for name, spec in _devices(bench).items())
    return [password for password in found if password]


def credentials_of(name: str, spec: Switch | Tor) -> Credentials:
    """Fetch the secrets that the bench file points to; raises `UsageError` for a missing one."""
    where = f"{'tors' if isinstance(spec, Tor) else 'switches'}.{name}"
    password = None
    if spec.password_env:
        password = os.environ.get(spec.password_env)
        if password is None:
            raise UsageError(f"{where}.password_env: {spec.password_env} is not set")
    elif spec.password_file:
        password = _secret(where, Path(spec.password_file))
    return Credentials(
        password=password,
        key_file=Path(spec.key_file) if spec.key_file else None,
        known_hosts=Path(spec.known_hosts) if spec.known_hosts else None,
    )


def _devices(bench: Bench) -> Mapping[str, Switch | Tor]:
    """Return what is logged in to."""
    tors = {name: tor for name, tor in bench.tors.items() if tor.driver != "none"}
    return {**tors, **bench.switches}


def _secret(where: str, path: Path) -> str:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UsageError(f"{where}.password_file: {path} can be read by others; chmod 600 it")
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise UsageError(f"{where}.password_file: {path}: {error.strerror}") from error
