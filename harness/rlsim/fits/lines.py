"""What units take over their lines: the formulas of `harness.bench.simulated.line`. Pure.

Of a unit at a serial line that needs the circuits, for their bytes take it their time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from drivers.apply import PAUSE_NS
from drivers.base import Delta, Matching
from drivers.catalog import driver_class
from drivers.ocs.spoken import byte_ns, changing, looking, reading
from harness.clock import NS_PER_S
from harness.fabric.links import Link
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Figures

READ, SWITCH, LIGHT = "control.read_ms", "control.switch_ms", "control.light_ms"
HAND = "control.hand_ms"
LONGER = {"serial": "control.serial_ms", "ssh": "control.ssh_ms"}
"""By a unit's URL, what a change takes beside."""
CLIMB_S = 1e-4
"""A meter shows light that is there so much later."""
DARK_DBM, LIT_DBM = -60.0, -1.0
"""As meters write them."""
PAUSE_S = PAUSE_NS / NS_PER_S


@dataclass(frozen=True)
class Look:
    """A look at the meters of a unit at a serial line: its bytes, in s."""

    said_s: float
    dark_s: float
    """Until an answer has come that shows no light."""
    lit_s: float


@dataclass(frozen=True)
class Line:
    """What a unit takes beside the figures, in s: its answer, its mirrors, and its line's bytes."""

    answer_s: float
    moves_s: float
    window_s: float
    longer: str = ""
    """The figure by which a change, or a read, takes longer."""
    changes: bool = True
    """Whether it has anything to do."""
    read_s: float = 0.0
    commanded_s: float = 0.0
    """Until the (last) command has come."""
    acknowledged_s: float = 0.0
    look: Look | None = None
    """Of a unit at a serial line."""
    changed_at_once: int = 1
    """How many units change at once that share a machine, with whoever has them change."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Figures of a change."""
        return (SWITCH, self.longer) if self.longer else (SWITCH,)

    def reads_s(self, figures: Figures) -> float:
        """Return how long reading the map takes."""
        own_ms = figures[READ] + (figures[self.longer] if self.longer else 0.0)
        return self.answer_s + own_ms / 1e3 + self.read_s

    def hands_s(self, figures: Figures) -> float:
        """Return how long a change is handed over before its first command."""
        return self.changed_at_once * figures[HAND] / 1e3

    def idles_s(self, figures: Figures) -> float:
        """Return how long nobody waits for the unit: a change is handed over, or others' turn."""
        others = self.changed_at_once - 1
        return self.hands_s(figures) + others * self._own_s(figures) / 2

    def takes_s(self, figures: Figures) -> float:
        """Return when a change is acknowledged, from its (last) command."""
        return self.answer_s + self._beside_s(figures) + self.acknowledged_s

    def obeys_s(self, figures: Figures) -> float:
        """Return when it obeys that command: where no bytes are counted, half of the way."""
        return self.commanded_s if self.look else self._beside_s(figures) / 2

    def lights_s(self, figures: Figures, *, lit_before: bool) -> float:
        """Return when its light is told, from when a change is acknowledged."""
        light_s, asks_s = figures[LIGHT] / 1e3, self.window_s if lit_before else 0.0
        rests_s = self.obeys_s(figures) + self.moves_s + CLIMB_S - self.takes_s(figures)
        if self.look is None:
            return max(rests_s, asks_s) + light_s
        while asks_s + light_s + self.look.said_s < rests_s:
            asks_s += light_s + self.look.dark_s + PAUSE_S
        return asks_s + light_s + self.look.lit_s

    def _beside_s(self, figures: Figures) -> float:
        return self.changed_at_once * self._own_s(figures)

    def _own_s(self, figures: Figures) -> float:
        return sum(figures[name] for name in self.needs) / 1e3


def lines_of(
    measured: Measured,
    names: Iterable[str],
    before: frozenset[Link] | None = None,
    after: frozenset[Link] | None = None,
) -> tuple[Line, ...]:
    """Return the lines of these units; none where that takes circuits, and nobody knows them.

    Where nobody knows them, all units have something to do.
    """
    found = []
    for name in names:
        if before is not None and after is not None:
            matching = measured.topology.matching
            found.append(_line(measured, name, matching(before, name), matching(after, name)))
        elif byte_ns(measured.bench.switches[name].url):
            return ()
        else:
            found.append(_beside(measured, name))
    if measured.one_machine:
        changed = sum(line.changes for line in found)
        found = [replace(line, changed_at_once=changed) for line in found]
    return tuple(dict.fromkeys(found))


def _beside(measured: Measured, name: str) -> Line:
    """Return the line of a unit whose bytes take no time."""
    unit = measured.bench.switches[name]
    return Line(
        answer_s=unit.emulate.answer_ms / 1e3,
        moves_s=measured.topology.planes[name].switching_ns / NS_PER_S,
        window_s=2 ** (unit.power_averaging - 1) / 100,
        longer=LONGER.get(unit.url.partition(":")[0], ""),
    )


def _line(measured: Measured, name: str, before: Matching, after: Matching) -> Line:
    unit, delta = measured.bench.switches[name], Delta.between(before, after)
    line = replace(_beside(measured, name), changes=bool(delta))
    byte_s, driver = byte_ns(unit.url) / NS_PER_S, driver_class(unit.driver)
    if not byte_s:
        return line
    line = replace(line, read_s=reading(driver, name, [*before]).answered[-1] * byte_s)
    if delta:
        change = changing(driver, name, delta.drop, delta.make, [*after])[-1]
        line = replace(
            line,
            commanded_s=change.commanded * byte_s,
            acknowledged_s=change.acknowledged * byte_s,
        )
    if delta.make:
        ports = [egress for _, egress in delta.make]
        dark = looking(driver, name, ports, lambda _port, _said: DARK_DBM)
        lit = looking(driver, name, ports, lambda _port, _said: LIT_DBM)
        counted = (dark.obeyed[-1], dark.answered[-1], lit.answered[-1])
        line = replace(line, look=Look(*(size * byte_s for size in counted)))
    return line
