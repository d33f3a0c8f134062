"""The unit's SCPI: silent sets, an error queue, compound messages.

Pure: lines in, bytes and `Change` values out. A set command answers nothing; whether it was obeyed
shows only in the error queue or in the map read back. A unit of a compound message that is in
error goes to the queue and the others are still obeyed. The queue belongs to the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import datetime

from drivers.emulators.faces import Answer
from drivers.emulators.faces.scpi_grammar import (
    ScpiError,
    channels,
    forms,
    path_of,
    resolve,
    split_outside,
    written,
)
from drivers.emulators.model import Change, SwitchModel

POWER_PORTS_MAX = 256
"""Ports in one power query."""
QUEUE_MAX = 32
LINE_MAX = 65_536
ERROR_BIT = 4
"""Status byte: the error queue holds something."""

Handler = Callable[["ScpiSession", list[str]], str | None]


class ScpiSession:
    """One client's dialogue."""

    greeting = b""
    ends = b"\n"

    def __init__(self, model: SwitchModel) -> None:
        self._model = model
        self._buffer = b""
        self._errors: deque[ScpiError] = deque()
        self._changes: list[Change] = []
        self._now_ns = 0

    def lines(self, data: bytes) -> list[bytes]:
        """Split at line feeds; an endless line is thrown away with an error."""
        *complete, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LINE_MAX:
            self._buffer = b""
            self._queue(ScpiError(-223))
        return complete

    def answer(self, line: bytes, now_ns: int, wall: datetime) -> Answer:
        """Obey one program message; the answers of its queries are joined by semicolons."""
        self._now_ns, self._changes = now_ns, []
        replies: list[str] = []
        path = ""
        text = line.decode("ascii", "replace").strip()
        for unit in filter(None, (part.strip() for part in split_outside(text, ";"))):
            header, *rest = unit.split(None, 1)
            header = resolve(header.upper(), path)
            path = path_of(header, path)
            try:
                reply = self._obey(header, rest[0] if rest else "")
            except ScpiError as error:
                self._queue(error)
            else:
                replies += [] if reply is None else [reply]
        out = (";".join(replies) + "\r\n").encode() if replies else b""
        return Answer(out, tuple(self._changes), is_query=bool(replies))

    def report(self, change: Change, wall: datetime) -> bytes:
        """SCPI speaks only when asked."""
        return b""

    def _obey(self, header: str, rest: str) -> str | None:
        if "\ufffd" in header:
            raise ScpiError(-101)
        handler = _HANDLERS.get(header)
        if handler is None:
            raise ScpiError(-113, header)
        parameters = [p.strip() for p in split_outside(rest, ",")] if rest else []
        return handler(self, parameters)

    def _queue(self, error: ScpiError) -> None:
        if len(self._errors) >= QUEUE_MAX:
            self._errors[-1] = ScpiError(-350)
        else:
            self._errors.append(error)

    def _ports(self, text: str) -> list[int]:
        """Read a channel list of ports that this unit has, each once."""
        ports = channels(text)
        if wrong := [p for p in ports if not self._model.is_port(p)]:
            raise ScpiError(-222, str(wrong[0]))
        if len(set(ports)) != len(ports):
            raise ScpiError(-224, "port repeated")
        return ports

    def _sides(self, parameters: list[str]) -> tuple[list[int], list[int]]:
        """Read ``(@ingress),(@egress)``, each port on its own side."""
        _count(parameters, 2, 2)
        ingress, egress = self._ports(parameters[0]), self._ports(parameters[1])
        wrong = [p for p in ingress if not self._model.is_ingress(p)]
        wrong += [p for p in egress if not self._model.is_egress(p)]
        if wrong:
            raise ScpiError(-222, str(wrong[0]))
        return ingress, egress

    def _pairs(self, parameters: list[str]) -> list[tuple[int, int]]:
        ingress, egress = self._sides(parameters)
        if len(ingress) != len(egress):
            raise ScpiError(-224, "lists differ in length")
        return list(zip(ingress, egress, strict=True))

    def connect(self, parameters: list[str], *, replace: bool = False) -> None:
        """Obey CONN:ADD and CONN:ONLY: busy ports are moved."""
        change = self._model.connect(self._pairs(parameters), self._now_ns, replace=replace)
        self._changes.append(change)
        for pair in change.refused:
            self._queue(ScpiError(-200, f"cannot connect {pair[0]},{pair[1]}"))

    def subtract(self, parameters: list[str]) -> None:
        """Obey CONN:SUB: named circuits, or all on one side's ports where the other is empty.

        A pair that is not connected is passed over: what the command asks for is already so.
        """
        ingress, egress = self._sides(parameters)
        if ingress and egress:
            pairs = self._pairs(parameters)
            gone = [a for a, b in pairs if self._model.peer(a) == b]
        else:
            gone = [*ingress, *(a for b in egress if (a := self._model.peer(b)) is not None)]
        self._changes.append(self._model.disconnect(gone, self._now_ns))

    def drop_all(self, parameters: list[str]) -> None:
        """Obey DISC:ALL."""
        _count(parameters, 0, 0)
        every = [a for a, _ in self._model.circuits()]
        self._changes.append(self._model.disconnect(every, self._now_ns))

    def whole_map(self, parameters: list[str]) -> str:
        """Answer CONN:STAT?."""
        _count(parameters, 0, 0)
        circuits = self._model.circuits()
        return written([a for a, _ in circuits]) + "," + written([b for _, b in circuits])

    def peer(self, parameters: list[str]) -> str:
        """Answer CONN:PORT?."""
        _count(parameters, 1, 1)
        try:
            port = int(parameters[0])
        except ValueError as error:
            raise ScpiError(-104, parameters[0]) from error
        if not self._model.is_port(port):
            raise ScpiError(-222, str(port))
        other = self._model.peer(port)
        return '""' if other is None else f'"{other}"'

    def shutter(self, parameters: list[str], *, enabled: bool) -> None:
        """Obey PORT:ENAB and PORT:DIS."""
        _count(parameters, 1, 1)
        ports = self._ports(parameters[0])
        self._changes.append(self._model.set_enabled(ports, self._now_ns, enabled=enabled))

    def port_states(self, parameters: list[str]) -> str:
        """Answer PORT:STAT?, for a list or for all."""
        states = [self._model.state(p).value for p in self._listed(parameters)]
        return "(" + ",".join(states) + ")"

    def power(self, parameters: list[str]) -> str:
        """Answer PMON:POW?, for a list or for all."""
        if not self._model.has_monitors:
            raise ScpiError(-241)
        ports = self._listed(parameters)
        if len(ports) > POWER_PORTS_MAX:
            raise ScpiError(-223, f"{len(ports)} ports")
        return "(" + ",".join(f"{self._model.power_dbm(p, self._now_ns):.2f}" for p in ports) + ")"

    def _listed(self, parameters: list[str]) -> list[int]:
        _count(parameters, 0, 1)
        return self._ports(parameters[0]) if parameters else list(self._model.ports)

    def identity(self, parameters: list[str]) -> str:
        """Answer *IDN?."""
        _count(parameters, 0, 0)
        model = self._model
        return f"{model.vendor},{model.model},{model.serial_number},{model.firmware}"

    def size(self, parameters: list[str]) -> str:
        """Answer SIZE?."""
        _count(parameters, 0, 0)
        return f"{self._model.n},{self._model.n}"

    def clear(self, parameters: list[str]) -> None:
        """Obey *CLS: forget the errors."""
        _count(parameters, 0, 0)
        self._errors.clear()

    def reset(self, parameters: list[str]) -> None:
        """Obey *RST: nothing connected, all shutters open."""
        self.drop_all(parameters)
        ports = self._model.ports
        self._changes.append(self._model.set_enabled(ports, self._now_ns, enabled=True))

    def status_byte(self, parameters: list[str]) -> str:
        """Answer *STB?."""
        _count(parameters, 0, 0)
        return str(ERROR_BIT if self._errors else 0)

    def complete(self, parameters: list[str]) -> str:
        """Answer *OPC?: commands are obeyed one after the other, so all before it are."""
        _count(parameters, 0, 0)
        return "1"

    def next_error(self, parameters: list[str]) -> str:
        """Answer SYST:ERR?: the oldest error, which is then gone."""
        _count(parameters, 0, 0)
        return str(self._errors.popleft() if self._errors else ScpiError(0))

    def all_errors(self, parameters: list[str]) -> str:
        """Answer SYST:ERR:ALL?: all errors, which are then gone."""
        _count(parameters, 0, 0)
        listed = [str(error) for error in self._errors] or [str(ScpiError(0))]
        self._errors.clear()
        return ",".join(listed)

    def network(self, parameters: list[str]) -> str:
        """Answer SYST:COMM:NETW:ADDR?; both interfaces say that they are on the loopback."""
        _count(parameters, 0, 0)
        return 'IP="127.0.0.1" Gateway="0.0.0.0" Mask="255.0.0.0" Broadcast="127.255.255.255"'


