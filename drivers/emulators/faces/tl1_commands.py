"""What each TL1 command of the unit does: a table of verbs, their parameters and their acts.

Pure: a `Request` in, an `Outcome` (rows, or a `Change`) out, or `Denied`. Left out are commands
that nobody who switches light needs: user accounts, attenuation, the pulsed shutter, the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from drivers.emulators.faces.tl1_grammar import Command, Denied, fields, ports, unquoted
from drivers.emulators.model import Change, PortState, SwitchModel

TIMEOUT_MAX_MIN = 60
BOOT_MODES = ("DARK", "RESTORE")


@dataclass(frozen=True)
class Request:
    """A command with what it acts on."""

    model: SwitchModel
    command: Command
    now_ns: int
    wall: datetime

    def ports(self, allowed: range) -> list[int]:
        """Read the AID as ports; ``ALL`` or empty means every allowed port."""
        aid = self.command.aid
        return list(allowed) if aid.upper() in {"", "ALL"} else ports(aid, allowed)

    @property
    def ingress(self) -> range:
        """Ingress port numbers."""
        return range(1, self.model.n + 1)

    @property
    def egress(self) -> range:
        """Egress port numbers."""
        return range(self.model.n + 1, 2 * self.model.n + 1)


@dataclass(frozen=True)
class Outcome:
    """What a command came to. `refused` says why part of it (`partly`) or all was not done."""

    rows: tuple[str, ...] = ()
    change: Change | None = None
    refused: str = ""
    partly: bool = False


@dataclass(frozen=True)
class Rule:
    """A verb: its act, how many parameters block 1 takes, and the names block 2 may hold."""

    act: Callable[[Request], Outcome]
    least: int = 0
    most: int = 0
    names: frozenset[str] = frozenset()

    def check(self, command: Command) -> None:
        """Raise `Denied` IPMS or IPNV where the parameters do not fit."""
        given = len(command.positional)
        if given < self.least:
            raise Denied("IPMS", f"Too few parameters ({given}/{self.least}) in block 1")
        if given > self.most:
            extra = command.positional[self.most]
            raise Denied("IPNV", f"Unexpected parameter {extra} in block 1")
        for name in command.named:
            if name not in self.names:
                raise Denied("IPNV", f"Unexpected parameter {name} in block 2")


def _enter_patch(request: Request) -> Outcome:
    """Connect; a busy port is moved."""
    aid = request.command.aid
    if not aid:
        raise Denied("IIAC", "Empty parameters")
    sides = aid.split(",")
    if len(sides) != 2 or not all(sides):
        raise Denied("IIAC", f"Bad AID: {aid}")
    ingress = ports(sides[0], request.ingress)
    egress = ports(sides[1], request.egress)
    if len(ingress) != len(egress):
        raise Denied("IIAC", f"Bad AID: {len(ingress)} ingress, {len(egress)} egress ports")
    change = request.model.connect(zip(ingress, egress, strict=True), request.now_ns)
    why = "; ".join(f"Cannot connect {a},{b}" for a, b in change.refused)
    return Outcome(change=change, refused=why, partly=len(change.refused) < len(ingress))


def _delete_patch(request: Request) -> Outcome:
    """Disconnect by ingress; free ports are passed over."""
    gone = request.ports(request.ingress)
    return Outcome(change=request.model.disconnect(gone, request.now_ns))


def _patches(request: Request) -> Outcome:
    asked = set(request.ports(request.model.ports))
    circuits = request.model.circuits()
    return Outcome(tuple(f"{a},{b}" for a, b in circuits if a in asked or b in asked))


def _close_shutter(request: Request) -> Outcome:
    asked = request.ports(request.model.ports)
    return Outcome(change=request.model.set_enabled(asked, request.now_ns, enabled=False))


def _open_shutter(request: Request) -> Outcome:
    asked = request.ports(request.model.ports)
    return Outcome(change=request.model.set_enabled(asked, request.now_ns, enabled=True))


def _shutters(request: Request) -> Outcome:
    rows = []
    for port in request.ports(request.model.ports):
        closed = request.model.state(port) is PortState.DISABLED
        rows.append(f"{port}:{'CLOSED' if closed else 'OPEN'}")
    return Outcome(tuple(rows))


def _edit_labels(request: Request) -> Outcome:
    asked = request.ports(request.model.ports)
    if "LABEL" not in request.command.named:
        raise Denied("IPMS", "Too few parameters (0/1) in block 2")
    labels = fields(request.command.named["LABEL"], "&")
    if len(labels) != len(asked):
        raise Denied("IPNV", f"Parameter not valid: {len(labels)} labels, {len(asked)} ports")
    request.model.settings.labels.update(zip(asked, map(unquoted, labels), strict=True))
    return Outcome()


def _labels(request: Request) -> Outcome:
    labels = request.model.settings.labels
    asked = request.ports(request.model.ports)
    return Outcome(tuple(f"{port}:{labels[port]}" for port in asked if port in labels))


def _delete_labels(request: Request) -> Outcome:
    for port in request.ports(request.model.ports):
        request.model.settings.labels.pop(port, None)
    return Outcome()


def _metered(request: Request) -> list[int]:
    if not request.model.has_monitors:
        raise Denied("IIAC", "No power monitors")
    return request.ports(request.model.ports)


def _power(request: Request) -> Outcome:
    asked, model = _metered(request), request.model
    return Outcome(tuple(f"{p}:{model.power_dbm(p, request.now_ns):.2f}" for p in asked))


def _meters(request: Request) -> Outcome:
    averaging = request.model.averaging
    return Outcome(tuple(f"{port}:1550.0,0.00,{averaging}" for port in _metered(request)))


def _header(_request: Request) -> Outcome:
    return Outcome()


def _ne_type(request: Request) -> Outcome:
    model = request.model
    return Outcome((f"{model.vendor},{model.model},OCS,{model.firmware}",))


def _inventory(request: Request) -> Outcome:
    if request.command.aid.upper() not in {"", "OCS", "ALL"}:
        raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    model = request.model
    return Outcome((f"OCS::PN={model.model},SN={model.serial_number},SW={model.firmware}",))


def _equipment(request: Request) -> Outcome:
    """Answer RTRV-EQPT: which AID goes with which PARAMETER."""
    aid = request.command.aid.upper()
    asked = request.command.named.get("PARAMETER", "").upper()
    model, settings = request.model, request.model.settings
    match aid, asked:
        case "SYSTEM", "SIZE" | "":
            rows = [f"SYSTEM:SIZE={model.n}x{model.n}"]
        case "BOOT", "MODE" | "":
            rows = [f"BOOT:MODE={settings.boot_mode}"]
        case "TIMEOUT", "ADMIN" | "USER":
            rows = [f"TIMEOUT:{asked}={settings.timeout_min[asked]}"]
        case "TIMEOUT", "":
            rows = [f"TIMEOUT:{who}={minutes}" for who, minutes in settings.timeout_min.items()]
        case "PMON", "CONFIG" | "" if model.has_monitors:
            rows = [f"PMON::PORT={port},MODE={_side(model, port)}" for port in model.ports]
        case "SYSTEM" | "BOOT" | "TIMEOUT" | "PMON", _:
            raise Denied("IPNV", f"Parameter not valid: {asked}")
        case _:
            raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    return Outcome(tuple(rows))


def _side(model: SwitchModel, port: int) -> str:
    return "INPUT" if model.is_ingress(port) else "OUTPUT"


def _edit_equipment(request: Request) -> Outcome:
    """Obey ED-EQPT: the idle logout and the boot mode."""
    aid, named = request.command.aid.upper(), request.command.named
    settings = request.model.settings
    if not named:
        raise Denied("IPMS", "Too few parameters (0/1) in block 2")
    for name, value in named.items():
        if aid == "TIMEOUT" and name in settings.timeout_min:
            if not value.isdecimal() or int(value) > TIMEOUT_MAX_MIN:
                raise Denied("SSTP", f"Value out of range: {value}")
            settings.timeout_min[name] = int(value)
        elif aid == "BOOT" and name == "MODE":
            if value.upper() not in BOOT_MODES:
                raise Denied("IPNV", f"Parameter not valid: {value}")
            settings.boot_mode = value.upper()
        elif aid in {"TIMEOUT", "BOOT"}:
            raise Denied("IPNV", f"Unexpected parameter {name} in block 2")
        else:
            raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    return Outcome()


def _restart(request: Request) -> Outcome:
    """Obey INIT-SYS: forget alarms, or restart (level 10) as the boot mode says."""
    aid, level = request.command.aid.upper(), request.command.positional[0]
    if aid not in {"SYSTEM", "ALARM"}:
        raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    if level not in {"0", "1", "10"}:
        raise Denied("IPNV", f"Parameter not valid: {level}")
    if (aid, level) != ("SYSTEM", "10"):
        return Outcome()
    return Outcome(change=request.model.restart(request.now_ns))


def _reports(request: Request, *, inhibited: bool) -> Outcome:
    if request.command.aid.upper() not in {"", "ALL", "REPMGR"}:
        raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    request.model.settings.reports_inhibited = inhibited
    return Outcome()


def _reports_inhibited(request: Request) -> Outcome:
    inhibited = request.model.settings.reports_inhibited
    return Outcome((f"REPMGR:{'IND' if inhibited else 'NALM'}",))


def _alarms(request: Request) -> Outcome:
    model = request.model
    failed = [port for port in model.ports if model.state(port) is PortState.FAILED]
    return Outcome(tuple(f"{port},EQPT:MJ,PORTFAIL,SA" for port in failed))


def _set_sid(request: Request) -> Outcome:
    request.model.settings.sid = request.command.positional[0]
    return Outcome()


def _clock(request: Request) -> Outcome:
    return Outcome((f"{request.wall:%y-%m-%d,%H-%M-%S}",))


_PARAMETER = frozenset({"PARAMETER"})
COMMANDS: dict[str, Rule] = {
    "RTRV-HDR": Rule(_header),
    "RTRV-NETYPE": Rule(_ne_type),
    "RTRV-INV": Rule(_inventory),
    "RTRV-EQPT": Rule(_equipment, names=_PARAMETER),
    "ED-EQPT": Rule(_edit_equipment, names=frozenset({"ADMIN", "USER", "MODE"})),
    "ENT-PATCH": Rule(_enter_patch),
    "DLT-PATCH": Rule(_delete_patch),
    "RTRV-PATCH": Rule(_patches),
    "OPR-PORT-SHUTTER": Rule(_close_shutter),
    "RLS-PORT-SHUTTER": Rule(_open_shutter),
    "RTRV-PORT-SHUTTER": Rule(_shutters),
    "ED-PORT-LABEL": Rule(_edit_labels, names=frozenset({"LABEL"})),
    "RTRV-PORT-LABEL": Rule(_labels),
    "DLT-PORT-LABEL": Rule(_delete_labels),
    "RTRV-PORT-POWER": Rule(_power),
    "RTRV-PORT-PMON": Rule(_meters),
    "INIT-SYS": Rule(_restart, least=1, most=1),
    "OPR-ARC-EQPT": Rule(lambda r: _reports(r, inhibited=True), most=1),
    "RLS-ARC-EQPT": Rule(lambda r: _reports(r, inhibited=False), most=1),
    "RTRV-ARC-EQPT": Rule(_reports_inhibited),
    "RTRV-ALM-ALL": Rule(_alarms, most=3),
    "RTRV-ALM-EQPT": Rule(_alarms, most=3),
    "RTRV-ALM-ENV": Rule(_header, most=3),
    "SET-SID": Rule(_set_sid, least=1, most=1),
    "RTRV-TOD": Rule(_clock),
}
