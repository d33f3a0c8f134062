"""The switch itself, without a wire: ports, circuits, mirrors that take their time, and light.

Pure: the clock (`now_ns`, monotonic) is an argument and the randomness a seeded generator. Every
change of the map or of a shutter returns a `Change`: what was made and dropped, and the *light
transitions* that follow from it, which a mover carries out. The map as the control plane tells it
changes at once; the light of a moved circuit is gone at once and back when its mirrors have moved.

A pulsed shutter closes and opens ports by itself: whoever runs the unit calls `advance` when
`due_ns` has come. Errors: `drivers.errors.Misuse` for a configuration that describes no possible
unit; the faces check ports before they call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from drivers.base import NS_PER_MS
from drivers.emulators.config import EmulatedSwitch, Faults
from drivers.emulators.flap import Flaps
from drivers.emulators.meter import PowerMeter
from drivers.emulators.settings import Settings
from drivers.errors import Misuse

Circuit = tuple[int, int]


class PortState(StrEnum):
    """The letter by which the unit tells a port's state."""

    ENABLED = "E"
    DISABLED = "D"
    FAILED = "F"


@dataclass(frozen=True)
class Lighting:
    """From `at_ns` on, what enters `ingress` leaves through `egress`."""

    at_ns: int
    ingress: int
    egress: int


@dataclass(frozen=True)
class Change:
    """What one command did.

    `dark` are ingress ports whose light goes at once; whatever lighting was still due for them is
    void. `light` are the lightings that follow. Egress ports in `light` are where light really
    arrives, so a swapped cable shows there and not in `made`. `refused` were not made.
    """

    made: tuple[Circuit, ...] = ()
    dropped: tuple[Circuit, ...] = ()
    refused: tuple[Circuit, ...] = ()
    dark: tuple[int, ...] = ()
    light: tuple[Lighting, ...] = ()


