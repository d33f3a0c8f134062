"""The switch itself, without a wire: ports, circuits, mirrors that take their time, and light.

Pure: the clock (`now_ns`, monotonic) is an argument and the randomness a seeded generator. Every
change of the map or of a shutter returns a `Change`: what was made and dropped, and the *light
transitions* that follow from it, which a mover carries out. The map as the control plane tells it
changes at once; the light of a moved circuit is gone at once and back when its mirrors have moved.

Light levels are dBm outside and milliwatts inside. Errors: `drivers.errors.Misuse` for a
configuration that describes no possible unit; the faces check ports before they call.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from statistics import NormalDist

from drivers.emulators.config import EmulatedSwitch, Optics
from drivers.errors import Misuse

NS_PER_MS = 1_000_000
_NORMAL = NormalDist()
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
    leaves, so a swapped cable shows there and not in `made`. `refused` were not made.
    """

    made: tuple[Circuit, ...] = ()
    dropped: tuple[Circuit, ...] = ()
    refused: tuple[Circuit, ...] = ()
    dark: tuple[int, ...] = ()
    light: tuple[Lighting, ...] = ()


@dataclass
class Settings:
    """What an operator can set on the unit; it survives sessions, not a power cycle."""

    sid: str
    boot_mode: str = "RESTORE"
    timeout_min: dict[str, int] = field(default_factory=lambda: {"ADMIN": 0, "USER": 0})
    """TL1 idle logout by role, minutes; 0 is never. The factory setting is not documented."""
    reports_inhibited: bool = False
    labels: dict[int, str] = field(default_factory=dict)


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
        self.averaging = config.optics.averaging
        self.settings = Settings(sid=config.name)
        self._timing, self._rng = config.timing, rng
        self._levels = PowerMeter(config.optics, config.seed)
        self._map: dict[int, int] = {}
        self._by_egress: dict[int, int] = {}
        self._disabled: set[int] = set()
        self._failed = frozenset(config.faults.failed_ports)
        self._denied = frozenset(config.faults.deny_ports)
        self._leaves = {a: b for pair in config.faults.swapped for a, b in (pair, pair[::-1])}
        self._boot_map = self._checked(config)

    def _checked(self, config: EmulatedSwitch) -> dict[int, int]:
        """Return the boot map; every port the configuration names must exist on its side."""
        faults = config.faults
        egress = [b for _, b in config.circuits] + [p for pair in faults.swapped for p in pair]
        wrong = [p for p, _ in config.circuits if not self.is_ingress(p)]
        wrong += [p for p in egress if not self.is_egress(p)]
        wrong += [p for p in config.light.tx if not self.is_ingress(p)]
        wrong += [p for p in config.light.rx if not self.is_egress(p)]
        wrong += [p for p in (*faults.failed_ports, *faults.deny_ports) if not self.is_port(p)]
        if wrong:
            raise Misuse(
                f"{config.name}: no such port on its side: {', '.join(map(str, wrong))} "
                f"(ingress 1..{self.n}, egress {self.n + 1}..{2 * self.n})"
            )
        boot = dict(config.circuits)
        if len(boot) != len(config.circuits) or len(set(boot.values())) != len(boot):
            raise Misuse(f"{config.name}: circuits use a port twice")
        return boot

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
        if port in self._failed:
            return PortState.FAILED
        return PortState.DISABLED if port in self._disabled else PortState.ENABLED

    def power_dbm(self, port: int, now_ns: int) -> float:
        """Return what the port's meter shows: launched light on ingress, averaged on egress."""
        if port in self._disabled:
            return self._levels.floor_dbm
        if self.is_ingress(port):
            return self._levels.launch_dbm
        return self._levels.read_dbm(port, now_ns)

    def boot(self, now_ns: int, found: Mapping[int, int] | None = None) -> Change:
        """Come up lit at once: with the light that mirrors still hold, else with the boot map.

        `found` tells where light leaves for which ingress port; a unit whose controller died
        finds its mirrors where they were.
        """
        back = {self._exit(port): port for port in self.ports}
        held = {a: back[b] for a, b in (found or {}).items()}
        return self._retarget(held or self._boot_map, now_ns, at_once=True)

    def restart(self, now_ns: int) -> Change:
        """Go dark and come back as the boot mode says: empty (DARK) or as before (RESTORE)."""
        kept = dict(self._map) if self.settings.boot_mode == "RESTORE" else {}
        self._disabled.clear()
        return self._retarget(kept, now_ns, blink=True)

    def connect(self, pairs: Iterable[Circuit], now_ns: int, *, replace: bool = False) -> Change:
        """Make circuits; a busy port is moved, so both old partners of a pair become free.

        With `replace` all others are dropped, and everything blinks unless `only_is_hitless`.
        Pairs with a denied port are left out and returned in `refused`.
        """
        wanted = list(pairs)
        refused = tuple(p for p in wanted if self._denied.intersection(p))
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
        hit = [c for c in self.circuits() if touched.intersection(c)]
        before = [c for c in hit if self._passes(c)]
        if enabled:
            self._disabled -= touched
            return Change(light=self._aim([c for c in hit if self._passes(c)], now_ns))
        self._disabled |= touched
        self._levels.darken([self._exit(e) for _, e in before], now_ns)
        return Change(dark=tuple(a for a, _ in before))

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
        self._levels.darken([self._exit(e) for _, e in gone], now_ns)
        lit = self._aim([c for c in come if self._passes(c)], now_ns, at_once=at_once)
        dark = tuple(sorted({a for a, _ in gone}))
        return Change(tuple(come), tuple(gone), refused, dark, lit)

    def _aim(
        self, circuits: list[Circuit], now_ns: int, *, at_once: bool = False
    ) -> tuple[Lighting, ...]:
        """Draw each circuit's switching time and tell the meters when its light is there."""
        lit = []
        for circuit in circuits:
            at_ns = now_ns if at_once else now_ns + self._switching_ns()
            leaves = self._exit(circuit[1])
            self._levels.lighten(leaves, circuit, at_ns, now_ns)
            lit.append(Lighting(at_ns, circuit[0], leaves))
        return tuple(lit)

    def _exit(self, egress: int) -> int:
        """Return the egress port through which light for `egress` really leaves."""
        return self._leaves.get(egress, egress)

    def _passes(self, circuit: Circuit) -> bool:
        return not any(port in self._failed or port in self._disabled for port in circuit)

    def _switching_ns(self) -> int:
        timing = self._timing
        if timing.distribution == "fixed":
            return round(timing.switch_ms * NS_PER_MS)
        return round(max(0.0, self._rng.gauss(timing.switch_ms, timing.switch_sd_ms)) * NS_PER_MS)


