"""What commands print: one JSON object with ``--json``, else lines for a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

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
