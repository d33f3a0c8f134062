"""What commands print: one JSON object with ``--json``, else lines for a reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from harness.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """Give a command its ``--json`` flag, passed as `as_json`."""
    option = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on standard output."
    )
    return option(function)


def print_json(value: object) -> None:
    """Print `value` as one indented JSON object."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def show(value: object, text: str, *, as_json: bool) -> None:
    """Print `value` as JSON, or `text`."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


@contextmanager
def best_effort() -> Iterator[None]:
    """Print what is kept elsewhere, too: an output that is gone or full changes no exit code."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        # What is still in the buffer has to go somewhere, or the interpreter ends with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fill_closed_streams() -> None:
    """Put the null device where a standard stream is closed, before a file gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def refuse_taken(path: Path, *, force: bool) -> None:
    """Refuse, before any work, a file that could not be written after it. Raises `UsageError`."""
    if path.exists() and not force:
        raise UsageError(f"{path}: exists; --force writes over it")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written: {_why_not(path)}")


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    return "its folder is not writable" if path.parent.is_dir() else "there is no such folder"


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a file in one move: whole or not at all, and over another only with `force`.

    Raises `UsageError`.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            scratch.replace(path)
        else:
            os.link(scratch, path)
    except FileExistsError as error:
        raise UsageError(f"{path}: exists; --force writes over it") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
