"""ToRs of a simulated bench: steered by the contract of all ToRs, each with an agent of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

from drivers.errors import (
    DeadlineExpired,
    DriverError,
    Indeterminate,
    LinkLost,
    Refused,
    Unreachable,
)
from drivers.tor.base import Delta, Route
from drivers.tor.linux import batch
from drivers.tor.steering import Steering
from harness.bench.base import TorHandle
from harness.bench.simulated.hearing import Air, Listener
from harness.bench.simulated.network import Fabric
from harness.bench.simulated.world import Labour, World
from harness.bench.tors import EXCHANGES_MAX, UNKNOWN
from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from harness.errors import SteeringFailed
from harness.model.bench import Tor

Routes = frozenset[Route]

NOT_PERMITTED = "RTNETLINK answers: Operation not permitted"


class Racks:
    """All ToRs: `handles` of those that are steered, `labours` of the agents that all of them have.

    Routes that a ToR takes are in force in the network at that moment.
    """

    def __init__(self, world: World, fabric: Fabric) -> None:
        self._clock, self._fabric = world.clock, fabric
        steer_ns = round(world.figures.control.steer_us.value * NS_PER_US)
        self._racks = {
            name: Rack(name, world.bench.tors[name], steer_ns)
            for name, place in world.topology.tors.items()
            if place.steered
        }
        self.handles: Mapping[str, TorHandle] = self._racks
        air = Air(world.topology, fabric.light, world.clock)
        self.labours: Mapping[str, Labour] = {
            tor: Listener(tor, air, fabric, world.clock) for tor in world.topology.tors
        }

    async def steer(self, wanted: Mapping[str, Routes]) -> None:
        """Make these the steering routes of these ToRs, all at once; raises `SteeringFailed`."""
        now_ns = self._clock.now_ns()
        came: defaultdict[int, dict[str, Routes]] = defaultdict(dict)
        failures = {}
        for name, routes in wanted.items():
            rack = self._racks[name]
            if reason := rack.steered(routes, now_ns):
                failures[name] = reason
            for at_ns, there in rack.come():
                came[at_ns][name] = there
        for at_ns in sorted(came):
            self._come(at_ns - now_ns, came[at_ns])
        ends_ns = max((self._racks[name].now_ns for name in wanted), default=now_ns)
        await self._clock.sleep_ns(ends_ns - now_ns)
        if failures:
            raise SteeringFailed(failures)

    def _come(self, left_ns: int, there: Mapping[str, Routes]) -> None:
        """Have routes in force after a while: what was sent is obeyed, whoever waits for it."""
        if left_ns <= 0:
            self._fabric.steer(there)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(left_ns / NS_PER_S, self._fabric.steer, there)


class Rack(Steering):
    """One ToR that is steered: a `TorHandle`. It has a time of its own, as a unit's line has."""

    remote = True

    def __init__(self, name: str, spec: Tor, steer_ns: int) -> None:
        super().__init__(name)
        self.spec, self.now_ns = spec, 0
        self._steer_ns = steer_ns
        self._timeout_ns = round(spec.exchange_timeout_s * NS_PER_S)
        self._answer_ns = round(spec.emulate.answer_ms * NS_PER_MS)
        self._routes: Routes = frozenset()
        self._came: list[tuple[int, Routes]] = []
        self._applies, self._is_dead = 0, False

    @property
    def limit_s(self) -> float:
        """How long one change may take."""
        return EXCHANGES_MAX * self.spec.exchange_timeout_s

    def steered(self, routes: Routes, now_ns: int) -> str:
        """Take routes from now on; return why that failed, or nothing."""
        self.now_ns = max(self.now_ns, now_ns) + self._steer_ns
        try:
            self.apply(routes)
        except DriverError as fault:
            text = str(fault) if self.name in str(fault) else f"{self.name}: {fault}"
            return f"{text} ({UNKNOWN})" if isinstance(fault, Indeterminate) else text
        return ""

    def come(self) -> list[tuple[int, Routes]]:
        """Return what routes have come since this was last asked, and when."""
        came, self._came = self._came, []
        return came

    def _read(self) -> Routes:
        if self._is_dead:
            raise Unreachable(f"ToR {self.name}: nobody answers")
        self._answer()
        return self._routes

    def _send(self, before: Routes, wanted: Routes) -> Routes:
        """Obey one change as far as the faults of the bench file let it."""
        faults = self.spec.emulate
        if self._is_dead:
            raise Unreachable(f"ToR {self.name}: nobody answers")
        self._applies += 1
        delta = Delta.between(before, wanted)
        lines, states = batch(delta), _states(before, delta)
        if self._applies in (faults.cut_apply, faults.die_on_apply):
            self._have(states[len(lines) // 2])
            self._is_dead = self._applies == faults.die_on_apply
            raise LinkLost(f"ToR {self.name}: the device closed the session")
        denied = {*faults.deny_devices}
        for number, line in enumerate(lines):
            if not denied.isdisjoint(line.split()):
                self._have(states[number])
                self._answer()
                raise Refused("exit status 1", f"ToR {self.name}: {NOT_PERMITTED}", line)
        self._have(wanted)
        self._answer(lost=self._applies == faults.lose_reply)
        return self._routes

    def _have(self, routes: Routes) -> None:
        self._routes = routes
        self._came.append((self.now_ns, routes))

    def _answer(self, *, lost: bool = False) -> None:
        if lost or self._answer_ns > self._timeout_ns:
            self.now_ns += self._timeout_ns
            raise DeadlineExpired(f"ToR {self.name}: no answer in time")
        self.now_ns += self._answer_ns


def _states(before: Routes, delta: Delta) -> list[Routes]:
    """Return the routes before each line of `drivers.tor.linux.batch`, and those after the last."""
    steps: list[tuple[Routes, Routes]] = [
        *((frozenset(), frozenset({route})) for route in delta.make),
        *((frozenset({old}), frozenset({new})) for old, new in delta.move),
        *((frozenset({route}), frozenset()) for route in delta.drop),
    ]
    return list(accumulate(steps, lambda there, step: there - step[0] | step[1], initial=before))