class PowerMeter:
    """Egress meters: a moving average (boxcar) of the light over 10 ms x 2^(averaging - 1).

    After a connect the reading therefore climbs for one window, and after a disconnect it sinks.
    """

    def __init__(self, optics: Optics, seed: int) -> None:
        self.launch_dbm, self.floor_dbm = optics.launch_dbm, optics.floor_dbm
        self._window_ns = 10 * NS_PER_MS * 2 ** (optics.averaging - 1)
        self._loss_db, self._sd_db, self._seed = optics.insertion_loss_db, optics.loss_sd_db, seed
        self._steps: dict[int, list[tuple[int, float]]] = {}
        """Per egress port the light in mW from each instant on, in order of time."""

    def loss_db(self, circuit: Circuit) -> float:
        """Return a circuit's insertion loss: the same whenever it is made, never negative."""
        name = f"{self._seed}:{circuit[0]}:{circuit[1]}".encode()
        drawn = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big")
        # A hash, not a generator: seeding one for each of 512 circuits would delay the reply.
        return max(0.0, self._loss_db + self._sd_db * _NORMAL.inv_cdf((drawn + 0.5) / 2**48))

    def darken(self, ports: Iterable[int], now_ns: int) -> None:
        """Light is gone from these egress ports, and so is what was still to come."""
        for port in ports:
            self._step(port, now_ns, 0.0, now_ns)

    def lighten(self, port: int, circuit: Circuit, at_ns: int, now_ns: int) -> None:
        """Light of `circuit` leaves through `port` from `at_ns` on."""
        milliwatts = 10 ** ((self.launch_dbm - self.loss_db(circuit)) / 10)
        self._step(port, at_ns, milliwatts, now_ns)

    def _step(self, port: int, at_ns: int, milliwatts: float, now_ns: int) -> None:
        steps = [s for s in self._steps.get(port, []) if s[0] <= now_ns]
        horizon = now_ns - self._window_ns
        while len(steps) > 1 and steps[1][0] <= horizon:
            del steps[0]
        if not steps or steps[-1][1] != milliwatts:
            steps.append((at_ns, milliwatts))
        self._steps[port] = steps

    def read_dbm(self, port: int, now_ns: int) -> float:
        """Average over the window that ends now; below the floor the meter shows the floor."""
        start, energy = now_ns - self._window_ns, 0.0
        steps = self._steps.get(port) or [(now_ns, 0.0)]
        ends = [at for at, _ in steps[1:]] + [now_ns]
        for (at_ns, milliwatts), end_ns in zip(steps, ends, strict=True):
            energy += milliwatts * max(0, min(end_ns, now_ns) - max(at_ns, start))
        mean = energy / self._window_ns
        return max(self.floor_dbm, 10 * math.log10(mean)) if mean > 0 else self.floor_dbm
