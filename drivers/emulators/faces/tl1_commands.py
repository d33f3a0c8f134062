"""What each TL1 command of the unit does: a table of verbs, their parameters and their acts.

Pure: a `Request` in, an `Outcome` (rows, or a `Change`) out, or `Denied`. Light levels and pulses
are in `tl1_optics`, accounts in `tl1_users`.
"""

from __future__ import annotations

from datetime import UTC, datetime

from drivers.emulators.faces.tl1_grammar import Denied, fields, ports, unquoted
from drivers.emulators.faces.tl1_optics import OPTICS
from drivers.emulators.faces.tl1_rules import Outcome, Request, Rule, whole
from drivers.emulators.faces.tl1_users import USERS
from drivers.emulators.model import PortState, SwitchModel

TIMEOUT_MAX_MIN = 60
BOOT_MODES = ("DARK", "RESTORE")
LEVELS = {"SYSTEM": ("0", "1", "10"), "ALARM": ("1", "2", "3")}
LAST_YEAR = 2037
"""Its clock counts seconds since 1970 in 32 bits."""


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
            settings.timeout_min[name] = whole(value, 0, TIMEOUT_MAX_MIN)
        elif aid == "BOOT" and name == "MODE":
            if value.upper() not in BOOT_MODES:
                raise Denied("IDNV", f"Invalid value {value}")
            settings.boot_mode = value.upper()
        elif aid in {"TIMEOUT", "BOOT"}:
            raise Denied("IPNV", f"Unexpected parameter {name} in block 2")
        else:
            raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    return Outcome()


def _restart(request: Request) -> Outcome:
    """Obey INIT-SYS: start afresh as the boot mode says, or clear alarms.

    Level 0 leaves the light alone, 1 starts the switching afresh, 10 the whole unit with it, so
    that everybody must log in again. A fault that is still there keeps its alarm.
    """
    aid, level = request.command.aid.upper(), request.command.positional[0]
    if aid not in LEVELS:
        raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    if level not in LEVELS[aid]:
        raise Denied("IDNV", f"Invalid value {level}")
    if aid != "SYSTEM" or level == "0":
        return Outcome()
    request.model.starts += level == "10"
    return Outcome(change=request.model.restart(request.now_ns))


def _reports(request: Request, *, inhibited: bool) -> Outcome:
    if request.command.aid.upper() not in {"", "ALL", "REPMGR"}:
        raise Denied("IIAC", f"Bad AID: {request.command.aid}")
    request.model.settings.reports_inhibited = inhibited
    return Outcome()


def _reports_inhibited(request: Request) -> Outcome:
    inhibited = request.model.settings.reports_inhibited
    return Outcome((f"REPMGR:{'IND' if inhibited else 'NALM'},,",))


def _alarms(request: Request) -> Outcome:
    """Answer failed ports; block 1 asks for a severity, a condition and an effect on service."""
    asked = request.ports(request.model.ports)
    failed = [port for port in asked if request.model.state(port) is PortState.FAILED]
    alarm = ("MJ", "PORTFAIL", "SA")
    wanted = (word.upper() for word in request.command.positional)
    if any(word and word != said for word, said in zip(wanted, alarm, strict=False)):
        return Outcome()
    return Outcome(tuple(f"{port},EQPT:{','.join(alarm)}" for port in failed))


def _set_sid(request: Request) -> Outcome:
    request.model.settings.sid = request.command.positional[0]
    return Outcome()


def _clock(request: Request) -> Outcome:
    return Outcome((f"{request.wall:%y-%m-%d,%H-%M-%S}",))


def _set_clock(request: Request) -> Outcome:
    """Set the date, and the time of day where it is given."""
    date, *time = request.command.positional
    numbers = f"{date}-{time[0] if time else f'{request.wall:%H-%M-%S}'}".split("-")
    if len(numbers) != 6 or not all(n.isascii() and n.isdecimal() for n in numbers):
        raise Denied("IPNV", "Parameter not valid")
    year, month, day, hour, minute, second = map(int, numbers)
    if 2000 + year > LAST_YEAR:
        raise Denied("SSTP", f"Value out of range: {date}")
    try:
        wanted = datetime(2000 + year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError as error:
        raise Denied("IDNV", "Bad parameter value") from error
    request.model.settings.clock_ahead += wanted - request.wall.replace(microsecond=0)
    return Outcome()


_PARAMETER = frozenset({"PARAMETER"})
COMMANDS: dict[str, Rule] = {
    "RTRV-HDR": Rule(_header),
    "RTRV-NETYPE": Rule(_ne_type),
    "RTRV-INV": Rule(_inventory),
    "RTRV-EQPT": Rule(_equipment, names=_PARAMETER),
    "ED-EQPT": Rule(_edit_equipment, names=frozenset({"ADMIN", "USER", "MODE"}), admin=True),
    "ENT-PATCH": Rule(_enter_patch),
    "DLT-PATCH": Rule(_delete_patch),
    "RTRV-PATCH": Rule(_patches),
    "OPR-PORT-SHUTTER": Rule(_close_shutter),
    "RLS-PORT-SHUTTER": Rule(_open_shutter),
    "RTRV-PORT-SHUTTER": Rule(_shutters),
    "ED-PORT-LABEL": Rule(_edit_labels, names=frozenset({"LABEL"})),
    "RTRV-PORT-LABEL": Rule(_labels),
    "DLT-PORT-LABEL": Rule(_delete_labels),
    "INIT-SYS": Rule(_restart, least=1, most=1, admin=True),
    "OPR-ARC-EQPT": Rule(lambda r: _reports(r, inhibited=True), most=1),
    "RLS-ARC-EQPT": Rule(lambda r: _reports(r, inhibited=False), most=1),
    "RTRV-ARC-EQPT": Rule(_reports_inhibited),
    "RTRV-ALM-ALL": Rule(_alarms, most=3),
    "RTRV-ALM-EQPT": Rule(_alarms, most=3),
    "RTRV-ALM-ENV": Rule(_header, most=3),
    "SET-SID": Rule(_set_sid, least=1, most=1, admin=True),
    "ED-DAT": Rule(_set_clock, least=1, most=2, admin=True),
    "RTRV-TOD": Rule(_clock),
    **OPTICS,
    **USERS,
}
