"""A switch in somebody's rack: opened as its bench file says, and given back as it was found."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivers.address import parse
from drivers.apply import apply, read_ours
from drivers.base import EMPTY, Matching, Ocs, Transport
from drivers.catalog import OPEN_TIMEOUT_NS, driver_class, open_line
from drivers.conformance import OcsMaker, Specimen, Trouble
from drivers.ocs.line import Access
from harness.bench.credentials import credentials_of
from harness.clock import NS_PER_S
from harness.model.bench import Switch
from harness.model.mapfile import format_map
from harness.model.ports import parse_ports
from tests.emulated.driver_bench import CHANGES, changed_ports


class Deaf:
    """Passes everything to `inner`, but the answer to the first change is never heard."""

    def __init__(self, inner: Transport, change: re.Pattern[str]) -> None:
        self.name = inner.name
        self._inner, self._change = inner, change
        self._due, self._deaf = True, False

    def send(self, data: bytes, deadline_ns: int) -> None:
        self._deaf = self._due and self._change.search(data.decode("ascii")) is not None
        self._due = self._due and not self._deaf
        self._inner.send(data, deadline_ns)

    def receive(self, deadline_ns: int) -> bytes:
        data = self._inner.receive(deadline_ns)
        while self._deaf:
            data = self._inner.receive(deadline_ns)
        return data

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Racked:
    """A switch of a bench file. `ours` are its ports that we may use."""

    name: str
    spec: Switch
    bench: Path
    ours: frozenset[int]

    @classmethod
    def of(cls, name: str, spec: Switch, bench: Path) -> Racked:
        return cls(name, spec, bench, parse_ports(spec.ports))

    @property
    def protocol(self) -> str:
        return self.spec.driver.rpartition("-")[2]

    def open(self, transcript: Path | None = None, *, deaf: bool = False) -> Ocs:
        """Open it; with `deaf`, the answer to the first change is lost."""
        address, credentials = parse(self.spec.url), credentials_of(self.name, self.spec)

        def line(deadline_ns: int) -> Transport:
            opened = open_line(address, credentials, deadline_ns, transcript=transcript)
            return Deaf(opened, CHANGES[self.protocol]) if deaf else opened

        exchange_ns = round(self.spec.exchange_timeout_s * NS_PER_S)
        access = Access(self.name, address, line, exchange_ns, OPEN_TIMEOUT_NS, credentials)
        return driver_class(self.spec.driver)(access)

    def apply(self, ocs: Ocs, wanted: Matching) -> None:
        """Make `wanted` the map of our ports, verified by read-back."""
        limit_ns = time.monotonic_ns() + round(self.spec.apply_timeout_s * NS_PER_S)
        apply(ocs, wanted, self.ours, deadline_ns=limit_ns)

    def maker(self, folder: Path) -> OcsMaker:
        """Return the maker for `check_ocs`; it has no way to make a real unit refuse."""

        @contextmanager
        def make(trouble: Trouble) -> Iterator[Specimen]:
            with closing(self.open()) as ocs:
                self.apply(ocs, EMPTY)
                foreign = ocs.read()
            free = self.ours - {port for circuit in foreign for port in circuit}
            transcript = folder / f"transcript-{time.monotonic_ns()}"
            with closing(self.open(transcript, deaf=trouble is Trouble.LOST_REPLY)) as ocs:
                yield Specimen(ocs, free, foreign, lambda: changed_ports(transcript, self.protocol))

        return make


@contextmanager
def racked(switch: Racked, folder: Path) -> Iterator[Racked]:
    """Remember the map, on disk too, and put it back on every way out.

    Fails naming the file and the command to use where that does not succeed.
    """
    with closing(switch.open()) as ocs:
        whole, ours = ocs.read(), read_ours(ocs, switch.ours)
    kept = folder / f"{switch.name}-as-found.toml"
    kept.write_text(format_map(ours))
    try:
        yield switch
    finally:
        try:
            with closing(switch.open()) as ocs:
                switch.apply(ocs, ours)
                left = ocs.read()
        except Exception as error:
            told = f"harness ocs apply {switch.name} {kept} --bench {switch.bench}"
            raise AssertionError(f"{switch.name} is NOT as it was found; try: {told}") from error
        assert left == whole, f"{switch.name}: others' circuits changed meanwhile: {whole} {left}"