def _count(parameters: list[str], least: int, most: int) -> None:
    if len(parameters) < least:
        raise ScpiError(-109)
    if len(parameters) > most:
        raise ScpiError(-108, parameters[most])


_TABLE: list[tuple[str, Handler]] = [
    ("*IDN?", ScpiSession.identity),
    ("*CLS", ScpiSession.clear),
    ("*RST", ScpiSession.reset),
    ("*STB?", ScpiSession.status_byte),
    ("*OPC?", ScpiSession.complete),
    ("OXC:SWITch:SIZE?", ScpiSession.size),
    ("OXC:SWITch:CONNect:ADD", ScpiSession.connect),
    ("OXC:SWITch:CONNect:ONLY", lambda session, p: session.connect(p, replace=True)),
    ("OXC:SWITch:CONNect:SUB", ScpiSession.subtract),
    ("OXC:SWITch:CONNect:STATe?", ScpiSession.whole_map),
    ("OXC:SWITch:CONNect:PORT?", ScpiSession.peer),
    ("OXC:SWITch:DISConnect:ALL", ScpiSession.drop_all),
    ("OXC:SWITch:PORT:DISable", lambda session, p: session.shutter(p, enabled=False)),
    ("OXC:SWITch:PORT:ENABle", lambda session, p: session.shutter(p, enabled=True)),
    ("OXC:SWITch:PORT:STATe?", ScpiSession.port_states),
    ("PMON:POWer?", ScpiSession.power),
    ("SYSTem:ERRor?", ScpiSession.next_error),
    ("SYSTem:ERRor:NEXT?", ScpiSession.next_error),
    ("SYSTem:ERRor:ALL?", ScpiSession.all_errors),
    ("SYSTem:COMMunicate:NETWork:ADDRess?", ScpiSession.network),
    ("SYSTem:COMMunicate:NETWork2:ADDRess?", ScpiSession.network),
]
_HANDLERS = {form: handler for pattern, handler in _TABLE for form in forms(pattern)}
