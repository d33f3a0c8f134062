"""Optical power: the loss of each circuit, attenuators, and what the power meters show of it.

Pure. Light levels are dBm outside and milliwatts inside. A meter shows a moving average (boxcar)
over 10 ms x 2^(averaging - 1): after a connect the reading climbs for one window, and after a
disconnect it sinks. Attenuation acts on power only: attenuated light still carries packets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

from drivers.base import NS_PER_MS
from drivers.emulators.config import Optics

LIGHT_NM = 1550.0
"""Wavelength of the light; also the one for which meters are calibrated as they come."""
WINDOW_MAX_NS = 10 * NS_PER_MS * 2**7
_NORMAL = NormalDist()
Circuit = tuple[int, int]


@dataclass(frozen=True)
class MeterSetup:
    """How one port measures. `offset_db` is added to what is shown and to nothing else."""

    wavelength_nm: float = LIGHT_NM
    offset_db: float = 0.0
    averaging: int = 1


class Mode(StrEnum):
    """How an attenuator holds its port's output."""

    NONE = "NONE"
    ABSOLUTE = "ABSOLUTE"
    """At `level` dBm at most, following the input."""
    RELATIVE = "RELATIVE"
    """At `level` dB above the input of a reference port at most."""
    CONVERGED = "CONVERGED"
    """As absolute when it is set; from then on the attenuation stays, whatever the input."""


@dataclass
class Attenuation:
    """What one egress port's attenuator is set to: `level` in dBm, or dB where relative."""

    mode: Mode = Mode.NONE
    level: float = 0.0
    reference: int | None = None
    """Ingress port for `Mode.RELATIVE`; None: the one that is connected."""
    held_db: float | None = None
    """For `Mode.CONVERGED`, the attenuation found when there was light."""


class PowerMeter:
    """The light on every egress port, and the meters of all ports."""

    def __init__(self, optics: Optics, seed: int) -> None:
        self.launch_dbm, self.floor_dbm = optics.launch_dbm, optics.floor_dbm
        self._loss_db, self._sd_db, self._seed = optics.insertion_loss_db, optics.loss_sd_db, seed
        self._steps: dict[int, list[tuple[int, float]]] = {}
        """Per egress port the light in mW from each instant on, in order of time."""
        self._sources: dict[int, tuple[Circuit, int]] = {}
        """Per egress port the circuit that lights it, and since when."""
        self._as_comes = MeterSetup(averaging=optics.averaging)
        self._setups: dict[int, MeterSetup] = {}
        self._attenuations: dict[int, Attenuation] = {}

    def setup(self, port: int) -> MeterSetup:
        """Return how a port measures."""
        return self._setups.get(port, self._as_comes)

    def set_up(self, port: int, setup: MeterSetup) -> None:
        """Let a port measure otherwise from now on."""
        self._setups[port] = setup

    def attenuation(self, port: int) -> Attenuation:
        """Return what a port's attenuator is set to."""
        return self._attenuations.get(port, Attenuation())

    def attenuate(self, port: int, attenuation: Attenuation, now_ns: int) -> None:
        """Set the attenuator of an egress port; the loop settles faster than any meter sees."""
        self._attenuations[port] = attenuation
        if port in self._sources:
            circuit, since_ns = self._sources[port]
            self._step(port, max(since_ns, now_ns), self._milliwatts(port, circuit), now_ns)

    def loss_db(self, circuit: Circuit) -> float:
        """Return a circuit's insertion loss: the same whenever it is made, never negative."""
        name = f"{self._seed}:{circuit[0]}:{circuit[1]}".encode()
        drawn = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big")
        # A hash, not a generator: seeding one for each of 512 circuits would delay the reply.
        return max(0.0, self._loss_db + self._sd_db * _NORMAL.inv_cdf((drawn + 0.5) / 2**48))

    def darken(self, ports: Iterable[int], now_ns: int) -> None:
        """Light is gone from these egress ports, and so is what was still to come."""
        for port in ports:
            self._sources.pop(port, None)
            self._step(port, now_ns, 0.0, now_ns)

    def lighten(self, port: int, circuit: Circuit, at_ns: int, now_ns: int) -> None:
        """Light of `circuit` leaves through `port` from `at_ns` on."""
        self._sources[port] = (circuit, at_ns)
        self._step(port, at_ns, self._milliwatts(port, circuit), now_ns)

    def _milliwatts(self, port: int, circuit: Circuit) -> float:
        """Return what leaves through `port`: all that its attenuator lets through."""
        whole_dbm = self.launch_dbm - self.loss_db(circuit)
        set_to = self.attenuation(port)
        match set_to.mode:
            case Mode.NONE:
                lost_db = 0.0
            case Mode.CONVERGED:
                if set_to.held_db is None:
                    set_to.held_db = max(0.0, whole_dbm - set_to.level)
                lost_db = set_to.held_db
            case Mode.ABSOLUTE:
                lost_db = max(0.0, whole_dbm - set_to.level)
            case Mode.RELATIVE:  # every ingress port, so any reference too, has the launched light
                lost_db = max(0.0, whole_dbm - (self.launch_dbm + set_to.level))
        return 10 ** ((whole_dbm - lost_db) / 10)

    def _step(self, port: int, at_ns: int, milliwatts: float, now_ns: int) -> None:
        steps = [s for s in self._steps.get(port, []) if s[0] <= now_ns]
        horizon = now_ns - WINDOW_MAX_NS
        while len(steps) > 1 and steps[1][0] <= horizon:
            del steps[0]
        if not steps or steps[-1][1] != milliwatts:
            steps.append((at_ns, milliwatts))
        self._steps[port] = steps

    def read_dbm(self, port: int, now_ns: int) -> float:
        """Average over the window that ends now; below the floor the meter sees the floor."""
        window_ns = 10 * NS_PER_MS * 2 ** (self.setup(port).averaging - 1)
        start, energy = now_ns - window_ns, 0.0
        steps = self._steps.get(port) or [(now_ns, 0.0)]
        ends = [at for at, _ in steps[1:]] + [now_ns]
        for (at_ns, milliwatts), end_ns in zip(steps, ends, strict=True):
            energy += milliwatts * max(0, min(end_ns, now_ns) - max(at_ns, start))
        mean = energy / window_ns
        return max(self.floor_dbm, 10 * math.log10(mean)) if mean > 0 else self.floor_dbm

    def shown_dbm(self, port: int, dbm: float) -> float:
        """Return what a port's meter says of light of `dbm`.

        A photodiode of constant quantum efficiency gives a current in proportion to wavelength, so
        a meter calibrated for another wavelength than the light's is off by the ratio of the two.
        """
        setup = self.setup(port)
        if dbm > self.floor_dbm:
            dbm = max(self.floor_dbm, dbm + 10 * math.log10(LIGHT_NM / setup.wavelength_nm))
        return dbm + setup.offset_db
