"""TL1 commands about light levels and pulses: power, meters, attenuators, the pulsed shutter.

Pure acts, listed in `OPTICS`. Errors: `Denied`. Block-2 names of SET-PORT-PMON other than WAVE, and
the limits of a pulse, are not documented anywhere public.
"""

from __future__ import annotations

from drivers.emulators.faces.tl1_grammar import Denied, ports
from drivers.emulators.faces.tl1_rules import Outcome, Request, Rule, number, whole
from drivers.emulators.flap import Pattern
from drivers.emulators.meter import Attenuation, MeterSetup, Mode

PULSE_MAX_MS = 3_600_000
CYCLES_MAX = 65_535
WAVELENGTHS_NM = (1260.0, 1640.0)
OFFSETS_DB = (-100.0, 100.0)
AVERAGINGS = (1, 8)
LEVELS = (-100.0, 100.0)


def _metered(request: Request, allowed: range | None = None) -> list[int]:
    if not request.model.has_monitors:
        raise Denied("IIAC", "No power monitors")
    return request.ports(request.model.ports if allowed is None else allowed)


def _power(request: Request) -> Outcome:
    asked, model = _metered(request), request.model
    return Outcome(tuple(f"{p}:{model.power_dbm(p, request.now_ns):.2f}" for p in asked))


def _meters(request: Request) -> Outcome:
    rows = []
    for port in _metered(request):
        setup = request.model.levels.setup(port)
        rows.append(f"{port}:{setup.wavelength_nm:.1f},{setup.offset_db:.2f},{setup.averaging}")
    return Outcome(tuple(rows))


def _set_meters(request: Request) -> Outcome:
    """Set what is named; the rest of a port's setup stays."""
    asked, named, levels = _metered(request), request.command.named, request.model.levels
    if not named:
        raise Denied("IPMS", "Too few parameters (0/1) in block 2")
    for port in asked:
        before = levels.setup(port)
        after = MeterSetup(
            number(named.get("WAVE", str(before.wavelength_nm)), *WAVELENGTHS_NM),
            number(named.get("OFFSET", str(before.offset_db)), *OFFSETS_DB),
            whole(named.get("AVERAGE", str(before.averaging)), *AVERAGINGS),
        )
        levels.set_up(port, after)
    return Outcome()


def _attenuations(request: Request) -> Outcome:
    """Answer mode, level and reference of each output; empty where the mode has none."""
    rows = []
    for port in _metered(request, request.egress):
        found = request.model.levels.attenuation(port)
        level = "" if found.mode is Mode.NONE else f"{found.level:.1f}"
        reference = found.reference or request.model.peer(port) or ""
        shown = reference if found.mode is Mode.RELATIVE else ""
        rows.append(f"{port}:{found.mode},{level},{shown}")
    return Outcome(tuple(rows))


def _attenuate(request: Request) -> Outcome:
    """Set the attenuators of output ports."""
    named = request.command.named
    if "MODE" not in named:
        raise Denied("IPMS", "Too few parameters (0/1) in block 2")
    if named["MODE"].upper() not in list(Mode):
        raise Denied("IDNV", f"Invalid value {named['MODE']}")
    mode = Mode(named["MODE"].upper())
    asked = _metered(request, request.egress)
    if mode is Mode.NONE and "LEVEL" in named:
        raise Denied("IPNV", "Unexpected parameter LEVEL in block 2")
    if mode is not Mode.NONE and "LEVEL" not in named:
        raise Denied("IPMS", "Too few parameters (1/2) in block 2")
    if mode is not Mode.RELATIVE and "REFS" in named:
        raise Denied("IPNV", "Unexpected parameter REFS in block 2")
    level = number(named.get("LEVEL", "0"), *LEVELS)
    references: list[int | None] = [None] * len(asked)
    if "REFS" in named:
        references = [*ports(named["REFS"], request.ingress)]
        if len(references) != len(asked):
            raise Denied("IPNV", f"Parameter not valid: {len(references)} refs, {len(asked)} ports")
    for port, reference in zip(asked, references, strict=True):
        request.model.levels.attenuate(port, Attenuation(mode, level, reference), request.now_ns)
    return Outcome()


def _patterns(request: Request) -> Outcome:
    asked, flaps = request.ports(request.model.ports), request.model.flaps
    return Outcome(tuple(f"{port}:" + ",".join(map(str, flaps.pattern(port))) for port in asked))


def _set_pattern(request: Request) -> Outcome:
    off_ms, on_ms, cycles = request.command.positional
    pattern = Pattern(
        whole(off_ms, 1, PULSE_MAX_MS), whole(on_ms, 1, PULSE_MAX_MS), whole(cycles, 1, CYCLES_MAX)
    )
    request.model.flaps.set_pattern(request.ports(request.model.ports), pattern)
    return Outcome()


def _start_pattern(request: Request) -> Outcome:
    asked = request.ports(request.model.ports)
    return Outcome(change=request.model.start_flaps(asked, request.now_ns))


def _stop_pattern(request: Request) -> Outcome:
    asked = request.ports(request.model.ports)
    return Outcome(change=request.model.stop_flaps(asked, request.now_ns))


OPTICS: dict[str, Rule] = {
    "RTRV-PORT-POWER": Rule(_power),
    "RTRV-PORT-PMON": Rule(_meters),
    "SET-PORT-PMON": Rule(_set_meters, names=frozenset({"WAVE", "OFFSET", "AVERAGE"})),
    "RTRV-PORT-ATTEN": Rule(_attenuations),
    "SET-PORT-ATTEN": Rule(_attenuate, names=frozenset({"MODE", "LEVEL", "REFS"})),
    "ENT-PORT-FLAP": Rule(_set_pattern, least=3, most=3),
    "OPR-PORT-FLAP": Rule(_start_pattern),
    "RLS-PORT-FLAP": Rule(_stop_pattern),
    "RTRV-PORT-FLAP": Rule(_patterns),
}
