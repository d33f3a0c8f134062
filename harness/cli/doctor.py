"""``harness doctor``: what this machine can do, found out by trying, not by guessing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec

from drivers.emulators.light.abilities import Abilities
from drivers.emulators.light.abilities import probe as probe_light
from harness.bench.pressure import waited_us
from harness.cli.output import json_option, show
from harness.clock import NS_PER_MS, NS_PER_US
from harness.errors import ExitCode

PACKAGES = ("drivers", "harness", "agents")
ASK_S = 10


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried. `needed` means that no bench of any kind runs without it."""

    name: str
    ok: bool
    found: str
    needed: bool = False


def python() -> Finding:
    """Look at the interpreter."""
    ok = sys.version_info >= (3, 11)
    return Finding(name="python", ok=ok, found=platform.python_version(), needed=True)


def packages() -> Finding:
    """See that our generic package names mean this installation and no other."""
    places = {
        Path(spec.origin).parent.parent
        for name in PACKAGES
        if (spec := find_spec(name)) and spec.origin
    }
    found = ", ".join(sorted(map(str, places)))
    if len(places) > 1:
        found += ": another distribution owns one of these names; use an environment of its own"
    return Finding(name="packages", ok=len(places) == 1, found=found, needed=True)


def cores() -> Finding:
    """Count the cores that this process may use."""
    count = len(os.sched_getaffinity(0))
    few = "" if count > 1 else ": agents and switches share it, expect slow and noisy numbers"
    return Finding(name="cores", ok=count > 1, found=f"{count}{few}")


def pressure() -> Finding:
    """See whether the kernel tells how long tasks wait for a CPU."""
    told = waited_us() is not None
    found = (
        "told: an emulated run says how far its times are this machine's"
        if told
        else "not told (PSI): an emulated run cannot say how far its times are this machine's"
    )
    return Finding(name="cpu waits", ok=told, found=found)


def torch() -> Finding:
    """Look for torch without importing it."""
    try:
        return Finding(name="torch", ok=True, found=version("torch"), needed=True)
    except PackageNotFoundError:
        found = "not installed: agents cannot run collectives"
        return Finding(name="torch", ok=False, found=found, needed=True)


def gpus() -> Finding:
    """Ask nvidia-smi for GPUs."""
    said = ask("nvidia-smi", "-L")
    count = len([line for line in said.splitlines() if line.startswith("GPU ")])
    found = f"{count}: collectives use NCCL" if count else "none: collectives use gloo on the CPU"
    return Finding(name="gpus", ok=count > 0, found=found)


def pty() -> Finding:
    """Open a pseudo-terminal, which stands for an emulated serial line."""
    try:
        near, far = os.openpty()
    except OSError as error:
        return Finding(name="pty", ok=False, found=f"{error}: no emulated serial lines")
    name = os.ttyname(far)
    os.close(near)
    os.close(far)
    return Finding(name="pty", ok=True, found=name)


def tools() -> Finding:
    """Look for the programs that tests and emulated benches call."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [tool for tool in ("ip", "tc", "sshd", "socat") if not shutil.which(tool, path=path)]
    found = f"missing: {', '.join(missing)}" if missing else "ip, tc, sshd, socat"
    return Finding(name="tools", ok=not missing, found=found)


def serial_lines() -> Finding:
    """List serial devices that a switch could hang on."""
    lines = sorted(
        str(path)
        for pattern in ("ttyUSB*", "ttyACM*", "ttyS[0-9]")
        for path in Path("/dev").glob(pattern)
    )
    readable = [line for line in lines if os.access(line, os.R_OK | os.W_OK)]
    if lines and not readable:
        found = f"{', '.join(lines)}, not accessible: join their group (dialout)"
        return Finding(name="serial", ok=False, found=found)
    return Finding(name="serial", ok=bool(readable), found=", ".join(readable) or "none")


def clock_source() -> Finding:
    """Read what the kernel counts time with; anything but tsc costs precision."""
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    try:
        name = path.read_text().strip()
    except OSError:
        return Finding(name="clock", ok=False, found="unknown")
    return Finding(name="clock", ok=name in ("tsc", "kvm-clock", "arch_sys_counter"), found=name)


def ask(*command: str) -> str:
    """Return what a program prints, or nothing where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def light() -> list[Finding]:
    """Try, in a namespace that is thrown away, all that moves packets on an emulated bench."""
    can = probe_light()
    timers = (
        f"late by {can.lateness_p99_ns / NS_PER_US:.0f} us (p99): "
        f"dark times from {can.smallest_dark_ns / NS_PER_MS:.1f} ms on are kept"
    )
    return [
        Finding(name=name, ok=not refusal, found=refusal or "works")
        for name, refusal in (
            ("namespaces", can.namespaces),
            ("ebpf", can.ebpf),
            ("mirred", can.mirred),
            ("user netns", can.user_namespaces),
        )
    ] + [
        Finding(name="timers", ok=True, found=timers),
        best_light(can),
    ]


def best_light(can: Abilities) -> Finding:
    """Tell what an emulated bench would move packets with; a run enters a user namespace itself."""
    if can.light == "none" and not can.user_namespaces:
        text = "emulated circuits move packets in a user namespace, which a run makes for itself"
        return Finding(name="light", ok=True, found=text)
    return Finding(name="light", ok=can.light != "none", found=LIGHT[can.light])


LIGHT = {
    "ebpf": "emulated circuits move packets by eBPF",
    "mirred": "emulated circuits move packets by tc u32 + mirred",
    "none": "emulated benches run control plane only: switches answer, no packet moves",
}
PROBES: tuple[Callable[[], Finding], ...] = (
    python,
    packages,
    cores,
    pressure,
    torch,
    gpus,
    pty,
    tools,
    serial_lines,
    clock_source,
)


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Tell what this machine can do for a bench, by trying; ends with 3 where it can run none.

    \b
    harness doctor
    """
    findings = [*(probe() for probe in PROBES), *light()]
    lines = []
    for finding in findings:
        answer = "yes" if finding.ok else "NO" if finding.needed else "no"
        lines.append(f"{answer:<4} {finding.name:<11} {finding.found}")
    unfit = [finding.name for finding in findings if finding.needed and not finding.ok]
    if unfit:
        lines.append(f"no bench runs here: see {', '.join(unfit)}")
    show(findings, "\n".join(lines), as_json=as_json)
    return ExitCode.INFRASTRUCTURE if unfit else ExitCode.PASSED
