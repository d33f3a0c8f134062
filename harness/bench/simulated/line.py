"""A line to a simulated unit: what a driver hears of what it says over it, and when.

Behind it is the switch model of the emulated units, so the faults of a bench file show as there.
What a driver would say takes a serial line its time, and so does what the unit would answer.
(To bring a line into step again after a fault costs no more than a question here.)

Plain synchronous code such as `drivers.apply` cannot be kept waiting in virtual time. So a line has
a time of its own, which runs ahead of the clock's: a whole call is made at once, and whoever made
it waits afterwards until the clock has come as far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random

from drivers.apply import PAUSE_NS
from drivers.base import Capabilities, Circuit, Identity, Matching, Receipt
from drivers.catalog import driver_class
from drivers.emulators.config import EmulatedSwitch, Faults
from drivers.emulators.faces import Answer
from drivers.emulators.faults import Fate, Fates
from drivers.emulators.model import Change, SwitchModel
from drivers.errors import DeadlineExpired, Indeterminate, LinkLost, Refused, Unreachable
from drivers.ocs.polatis import BATCH_MAX, PORTS_MAX, TYPICAL_SWITCH_NS
from drivers.ocs.spoken import Exchange, byte_ns, changing, looking, reading
from harness.bench.simulated.mirrors import Mirrors
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.bench import Switch
from harness.model.simulation import Control

QUERY = Answer(b"?", is_query=True)
CANNOT = "-200"
"""How the unit says no."""
CLIMB_NS = NS_PER_MS // 10
"""Between two looks at a meter that climbs."""


class Line:
    """A `drivers.base.Ocs` that rewires and measures power; `now_ns` is its own time."""

    def __init__(self, spec: Switch, config: EmulatedSwitch, control: Control, rng: Random) -> None:
        self.name, self.now_ns, self.waited_ns = config.name, 0, 0
        self.model = SwitchModel(config, rng)
        self.mirrors = Mirrors(round(config.light.hold_ms * NS_PER_MS))
        self.capabilities = Capabilities(
            has_power=self.model.has_monitors,
            has_shutters=True,
            hitless_add=True,
            steals_busy_ports=True,
            batch_max=BATCH_MAX,
            typical_switch_ns=TYPICAL_SWITCH_NS,
        )
        self._url, self._driver = spec.url, driver_class(spec.driver)
        self._byte_ns = byte_ns(spec.url)
        self._timeout_ns = round(spec.exchange_timeout_s * NS_PER_S)
        longer_ms = _beyond_tcp_ms(spec.url, control)
        self._answer_ns = round(config.timing.answer_ms * NS_PER_MS)
        reads_ns = round((control.read_ms.value + longer_ms) * NS_PER_MS)
        self._reading_ns = self._answer_ns + reads_ns
        """What reading the map takes, beside its bytes."""
        self._changes_ns = round((control.switch_ms.value + longer_ms) * NS_PER_MS)
        self._hand_ns = round(control.hand_ms.value * NS_PER_MS)
        self.at_once = 1
        """How many units change at once that share a machine, with whoever has them change."""
        light_ns = round(control.light_ms.value * NS_PER_MS)
        self._look_ns, self.told_ns = (light_ns, 0) if self._byte_ns else (0, light_ns)
        """What each look at meters takes, or the last one, once light is there."""
        self.window_ns = 10 * NS_PER_MS << (config.optics.averaging - 1)
        self._boot_ns = round(config.timing.boot_ms * NS_PER_MS)
        self._fates = Fates(config.faults)
        self._is_open = self._fates.of(QUERY) is Fate.SEND  # it was asked who it is
        self._is_dead, self._up_ns = False, 0
        self._due: list[int] = []
        """When light of the latest change is there."""
        self.mirrors.carry_out(self.model.boot(0), 0)

    # -- what a driver does -----------------------------------------------------------------

    def identify(self) -> Identity:
        """Return who the unit is, as it was told at opening."""
        model = self.model
        sides = range(1, model.n + 1), range(model.n + 1, 2 * model.n + 1)
        return Identity(model.vendor, model.model, model.serial_number, model.firmware, *sides)

    def read(self) -> Matching:
        """Read the whole map."""
        circuits = self.model.circuits()
        bytes_ns = 0
        if self._byte_ns:
            bytes_ns = reading(self._driver, self.name, circuits).answered[-1] * self._byte_ns
        self._exchange(QUERY, self._reading_ns + bytes_ns)
        return Matching(frozenset(circuits))

    def connect(self, circuits: Sequence[Circuit]) -> None:
        """Make circuits."""
        self.rewire((), circuits)

    def disconnect(self, circuits: Sequence[Circuit]) -> None:
        """Drop circuits."""
        self.rewire(circuits, ())

    def rewire(self, drop: Sequence[Circuit], make: Sequence[Circuit]) -> Receipt:
        """Drop, make and read back, in as many exchanges as its driver needs."""
        self.now_ns += self._hand_ns * self.at_once
        self._open()
        self._due = []
        sent_ns = acknowledged_ns = self.now_ns
        refused: list[Circuit] = []
        after = [*({*self.model.circuits()} - {*drop}), *make]
        for exchange in changing(self._driver, self.name, drop, make, after):
            sent_ns = self.now_ns
            others_ns = self._changes_ns * (self.at_once - 1)
            beside_ns = self._answer_ns + self._changes_ns + others_ns
            acknowledged_ns = sent_ns + beside_ns + exchange.acknowledged * self._byte_ns
            changes = tuple(self._obeyed(exchange))
            refused += [circuit for change in changes for circuit in change.refused]
            ends_ns = beside_ns + exchange.answered[-1] * self._byte_ns
            try:
                self._exchange(Answer(b"?", changes, is_query=True), ends_ns, others_ns)
            except (LinkLost, DeadlineExpired) as fault:
                text = f"{self.name}: the outcome of a change is not known: {fault}"
                raise Indeterminate(text) from fault
        if refused:
            raise Refused(CANNOT, f"cannot connect {refused[0][0]},{refused[0][1]}")
        return Receipt(sent_ns, acknowledged_ns, Matching(frozenset(self.model.circuits())))

    def power_dbm(self, ports: Sequence[int]) -> Mapping[int, float]:
        """Read optical power. Where bytes take no time looking takes none: telling does, once."""
        found: dict[int, float] = {}
        for start in range(0, len(ports), PORTS_MAX):
            found |= self._look(ports[start : start + PORTS_MAX])
        return found

    @staticmethod
    def preview(delta: object) -> list[str]:
        """Nothing is sent over a simulated line."""
        return []

    def close(self) -> None:
        """Nothing is held."""

    # -- its time -----------------------------------------------------------------------------

    def time_ns(self) -> int:
        """Return how late it is on this line."""
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ns += round(seconds * NS_PER_S)

    def nap(self, deadline_ns: int, seconds: float) -> None:
        """Let time pass between two looks at meters; where none can show more, up to when it can.

        Where each look takes its time, there are few. A longer sleep than the pause between two
        looks is one of whoever looks.
        """
        if self._byte_ns or not 0 < round(seconds * NS_PER_S) <= PAUSE_NS:
            self.sleep(seconds)
            return
        later = [at_ns for at_ns in self._due if at_ns > self.now_ns]
        if later:
            seen_ns = min(later)
        elif self._due and self.now_ns <= max(self._due) + self.window_ns:
            seen_ns = self.now_ns + CLIMB_NS
        else:
            seen_ns = deadline_ns
        self.now_ns = max(self.now_ns + CLIMB_NS, min(seen_ns, deadline_ns))

    # -- what the unit does -------------------------------------------------------------------

    def break_down(self, faults: Faults) -> None:
        """Have these faults from now on; raises `Misuse` where the unit has no such ports."""
        change = self.model.break_down(faults, self.now_ns)
        self._fates.replace(faults)
        self.mirrors.carry_out(change, self.now_ns)

    def _obeyed(self, exchange: Exchange) -> Iterator[Change]:
        """Yield what each command does, when it has come, whenever the answer comes.

        Where no bytes are counted, it has half of the way to the answer.
        """
        beside_ns = 0 if self._byte_ns else self._changes_ns * self.at_once // 2
        for turn, said in zip(exchange.turns, exchange.obeyed, strict=True):
            comes_ns = beside_ns + said * self._byte_ns
            acts_ns = self.now_ns + min(comes_ns, self._timeout_ns)
            changes = []
            if turn.drop:
                changes.append(self.model.disconnect([a for a, _ in turn.drop], acts_ns))
            if turn.make:
                changes.append(self.model.connect(turn.make, acts_ns))
            for change in changes:
                self._carry_out(change, acts_ns)
            yield from changes

    def _look(self, ports: Sequence[int]) -> dict[int, float]:
        """Ask for the power of so many ports as one question takes."""
        if not self._byte_ns:
            self._exchange(QUERY, 0)
            return {port: self.model.power_dbm(port, self.now_ns) for port in ports}
        asked_ns = self.now_ns + self._look_ns
        found: dict[int, float] = {}

        def shown_dbm(port: int, said: int) -> float:
            found[port] = self.model.power_dbm(port, asked_ns + said * self._byte_ns)
            return found[port]

        passing = looking(self._driver, self.name, ports, shown_dbm)
        self._exchange(QUERY, self._look_ns + passing.answered[-1] * self._byte_ns)
        return found

    def _carry_out(self, change: Change, acts_ns: int) -> None:
        self._due += [lighting.at_ns for lighting in change.light]
        self.mirrors.carry_out(change, acts_ns)

    def _exchange(self, answer: Answer, takes_ns: int, others_ns: int = 0) -> None:
        """Wait for an answer; raises what comes instead of it.

        `others_ns` of it are others' turns. Half of these pass before its own begins: nobody waits
        for this unit then.
        """
        self._open()
        fate = self._fates.of(answer)
        if fate is Fate.LOSE or takes_ns > self._timeout_ns:
            self._wait(self._timeout_ns)
            self._is_open = False
            raise DeadlineExpired(f"{self._url}: no answer in time")
        self._wait(takes_ns)
        self.waited_ns -= others_ns // 2
        if fate is Fate.DIE:
            self._is_dead = True
            self.mirrors.stop(self.now_ns)
        elif fate is Fate.REBOOT:
            self._up_ns = self.now_ns + self._boot_ns
            self.mirrors.carry_out(self.model.lose_power(self.now_ns), self.now_ns)
        if fate is not Fate.SEND:
            self._is_open = False
            raise LinkLost(f"{self._url}: the device closed the line")

    def _open(self) -> None:
        """Open the line where it is not: the unit is asked who it is."""
        if self._is_open:
            return
        if self._is_dead:
            raise Unreachable(f"{self._url}: nobody answers")
        if self.now_ns < self._up_ns:
            if self._byte_ns:
                self._wait(self._timeout_ns)
                raise DeadlineExpired(f"{self._url}: open, but the unit does not answer")
            raise LinkLost(f"{self._url}: the device closed the line")
        self._is_open = True
        self._exchange(QUERY, self._reading_ns)

    def _wait(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.waited_ns += duration_ns


def _beyond_tcp_ms(url: str, control: Control) -> float:
    """Return how much longer a change, or a read, takes than over TCP."""
    longer = {"serial": control.serial_ms, "ssh": control.ssh_ms}.get(url.partition(":")[0])
    return longer.value if longer else 0.0
