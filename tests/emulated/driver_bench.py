"""Emulated units in processes of their own, and drivers opened on them, for the driver tests."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from drivers.address import Credentials
from drivers.base import Matching, Ocs
from drivers.catalog import open_ocs
from drivers.conformance import OcsMaker, Specimen, Trouble
from drivers.emulators.config import EmulatedSwitch, Face, Faults, Ready, Timing

USER, PASSWORD = "admin", "testbed pass"
EXCHANGE_NS = 3_000_000_000
LOST_EXCHANGE_NS = 500_000_000
READY_S = 30.0
BOOT_MS = 100.0
FOREIGN, REFUSED = (8, 16), (3, 11)
OURS = frozenset(range(1, 17)) - {*FOREIGN, 7, 15}


@dataclass(frozen=True)
class Unit:
    """A running emulated unit with one face."""

    process: subprocess.Popen[bytes]
    url: str
    driver: str
    credentials: Credentials

    def open(
        self, *, exchange_ns: int = EXCHANGE_NS, transcript: Path | None = None, name: str = "agg0"
    ) -> Ocs:
        return open_ocs(
            self.driver,
            self.url,
            name=name,
            credentials=self.credentials,
            exchange_timeout_ns=exchange_ns,
            transcript=transcript,
        )


@contextmanager
def emulated(
    folder: Path,
    protocol: str,
    server: str,
    *,
    faults: Faults = Faults(),  # noqa: B008  frozen
    circuits: tuple[tuple[int, int], ...] = (),
) -> Iterator[Unit]:
    """Start an 8 x 8 unit and wait until it answers; stop it on the way out."""
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    password_file.chmod(0o600)
    logs_in = protocol == "tl1" or server == "ssh"
    face = Face(
        protocol=protocol,
        server=server,
        user=USER if logs_in else None,
        password_file=str(password_file) if logs_in else None,
        host_key_file=str(folder / "host_key") if server == "ssh" else None,
    )
    config = EmulatedSwitch(
        name="agg0",
        model="N-VST-8x8-LU1-DMHNV",
        ports=8,
        timing=Timing(switch_ms=5.0, boot_ms=BOOT_MS),
        faces=(face,),
        faults=faults,
        circuits=circuits,
    )
    path = folder / "unit.json"
    path.write_bytes(msgspec.json.encode(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "drivers.emulators", str(path)], stdout=subprocess.PIPE
    )
    try:
        ready = msgspec.json.decode(first_line(process), type=Ready)
        known_hosts = folder / "known_hosts"
        known_hosts.write_text("".join(f"{line}\n" for line in ready.host_keys if line))
        credentials = Credentials(USER, PASSWORD, known_hosts=known_hosts)
        yield Unit(process, ready.urls[0], f"polatis-{protocol}", credentials)
    finally:
        stop(process)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """Read the first line a process prints, within a limit."""
    assert process.stdout is not None
    deadline, data = time.monotonic() + READY_S, b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        assert ready, f"said only {data!r} in {READY_S} s"
        chunk = os.read(process.stdout.fileno(), 4096)
        assert chunk, f"ended with {process.wait(READY_S)} after saying {data!r}"
        data += chunk
    return data


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


CHANGES = {
    "scpi": re.compile(r"(?:SUB|ADD|ONLY) (\(@[\d,]*\),\(@[\d,]*\))"),
    "tl1": re.compile(r"(?:ENT|DLT)-PATCH::([^:]*):"),
}


def changed_ports(transcript: Path, protocol: str) -> list[int]:
    """Every port named in a change command of a transcript, in order; ranges written out."""
    found = []
    for line in transcript.read_text().splitlines():
        if line.split(" ")[1] != ">":
            continue
        for arguments in CHANGES[protocol].findall(line):
            for first, last in re.findall(r"(\d+)(?:&&(\d+))?", arguments):
                found += range(int(first), int(last or first) + 1)
    return found


def maker(folder: Path, protocol: str, server: str) -> OcsMaker:
    """Return the maker for `check_ocs`: a fresh unit for each trouble."""

    @contextmanager
    def make(trouble: Trouble) -> Iterator[Specimen]:
        faults = {
            Trouble.NONE: Faults(),
            Trouble.LOST_REPLY: Faults(lose_reply=1),
            Trouble.REFUSAL: Faults(deny_ports=(REFUSED[1],)),
        }[trouble]
        transcript = folder / f"transcript-{time.monotonic_ns()}"
        lost = trouble is Trouble.LOST_REPLY
        with emulated(folder, protocol, server, faults=faults, circuits=(FOREIGN,)) as unit:
            ocs = unit.open(
                exchange_ns=LOST_EXCHANGE_NS if lost else EXCHANGE_NS, transcript=transcript
            )
            try:
                yield Specimen(
                    ocs,
                    OURS,
                    Matching.of([FOREIGN]),
                    lambda: changed_ports(transcript, protocol),
                    REFUSED if trouble is Trouble.REFUSAL else None,
                )
            finally:
                ocs.close()

    return make
