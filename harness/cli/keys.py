"""``harness keys``: the CURVE keys by which coordinator and agents know each other."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.output import json_option, show
from harness.errors import UsageError
from harness.wire.keys import COORDINATOR, make_folder


@click.group()
def keys() -> None:
    """Make the keys of coordinator and agents.

    \b
    harness keys make keys --agents n0,n1,n2,n3
    """


@keys.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--agents", required=True, help="Names of the agents, separated by commas.")
@json_option
def make(folder: Path, agents: str, as_json: bool) -> None:
    """Make the coordinator's key pair and one for each agent in FOLDER.

    NAME.key is secret (mode 0600) and stays with NAME; NAME.pub is not. Nothing is overwritten.

    \b
    harness keys make keys --agents n0,n1,n2,n3
    """
    names = [name.strip() for name in agents.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or COORDINATOR in names:
        raise UsageError(
            f"--agents {agents!r}: name each agent once, such as n0,n1 ({COORDINATOR} is ours)"
        )
    make_folder(folder, names)
    lines = [
        f"keys of {COORDINATOR} and {', '.join(names)} are in {folder}/",
        *(f"  to {name}: {name}.key {COORDINATOR}.pub" for name in names),
    ]
    show({"folder": str(folder), "names": [COORDINATOR, *names]}, "\n".join(lines), as_json=as_json)
