"""HUBER+SUHNER Polatis switches, over SCPI (serial, TCP) and over TL1 (SSH, TCP).

Ingress ports are 1..N, egress ports N+1..N+M, in one number space. Powers are dBm. Both dialects
send a whole change, deletes first, together with the query that reads the map back, in one
exchange. Errors are those of `drivers.errors`; a map that makes no sense is `Garbled`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from drivers.base import Capabilities, Circuit, Delta, Identity, Matching, PortState, Receipt
from drivers.dialects import scpi, tl1
from drivers.errors import BadMatching, Garbled, Indeterminate, Misuse
from drivers.ocs.line import Access
from drivers.ocs.scpi_line import LAST_COMMAND, ScpiLine
from drivers.ocs.tl1_line import Tl1Line

BATCH_MAX = 128
"""Circuits in one command: some 950 bytes, a quarter of a second at 38400 baud."""
PORTS_MAX = 256
"""Ports in one power or state query; the unit takes no more."""
TYPICAL_SWITCH_NS = 25_000_000

_SIZE = re.compile(r"-(\d+)x(\d+)-")
_SERIAL = re.compile(r'\bSN=([^,;:"\s]+)')
_POWER_ROW = re.compile(r"\s*(\d+)\s*:\s*([+-]?\d+(?:\.\d+)?)")
_SHUTTER_ROW = re.compile(r"\s*(\d+)\s*:\s*(OPEN|CLOSED)\b")
_LETTERS = {"E": PortState.ENABLED, "D": PortState.DISABLED, "F": PortState.FAILED}

T = TypeVar("T")
L = TypeVar("L", ScpiLine, Tl1Line)


class _Polatis(Generic[L]):
    """What both dialects share: the line, and who answered on it when it was opened."""

    def __init__(self, access: Access, line: L) -> None:
        self.name = access.name
        self._line: L = line
        try:
            self._identity = self._ask_identity()
        except BaseException:
            self._line.close()
            raise
        self.capabilities = _capabilities(self._identity.model)

    @property
    def waited_ns(self) -> int:
        """Time spent so far blocked on the unit's line."""
        return self._line.waited_ns

    def identify(self) -> Identity:
        """Return who the unit is, asked at opening."""
        return self._identity

    def close(self) -> None:
        """End the session."""
        self._line.close()

    def _ask_identity(self) -> Identity:
        raise NotImplementedError


class PolatisScpi(_Polatis[ScpiLine]):
    """A Polatis unit spoken to in SCPI. Opening identifies it."""

    MAP = ":OXC:SWIT:CONN:STAT?"
    POWER = ":PMON:POW?"

    def __init__(self, access: Access) -> None:
        super().__init__(access, ScpiLine(access))

    def read(self) -> Matching:
        """Read the whole map."""
        return self._line.query(self.MAP, self._matching).value

    def connect(self, circuits: Sequence[Circuit]) -> None:
        """Make circuits, the others stay."""
        for batch in batches(circuits, BATCH_MAX):
            self._line.command(f":OXC:SWIT:CONN:ADD {scpi.pairs(batch)}")

    def disconnect(self, circuits: Sequence[Circuit]) -> None:
        """Drop circuits."""
        for batch in batches(circuits, BATCH_MAX):
            self._line.command(f":OXC:SWIT:CONN:SUB {scpi.pairs(batch)}")

    def rewire(self, drop: Sequence[Circuit], make: Sequence[Circuit]) -> Receipt:
        """Drop, make and read back; the last message carries the read-back.

        Sets answer nothing, so the map is the first sign that they were obeyed. Only when it is not
        the map asked for is the error queue asked why.
        """
        *first, last = self._changes(drop, make)
        for message in first:
            self._line.command(message)
        answer = self._line.query(last, self._matching, changes=True)
        after = answer.value
        if not (after.circuits.issuperset(make) and after.circuits.isdisjoint(drop)):
            self._line.check(last.removesuffix(";STAT?"))
        return Receipt(answer.sent_ns, answer.received_ns, after)

    @staticmethod
    def preview(delta: Delta) -> list[str]:
        """Return the messages that `rewire` would send for `delta`."""
        if not delta:
            return []
        *first, last = PolatisScpi._changes(delta.drop, delta.make)
        return [*(f"{message};{LAST_COMMAND}" for message in first), last]

    def power_dbm(self, ports: Sequence[int]) -> Mapping[int, float]:
        """Read optical power; raise `Misuse` for a unit without power monitors."""
        _must_have_power(self.name, self._identity.model, self.capabilities)
        return self._per_port(self.POWER, ports, scpi.parse_powers)

    def port_states(self, ports: Sequence[int]) -> Mapping[int, PortState]:
        """Read whether ports are enabled, disabled (shutter closed) or failed."""
        return self._per_port(":OXC:SWIT:PORT:STAT?", ports, _parse_states)

    def set_shutter(self, ports: Sequence[int], *, closed: bool) -> None:
        """Close or open ports."""
        verb = "DIS" if closed else "ENAB"
        for batch in batches(ports, PORTS_MAX):
            self._line.command(f":OXC:SWIT:PORT:{verb} {scpi.ports(batch)}")

    def _ask_identity(self) -> Identity:
        vendor, model, serial, firmware = scpi.parse_identity(self._line.identity())
        size = _size_in(model) or self._line.query(":OXC:SWIT:SIZE?", scpi.parse_size).value
        return _identity(vendor, model, serial, firmware, size)

    @staticmethod
    def _changes(drop: Sequence[Circuit], make: Sequence[Circuit]) -> list[str]:
        """Return the messages of a change: one where it fits, so that dark time is least."""
        sets = [("SUB", batch) for batch in batches(drop, BATCH_MAX)]
        sets += [("ADD", batch) for batch in batches(make, BATCH_MAX)]
        texts = [f"{verb} {scpi.pairs(batch)}" for verb, batch in sets]
        head = ":OXC:SWIT:CONN:"
        if len(drop) + len(make) <= BATCH_MAX:
            return [f"{head}{';'.join(texts)};STAT?"]
        *first, last = texts
        return [*(f"{head}{text}" for text in first), f"{head}{last};STAT?"]

    def _matching(self, reply: str) -> Matching:
        return _read_as_matching(self.name, scpi.parse_pairs(reply))

    def _per_port(
        self, query: str, ports: Sequence[int], parse: Callable[[str], list[T]]
    ) -> dict[int, T]:
        values: dict[int, T] = {}
        for batch in batches(ports, PORTS_MAX):
            found = self._line.query(f"{query} {scpi.ports(batch)}", parse).value
            if len(found) != len(batch):
                raise Garbled(f"{self.name}: asked for {len(batch)} ports, got {len(found)}")
            values.update(zip(batch, found, strict=True))
        return values


