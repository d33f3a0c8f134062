"""What this machine lets us do, found out by doing it in a namespace that is thrown away.

Kernel versions and capability bits mislead (modules are missing, policies refuse), so each ability
is tried with the very code that a bench uses. `timer_lateness` tells how exactly dark times can be
kept here. Durations are nanoseconds. Nothing is raised: a refusal is the answer.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from drivers import netlink
from drivers.base import NS_PER_MS
from drivers.emulators import config
from drivers.emulators.light import open_light

Kind = Literal["ebpf", "mirred"]
_KINDS: tuple[Kind, Kind] = ("ebpf", "mirred")
_TRY_S = 10.0


@dataclass(frozen=True)
class Abilities:
    """Per ability the reason why not; empty where it works."""

    namespaces: str
    ebpf: str
    mirred: str
    user_namespaces: str
    lateness_p99_ns: int
    smallest_dark_ns: int
    """Shortest dark time that this machine keeps within a fifth, 99 times of 100."""

    @property
    def light(self) -> Literal["none", "ebpf", "mirred"]:
        """The best light to be had in the namespaces we are in."""
        if not self.ebpf:
            return "ebpf"
        return "none" if self.mirred else "mirred"


def probe() -> Abilities:
    """Try everything; takes about a third of a second."""
    lateness_p99_ns = _percentile(timer_lateness(), 99)
    with _glass() as (netns, refusal):
        ebpf, mirred = (refusal or _try_light(kind, netns) for kind in _KINDS)
    return Abilities(
        namespaces=refusal,
        ebpf=ebpf,
        mirred=mirred,
        user_namespaces=_try_user_namespace(),
        lateness_p99_ns=lateness_p99_ns,
        smallest_dark_ns=smallest_dark_ns(lateness_p99_ns),
    )


def timer_lateness(samples: int = 100, wait_ns: int = NS_PER_MS) -> list[int]:
    """Return how late each of `samples` waits of `wait_ns` ended (ns), sorted."""
    late = []
    for _ in range(samples):
        due_ns = time.monotonic_ns() + wait_ns
        time.sleep(wait_ns / 1e9)
        late.append(max(0, time.monotonic_ns() - due_ns))
    return sorted(late)


def smallest_dark_ns(lateness_p99_ns: int) -> int:
    """Return the dark time of which a lateness of `lateness_p99_ns` is a fifth; at least 1 ms."""
    return max(NS_PER_MS, 5 * lateness_p99_ns)


def _percentile(ordered: Sequence[int], percent: int) -> int:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@contextmanager
def _glass() -> Iterator[tuple[str, str]]:
    """Yield a namespace with a wire for each kind of light in it, and why not ("": it is there)."""
    # Imported late: pyroute2 takes a tenth of a second, which no emulator should wait for.
    from drivers.interfaces import End, Interfaces  # noqa: PLC0415

    netns = f"probe-{secrets.token_hex(4)}"

    def pull_wire() -> None:
        with Interfaces() as interfaces:
            for kind in _KINDS:
                interfaces.veth(End(f"{kind}-a", ""), End(f"{kind}-b", ""), mtu=1500)

    try:
        netlink.create_namespace(netns)
        netlink.run_in(netns, pull_wire)
    except OSError as error:
        refusal = f"no network namespaces: {error.strerror or error}"
    else:
        refusal = ""
    try:
        yield netns, refusal
    finally:
        netlink.delete_namespace(netns)


def _try_light(kind: Kind, netns: str) -> str:
    a, b = f"{kind}-a", f"{kind}-b"
    settings = config.Light(kind=kind, netns=netns, tx={1: a, 2: b}, rx={3: a, 4: b})
    try:
        light = open_light(settings)
        try:
            light.set({1: 4, 2: 3})
            moved = light.lit() == {1: 4, 2: 3}
        finally:
            light.close()
    except OSError as error:
        return f"{kind}: {error.strerror or error}"
    return "" if moved else f"{kind}: light was set, and read back otherwise"


def _try_user_namespace() -> str:
    command = [sys.executable, "-m", "drivers.userns", "--try"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            check=False,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no user namespace: {error}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"
