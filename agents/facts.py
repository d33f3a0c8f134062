"""What an agent tells of its node when it says hello: hardware, and versions of what matters.

Nothing is imported to learn its version: torch would take seconds.
"""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from pathlib import Path

from harness.wire.messages import VERSION, Hello
from harness.wire.pulse import clock_identity


def hello() -> Hello:
    """Look around and introduce this node."""
    return Hello(
        version=VERSION,
        host=socket.gethostname(),
        pid=os.getpid(),
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        facts=_facts(),
    )


def _facts() -> dict[str, str]:
    facts = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "clock": clock_identity(),
        "cpus": str(os.cpu_count()),
    }
    for package in ("orchestrl-harness", "torch", "vllm"):
        try:
            facts[package] = metadata.version(package)  # reads a file; imports nothing
        except metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        facts["nvidia driver"] = driver.read_text(encoding="utf-8").splitlines()[0]
    return facts