class PolatisTl1(_Polatis[Tl1Line]):
    """A Polatis unit spoken to in TL1. Opening logs in, where we can, and identifies it."""

    READ = tl1.Request("RTRV-PATCH")
    POWER = "RTRV-PORT-POWER"

    def __init__(self, access: Access) -> None:
        super().__init__(access, Tl1Line(access))

    def read(self) -> Matching:
        """Read the whole map."""
        return self._matching(self._line.rows(self.READ))

    def connect(self, circuits: Sequence[Circuit]) -> None:
        """Make circuits, the others stay."""
        self._change(self._changes((), circuits))

    def disconnect(self, circuits: Sequence[Circuit]) -> None:
        """Drop circuits."""
        self._change(self._changes(circuits, ()))

    def rewire(self, drop: Sequence[Circuit], make: Sequence[Circuit]) -> Receipt:
        """Drop, make and read back: sent together, answered one by one."""
        answers = self._line.ask(*self._changes(drop, make), self.READ, changes=True)
        try:
            after = self._matching(answers.responses[-1].rows)
        except Garbled as error:
            raise Indeterminate(f"{self.name}: changed, but not read back: {error}") from error
        return Receipt(answers.sent_ns, answers.received_ns[-2], after)

    @staticmethod
    def preview(delta: Delta) -> list[str]:
        """Return the commands that `rewire` would send for `delta`; ctags are drawn at sending."""
        if not delta:
            return []
        changes = PolatisTl1._changes(delta.drop, delta.make)
        return [request.command("<ctag>") for request in (*changes, PolatisTl1.READ)]

    def power_dbm(self, ports: Sequence[int]) -> Mapping[int, float]:
        """Read optical power; raise `Misuse` for a unit without power monitors."""
        _must_have_power(self.name, self._identity.model, self.capabilities)
        found = self._per_port(self.POWER, ports, _POWER_ROW)
        return {port: float(text) for port, text in found.items()}

    def port_states(self, ports: Sequence[int]) -> Mapping[int, PortState]:
        """Read the shutters. TL1 does not tell failed ports."""
        found = self._per_port("RTRV-PORT-SHUTTER", ports, _SHUTTER_ROW)
        return {
            port: PortState.ENABLED if text == "OPEN" else PortState.DISABLED
            for port, text in found.items()
        }

    def set_shutter(self, ports: Sequence[int], *, closed: bool) -> None:
        """Close or open ports."""
        verb = "OPR-PORT-SHUTTER" if closed else "RLS-PORT-SHUTTER"
        for batch in batches(ports, PORTS_MAX):
            self._line.ask(tl1.Request(verb, tl1.aid(batch)), changes=True)

    def events(self) -> list[tl1.Event]:
        """Return the unit's autonomous messages since the last call, oldest first."""
        return self._line.events()

    def _ask_identity(self) -> Identity:
        kind, *_ = self._line.rows(tl1.Request("RTRV-NETYPE")) or ("",)
        fields = [field.strip() for field in kind.split(",")]
        if len(fields) < 4:
            raise Garbled(f"{self.name}: RTRV-NETYPE answered {kind!r}, not four fields")
        inventory = " ".join(self._line.rows(tl1.Request("RTRV-INV", "OCS")))
        serial = _SERIAL.search(inventory)
        size = _size_in(fields[1]) or self._ask_size()
        return _identity(fields[0], fields[1], serial[1] if serial else "", fields[3], size)

    def _ask_size(self) -> tuple[int, int]:
        request = tl1.Request("RTRV-EQPT", "SYSTEM", ("", "", "PARAMETER=SIZE"))
        answer = " ".join(self._line.rows(request))
        found = re.search(r"SIZE=(\d+)x(\d+)", answer)
        if found is None:
            raise Garbled(f"{self.name}: no size in {answer!r}")
        return int(found[1]), int(found[2])

    def _change(self, requests: Sequence[tl1.Request]) -> None:
        if requests:
            self._line.ask(*requests, changes=True)

    @staticmethod
    def _changes(drop: Sequence[Circuit], make: Sequence[Circuit]) -> list[tl1.Request]:
        drops = [tl1.aid([a for a, _ in batch]) for batch in batches(drop, BATCH_MAX)]
        makes = [tl1.pair_aid(batch) for batch in batches(make, BATCH_MAX)]
        return [tl1.Request("DLT-PATCH", aid) for aid in drops] + [
            tl1.Request("ENT-PATCH", aid) for aid in makes
        ]

    def _matching(self, rows: Sequence[str]) -> Matching:
        try:
            circuits = [(int(a), int(b)) for a, b in (row.split(",") for row in rows)]
        except ValueError as error:
            raise Garbled(f"{self.name}: RTRV-PATCH answered {list(rows)[:4]}") from error
        return _read_as_matching(self.name, circuits)

    def _per_port(
        self, verb: str, ports: Sequence[int], pattern: re.Pattern[str]
    ) -> dict[int, str]:
        values: dict[int, str] = {}
        for batch in batches(ports, PORTS_MAX):
            rows = self._line.rows(tl1.Request(verb, tl1.aid(batch)))
            matches = [found for row in rows if (found := pattern.match(row))]
            values.update({int(found[1]): found[2] for found in matches})
        if missing := [port for port in ports if port not in values]:
            raise Garbled(f"{self.name}: {verb} says nothing of ports {missing}")
        return {port: values[port] for port in ports}


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield items in their order, as many at once as one command takes."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _read_as_matching(name: str, circuits: Sequence[Circuit]) -> Matching:
    try:
        return Matching.of(circuits)
    except BadMatching as error:
        raise Garbled(f"{name}: the unit reports a map that is none: {error}") from error


def _parse_states(reply: str) -> list[PortState]:
    try:
        return [_LETTERS[letter] for letter in scpi.parse_list(reply)]
    except KeyError as error:
        raise Garbled(f"expected port states such as (E,D,F), received {reply!r}") from error


def _size_in(model: str) -> tuple[int, int] | None:
    """Return (ingress, egress) ports from a model such as ``N-VST-192x192-LU1-DMHNV-801``."""
    found = _SIZE.search(model)
    return (int(found[1]), int(found[2])) if found else None


def _identity(
    vendor: str, model: str, serial: str, firmware: str, size: tuple[int, int]
) -> Identity:
    n, m = size
    return Identity(vendor, model, serial, firmware, range(1, n + 1), range(n + 1, n + m + 1))


def _capabilities(model: str) -> Capabilities:
    return Capabilities(
        has_power=not model.startswith("I-"),  # I-OST units have no power monitors
        has_shutters=True,
        hitless_add=True,
        steals_busy_ports=True,
        batch_max=BATCH_MAX,
        typical_switch_ns=TYPICAL_SWITCH_NS,
    )


def _must_have_power(name: str, model: str, capabilities: Capabilities) -> None:
    if not capabilities.has_power:
        raise Misuse(f"{name}: {model} has no power monitors")
