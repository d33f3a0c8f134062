"""CURVE key pairs in files, and the list of agents whose keys are let in.

``NAME.key`` holds the secret (one line of Z85, mode 0600; anything looser is refused), ``NAME.pub``
the public half. A coordinator needs ``coordinator.key`` and the ``.pub`` of every agent; an agent
needs its own ``.key`` and ``coordinator.pub``. A key belongs to one name: who holds the key of
``n0`` can only be ``n0``. Secrets never travel in arguments, bench files or logs.

Raises `UsageError`, with the file's name and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from harness.errors import UsageError

COORDINATOR = "coordinator"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class Pair:
    """One name's keys as Z85 text; the secret never shows in a repr."""

    name: str
    public: str
    secret: str = field(repr=False)


def make_pair(name: str) -> Pair:
    """Return a fresh pair for `name`."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"key name {name!r}: use letters, digits, '.', '_' and '-'")
    public, secret = zmq.curve_keypair()
    return Pair(name, public.decode("ascii"), secret.decode("ascii"))


def save(folder: Path, pair: Pair) -> None:
    """Write ``NAME.key`` (0600) and ``NAME.pub``. An existing key is never overwritten."""
    secret_path = folder / f"{pair.name}.key"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{secret_path} exists: remove it first to replace the key") from error
    except OSError as error:
        raise UsageError(f"{secret_path} cannot be written: {error.strerror}") from error
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(pair.secret + "\n")
    (folder / f"{pair.name}.pub").write_text(pair.public + "\n", encoding="ascii")


def load(folder: Path, name: str) -> Pair:
    """Read ``NAME.key``; the public half is computed from it, so the two always belong together."""
    path = folder / f"{name}.key"
    secret = _line(path, private=True)
    public = zmq.curve_public(secret.encode("ascii")).decode("ascii")
    return Pair(name, public, secret)


def load_public(path: Path) -> str:
    """Read a ``.pub`` file."""
    return _line(path, private=False)


def allow_list(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the public key of each name. Two names with one key are refused."""
    keys: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        key = load_public(folder / f"{name}.pub")
        if key in owner:
            raise UsageError(f"{folder}: {owner[key]}.pub and {name}.pub hold the same key")
        keys[name] = key
        owner[key] = name
    return keys


def make_folder(folder: Path, agents: Iterable[str]) -> None:
    """Make the coordinator's pair and one pair an agent, as an emulated bench needs them."""
    pairs = [make_pair(name) for name in (COORDINATOR, *agents)]  # all, or a bad name and none
    for pair in pairs:
        save(folder, pair)


def _line(path: Path, *, private: bool) -> str:
    try:
        with path.open(encoding="ascii") as file:
            if private and (mode := os.fstat(file.fileno()).st_mode & 0o777) & 0o077:
                raise UsageError(
                    f"{path} can be read by others (mode {mode:04o}): chmod 600 {path}"
                )
            text = file.read(256).strip()
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing: make it with `harness keys`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not _Z85.fullmatch(text):
        raise UsageError(f"{path} does not hold a key (one line of 40 Z85 characters)")
    return text