class SwitchModel:
    """An N x N unit: ingress ports 1..N, egress ports N+1..2N."""

    def __init__(self, config: EmulatedSwitch, rng: Random) -> None:
        if config.ports < 1:
            raise Misuse(f"{config.name}: ports must be at least 1, not {config.ports}")
        if not 1 <= config.optics.averaging <= 8:
            raise Misuse(f"{config.name}: optics.averaging must be 1..8")
        self.n = config.ports
        self.vendor = "Polatis"
        self.model = re.sub(r"-\d+x\d+-", f"-{self.n}x{self.n}-", config.model)
        self.serial_number, self.firmware = config.serial_number, config.firmware
        self.only_is_hitless = config.only_is_hitless
        self.has_monitors = not config.model.startswith("I-")
        """An I-OST has no power meters."""
        self.settings = Settings(sid=config.name)
        self.levels = PowerMeter(config.optics, config.seed)
        self.flaps = Flaps()
        self.starts = 1
        """How often its controller has come up; sessions do not outlive one."""
        self._timing, self._rng = config.timing, rng
        self._map: dict[int, int] = {}
        self._by_egress: dict[int, int] = {}
        self._disabled: set[int] = set()
        self._pulsed: set[int] = set()
        """Ports that a running pattern holds closed now."""
        self._ready_ns: dict[int, int] = {}
        """Ingress port -> when the mirrors of its circuit have moved."""
        self._faults = config.faults
        self._stuck: dict[int, int | None] = {}
        """Stuck port -> the port that its mirror stood at."""
        self._swap()
        self._boot_map = self._checked(config)

    def _checked(self, config: EmulatedSwitch) -> dict[int, int]:
        """Return the boot map; every port the configuration names must exist on its side."""
        ingress = [p for p, _ in config.circuits] + [*config.light.tx]
        egress = [p for _, p in config.circuits] + [*config.light.rx]
        self._refuse_strangers(ingress, egress)
        self._check_faults(config.faults)
        boot = dict(config.circuits)
        if len(boot) != len(config.circuits) or len(set(boot.values())) != len(boot):
            raise Misuse(f"{config.name}: circuits use a port twice")
        return boot

    def _check_faults(self, faults: Faults) -> None:
        swapped = [port for pair in faults.swapped for port in pair]
        named = {*faults.failed_ports, *faults.stuck_ports, *faults.deny_ports}
        ingress = [port for port in named if port <= self.n]
        self._refuse_strangers(ingress, [*swapped, *(named - {*ingress})])
        if len(set(swapped)) != len(swapped):
            raise Misuse(f"{self.settings.sid}: faults.swapped names a port twice")

    def _refuse_strangers(self, ingress: Iterable[int], egress: Iterable[int]) -> None:
        wrong = [port for port in ingress if not self.is_ingress(port)]
        wrong += [port for port in egress if not self.is_egress(port)]
        if wrong:
            raise Misuse(
                f"{self.settings.sid}: no such port on its side: {', '.join(map(str, wrong))} "
                f"(ingress 1..{self.n}, egress {self.n + 1}..{2 * self.n})"
            )

    def is_ingress(self, port: int) -> bool:
        """Say whether `port` is an ingress port of this unit."""
        return 1 <= port <= self.n

    def is_egress(self, port: int) -> bool:
        """Say whether `port` is an egress port of this unit."""
        return self.n < port <= 2 * self.n

    def is_port(self, port: int) -> bool:
        """Say whether the unit has this port."""
        return 1 <= port <= 2 * self.n

    @property
    def ports(self) -> range:
        """All port numbers."""
        return range(1, 2 * self.n + 1)

    def circuits(self) -> list[Circuit]:
        """Return the commanded map, by ingress."""
        return sorted(self._map.items())

    def peer(self, port: int) -> int | None:
        """Return the other end of the circuit on `port`, either side; None when free."""
        return self._map.get(port) if self.is_ingress(port) else self._by_egress.get(port)

    def state(self, port: int) -> PortState:
        """Return a port's state; a failed port stays failed."""
        if port in self._faults.failed_ports:
            return PortState.FAILED
        return PortState.DISABLED if port in self._disabled else PortState.ENABLED

    def power_dbm(self, port: int, now_ns: int) -> float:
        """Return what the port's meter shows: launched light on ingress, averaged on egress."""
        if port in self._disabled:
            dbm = self.levels.floor_dbm
        elif self.is_ingress(port):
            dbm = self.levels.launch_dbm
        else:
            dbm = self.levels.read_dbm(port, now_ns)
        return self.levels.shown_dbm(port, dbm)

    def boot(self, now_ns: int, found: Mapping[int, int] | None = None) -> Change:
        """Come up lit at once: with the light that mirrors still hold, else with the boot map.

        `found` tells where light leaves for which ingress port; a unit whose controller died
        finds its mirrors where they were.
        """
        back = {self._exit(port): port for port in self.ports}
        held = {a: back[b] for a, b in (found or {}).items()}
        change = self._retarget(held or self._boot_map, now_ns, at_once=True)
        self._stick()
        return change

    def break_down(self, faults: Faults, now_ns: int) -> Change:
        """Have these faults instead of those so far; what they block is dark at once.

        What was blocked, and is not any more, is lit. Raises `Misuse` for ports that are not there.
        """
        self._check_faults(faults)
        before = self._shining()
        self._faults = faults
        self._swap()
        self._stick()
        after = self._shining()
        gone = sorted(before.items() - after.items())
        self.levels.darken([egress for (_, egress), _ in gone], now_ns)
        come = sorted(circuit for circuit, _ in after.items() - before.items())
        lit = self._aim(come, now_ns, at_once=True)
        return Change(dark=tuple(ingress for (ingress, _), _ in gone), light=lit)

    def lose_power(self, now_ns: int) -> Change:
        """Go dark and forget the map, shutters and sessions; what was set on the unit stays."""
        self.starts += 1
        self._open_all()
        return self._retarget({}, now_ns)

    def restart(self, now_ns: int) -> Change:
        """Go dark and come back as the boot mode says: empty (DARK) or as before (RESTORE).

        All shutters are open then, and none is pulsed.
        """
        kept = dict(self._map) if self.settings.boot_mode == "RESTORE" else {}
        self._open_all()
        return self._retarget(kept, now_ns, blink=True)

    def connect(self, pairs: Iterable[Circuit], now_ns: int, *, replace: bool = False) -> Change:
        """Make circuits; a busy port is moved, so both old partners of a pair become free.

        With `replace` all others are dropped, and everything blinks unless `only_is_hitless`.
        Pairs with a denied port are left out and returned in `refused`.
        """
        wanted = list(pairs)
        refused = tuple(p for p in wanted if not {*p}.isdisjoint(self._faults.deny_ports))
        target = {} if replace else dict(self._map)
        holder = {} if replace else dict(self._by_egress)
        for ingress, egress in (p for p in wanted if p not in refused):
            if (old := holder.pop(egress, None)) is not None:
                target.pop(old, None)
            if (freed := target.pop(ingress, None)) is not None:
                holder.pop(freed, None)
            target[ingress], holder[egress] = egress, ingress
        blink = replace and not self.only_is_hitless
        return self._retarget(target, now_ns, blink=blink, refused=refused)

    def disconnect(self, ingress: Iterable[int], now_ns: int) -> Change:
        """Drop the circuits on these ingress ports; free ports are passed over."""
        gone = set(ingress)
        return self._retarget({a: b for a, b in self._map.items() if a not in gone}, now_ns)

    def set_enabled(self, ports: Iterable[int], now_ns: int, *, enabled: bool) -> Change:
        """Open or close shutters. Opening takes as long as a move; closing is at once."""
        touched = {p for p in ports if (p in self._disabled) == enabled}
        if enabled:
            return Change(light=self._open(self._disabled, touched, now_ns))
        return Change(dark=self._close(self._disabled, touched, now_ns))

    @property
    def due_ns(self) -> int | None:
        """When `advance` has something to do; None where nothing happens by itself."""
        return self.flaps.due_ns

    def start_flaps(self, ports: Iterable[int], now_ns: int) -> Change:
        """Run the patterns of ports: closed at once, then open, as often as they say."""
        self.flaps.start(ports, now_ns)
        return self.advance(now_ns)

    def stop_flaps(self, ports: Iterable[int], now_ns: int) -> Change:
        """End the patterns of ports and leave them open."""
        stopped = set(ports)
        self.flaps.stop(stopped)
        closed = stopped & self._pulsed
        return Change(light=self._open(self._pulsed, closed, now_ns, pulse=True))

    def advance(self, now_ns: int) -> Change:
        """Do what patterns have due by now; meters see it at the instants it was due."""
        dark: set[int] = set()
        light: dict[int, Lighting] = {}
        while (due_ns := self.flaps.due_ns) is not None and due_ns <= now_ns:
            at_ns, close, opened = self.flaps.edge()
            for ingress in self._close(self._pulsed, close, at_ns):
                dark.add(ingress)
                light.pop(ingress, None)
            light.update(
                (x.ingress, x) for x in self._open(self._pulsed, opened, at_ns, pulse=True)
            )
        return Change(dark=tuple(sorted(dark)), light=tuple(light.values()))

    def _close(self, shut: set[int], ports: set[int], now_ns: int) -> tuple[int, ...]:
        """Add `ports` to those `shut`; return the ingress ports that are dark by it."""
        hit = [c for c in self.circuits() if ports.intersection(c) and self._passes(c)]
        shut.update(ports)
        self.levels.darken([egress for _, egress in hit], now_ns)
        return tuple(ingress for ingress, _ in hit)

    def _open(
        self, shut: set[int], ports: set[int], now_ns: int, *, pulse: bool = False
    ) -> tuple[Lighting, ...]:
        """Take `ports` from those `shut`; return the light that comes back by it."""
        hit = [c for c in self.circuits() if ports.intersection(c) and not self._passes(c)]
        shut.difference_update(ports)
        return self._aim([c for c in hit if self._passes(c)], now_ns, at_once=pulse)

    def _retarget(
        self,
        target: Mapping[int, int],
        now_ns: int,
        *,
        blink: bool = False,
        at_once: bool = False,
        refused: tuple[Circuit, ...] = (),
    ) -> Change:
        """Turn the map into `target`; with `blink` even circuits that stay are dropped first."""
        before, after = set(self._map.items()), set(target.items())
        gone = sorted(before if blink else before - after)
        come = sorted(after if blink else after - before)
        self._map = dict(target)
        self._by_egress = {b: a for a, b in target.items()}
        self.levels.darken([egress for _, egress in gone], now_ns)
        lit = self._aim([c for c in come if self._passes(c)], now_ns, at_once=at_once)
        dark = tuple(sorted({a for a, _ in gone}))
        return Change(tuple(come), tuple(gone), refused, dark, lit)

    def _aim(
        self, circuits: list[Circuit], now_ns: int, *, at_once: bool = False
    ) -> tuple[Lighting, ...]:
        """Draw each circuit's switching time and tell the meters when its light is there.

        `at_once` is light whose mirrors do not move: there as soon as an earlier move has ended.
        """
        lit = []
        for circuit in circuits:
            moved_ns = now_ns if at_once else now_ns + self._switching_ns()
            at_ns = max(moved_ns, self._ready_ns.get(circuit[0], 0)) if at_once else moved_ns
            self._ready_ns[circuit[0]] = at_ns
            self.levels.lighten(circuit[1], circuit, at_ns, now_ns)
            lit.append(Lighting(at_ns, circuit[0], self._exit(circuit[1])))
        return tuple(lit)

    def _open_all(self) -> None:
        self.flaps.stop(self.ports)
        self._disabled.clear()
        self._pulsed.clear()

    def _swap(self) -> None:
        swapped = self._faults.swapped
        self._arrives = {a: b for pair in swapped for a, b in (pair, pair[::-1])}

    def _stick(self) -> None:
        """Remember where the mirrors of stuck ports stand, for those that were not stuck before."""
        self._stuck = {p: self._stuck.get(p, self.peer(p)) for p in self._faults.stuck_ports}

    def _exit(self, egress: int) -> int:
        """Return the egress port at whose cable light for `egress` really arrives."""
        return self._arrives.get(egress, egress)

    def _shining(self) -> dict[Circuit, int]:
        """Return the circuits that light passes or is about to, and where it arrives."""
        return {c: self._exit(c[1]) for c in self.circuits() if self._passes(c)}

    def _passes(self, circuit: Circuit) -> bool:
        shut = (self._faults.failed_ports, self._disabled, self._pulsed)
        if any(port in ports for port in circuit for ports in shut):
            return False
        return all(self._stuck.get(a, b) == b for a, b in (circuit, circuit[::-1]))

    def _switching_ns(self) -> int:
        timing = self._timing
        if timing.distribution == "fixed":
            return round(timing.switch_ms * NS_PER_MS)
        return round(max(0.0, self._rng.gauss(timing.switch_ms, timing.switch_sd_ms)) * NS_PER_MS)
