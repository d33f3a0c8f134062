"""Start an agent: ``python -m agents --name n0 --coordinator 10.0.0.1:7700 --keys ~/keys``.

The folder holds ``NAME.key`` (mode 0600) and ``coordinator.pub``; secrets never stand in arguments.
Exit codes are the harness's own: 0 told to end, 2 usage, 3 no coordinator, 4 ended by a signal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agents.agent import run
from harness.clock import NS_PER_S
from harness.errors import HarnessError
from harness.wire.keys import COORDINATOR, load, load_public
from harness.wire.meeting import Coordinator
from harness.wire.sockets import split_address


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and turn errors into one line and an exit code."""
    parser = argparse.ArgumentParser(prog="python -m agents", description="Agent of a testbed node")
    parser.add_argument("--name", required=True, help="this node's name in the bench file")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--keys", required=True, type=Path, help="folder with NAME.key")
    parser.add_argument(
        "--server-key", type=Path, help="the coordinator's .pub (default: KEYS/coordinator.pub)"
    )
    parser.add_argument(
        "--max-wait", type=float, default=60.0, metavar="S", help="give up without a coordinator"
    )
    given = parser.parse_args(arguments)
    try:
        host, port = split_address(given.coordinator)
        key = load_public(given.server_key or given.keys / f"{COORDINATOR}.pub")
        coordinator = Coordinator(host, port, key, load(given.keys, given.name))
        return run(coordinator, int(given.max_wait * NS_PER_S))
    except HarnessError as error:
        sys.stderr.write(f"agent {given.name}: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
