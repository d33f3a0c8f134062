"""The common contract of all switches: a whole wanted map is checked, applied, verified, or undone.

`apply` sends only the difference: deletes first, then makes, so that a circuit which stays is never
disturbed and a busy port is never stolen; then it reads the map back and compares. Applying twice
is harmless, so a lost reply is resolved by reading. Only circuits whose both ports are *ours* are
touched. Times are ns on the caller's monotonic clock. Errors: `BadMatching` before anything is
sent; `Refused` or `Mismatch` after the previous map is back; `Indeterminate` when it is not, or
when the map cannot be read: then a person or a later read must find out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from drivers.base import (
    NS_PER_S,
    Applied,
    Circuit,
    Delta,
    Identity,
    Matching,
    Ocs,
    PowerMonitor,
    Receipt,
    Rewires,
)
from drivers.errors import (
    AccessDenied,
    BadMatching,
    DeadlineExpired,
    DeviceFault,
    Garbled,
    Indeterminate,
    LinkLost,
    Mismatch,
    NoLight,
    Refused,
    Untrusted,
)

PAUSE_NS = 1_000_000
"""Between two looks at a map or at light that is still on its way."""
READS = 2
"""Attempts at a read-back: the first may meet the fault that made it necessary."""
SETTLE_SWITCH_TIMES = 4
"""A unit may tell its map only after the mirrors have moved: wait so many typical switch times."""

Clock = Callable[[], int]
Sleep = Callable[[float], None]


def read_ours(ocs: Ocs, ours: frozenset[int]) -> Matching:
    """Read the part of the map that is ours: circuits of which both ports are."""
    return _ours(_read(ocs), ours)


def plan(ocs: Ocs, wanted: Matching, ours: frozenset[int]) -> Delta:
    """Read the map and return what `apply` would change; raises `BadMatching` as it would."""
    check(wanted, ours, ocs.identify())
    whole = _read(ocs)
    before = _ours(whole, ours)
    _check_free(wanted, whole.circuits - before.circuits)
    return Delta.between(before, wanted)


def apply(
    ocs: Ocs,
    wanted: Matching,
    ours: frozenset[int],
    *,
    deadline_ns: int,
    planned: Delta | None = None,
    now_ns: Clock = time.monotonic_ns,
    sleep: Sleep = time.sleep,
) -> Applied:
    """Make `wanted` the whole map of our ports, verified by read-back; foreign circuits stay.

    `planned` is what `plan` returned a moment ago, so that reading the map costs no time here; a
    map that has changed since then is found out by the read-back.

    Past `deadline_ns` no change is begun (`DeadlineExpired`) and no lagging map is waited for; an
    exchange under way keeps its own deadline, and a restore is always tried.
    """
    delta = plan(ocs, wanted, ours) if planned is None else planned
    before = Matching(frozenset(delta.drop + delta.keep))
    if not delta:
        now = now_ns()
        return Applied(before, before, delta, now, now, now)
    if now_ns() >= deadline_ns:
        raise DeadlineExpired(f"{ocs.name}: no time left to apply a map; nothing was changed")
    change = _Change(
        ocs,
        wanted=wanted,
        before=before,
        ours=ours,
        deadline_ns=deadline_ns,
        now_ns=now_ns,
        sleep=sleep,
    )
    receipt = change.perform(delta)
    done_ns = change.verify(receipt)
    return Applied(before, wanted, delta, receipt.sent_ns, receipt.acknowledged_ns, done_ns)


def check(wanted: Matching, ours: frozenset[int], identity: Identity) -> None:
    """Raise `BadMatching`, naming every fault, unless `wanted` is a map of our ports here."""
    faults = []
    try:
        Matching.of(wanted.circuits)
    except BadMatching as error:
        faults.append(str(error))
    for ingress, egress in wanted:
        for port, side, there in (
            (ingress, "ingress", identity.ingress),
            (egress, "egress", identity.egress),
        ):
            if port not in there:
                faults.append(
                    f"{ingress}->{egress}: {port} is no {side} port of this unit"
                    f" ({there.start}..{there.stop - 1})"
                )
            elif port not in ours:
                faults.append(f"{ingress}->{egress}: port {port} is not ours")
    if faults:
        raise BadMatching("; ".join(faults))


def wait_for_light(
    ocs: PowerMonitor,
    egress: Sequence[int],
    floor_dbm: float,
    deadline_ns: int,
    *,
    lit_before: Collection[int] = (),
    stale_until_ns: int = 0,
    now_ns: Clock = time.monotonic_ns,
    sleep: Sleep = time.sleep,
) -> int:
    """Poll power until all of `egress` read above `floor_dbm`; return the stamp of the answer.

    A power meter averages: for a while a port of `lit_before` still shows the light that it has
    lost. Only from `stale_until_ns` on, one averaging window after the change, is it believed.
    Raises `NoLight` naming the ports still dark after `deadline_ns`; looks at least once. A look
    that the line spoils is repeated: looking is harmless.
    """
    dark = list(egress)
    while dark:
        if not set(dark) - set(lit_before):  # no other port is worth a look before
            sleep(max(0, min(stale_until_ns, deadline_ns) - now_ns()) / NS_PER_S)
        asked_ns = now_ns()
        expired = asked_ns >= deadline_ns
        try:
            powers = ocs.power_dbm(dark)
        except (LinkLost, DeadlineExpired, Garbled):
            if expired:
                raise
            continue
        seen_ns = now_ns()
        stale = lit_before if asked_ns < stale_until_ns else ()
        dark = [port for port in dark if powers[port] <= floor_dbm or port in stale]
        if not dark:
            return seen_ns
        if expired:
            raise NoLight({port: powers[port] for port in dark})
        sleep(PAUSE_NS / NS_PER_S)
    return now_ns()


class _Change:
    """One change of one unit, from `before` to `wanted`, with what is needed to undo it."""

    def __init__(
        self,
        ocs: Ocs,
        *,
        wanted: Matching,
        before: Matching,
        ours: frozenset[int],
        deadline_ns: int,
        now_ns: Clock,
        sleep: Sleep,
    ) -> None:
        self._ocs, self._wanted, self._before, self._ours = ocs, wanted, before, ours
        self._deadline_ns, self._now_ns, self._sleep = deadline_ns, now_ns, sleep

    def perform(self, delta: Delta) -> Receipt:
        """Send the change; resolve a lost reply by reading, and send what remains once more."""
        sent_ns = self._now_ns()
        try:
            return _rewire(self._ocs, delta, self._now_ns)
        except Refused as refusal:
            raise self._undo(refusal) from refusal
        except DeviceFault as lost:
            found = self._read_back(lost)
            remaining = Delta.between(found, self._wanted)
            if not remaining:
                return Receipt(sent_ns, self._now_ns(), found)
        try:
            return _rewire(self._ocs, remaining, self._now_ns)
        except Refused as refusal:
            raise self._undo(refusal) from refusal
        except DeviceFault as lost:
            sent_ns = self._now_ns()
            return Receipt(sent_ns, sent_ns, self._read_back(lost))

    def verify(self, receipt: Receipt) -> int:
        """Return the stamp at which the map was seen to be the wanted one; else undo and raise."""
        settle_ns = SETTLE_SWITCH_TIMES * self._ocs.capabilities.typical_switch_ns
        limit_ns = min(self._deadline_ns, receipt.acknowledged_ns + settle_ns)
        after = receipt.after
        while True:
            if after is None:
                after = self._read_back(None)
            found, seen_ns = _ours(after, self._ours), self._now_ns()
            if found == self._wanted:
                return seen_ns
            if seen_ns >= limit_ns:
                raise self._undo(_mismatch(self._wanted, found))
            self._sleep(PAUSE_NS / NS_PER_S)
            after = None

    def _read_back(self, cause: DeviceFault | None) -> Matching:
        """Read our map, or raise `Indeterminate`."""
        for attempt in range(READS):
            try:
                return _ours(self._ocs.read(), self._ours)
            except (AccessDenied, Untrusted) as fault:
                raise self._unknown(cause, fault) from fault
            except DeviceFault as fault:
                if attempt == READS - 1:
                    raise self._unknown(cause, fault) from fault
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _unknown(self, cause: DeviceFault | None, fault: DeviceFault) -> Indeterminate:
        name = f"{self._ocs.name}: "
        first = f"{str(cause).removeprefix(name)}; " if cause is not None else ""
        wanted = Delta.between(self._before, self._wanted)
        return Indeterminate(
            f"{name}{first}the map could not be read back: {fault}. It lies between"
            f" {self._before} and {self._wanted}: drop {_listed(wanted.drop)},"
            f" make {_listed(wanted.make)}"
        )

    def _undo(self, fault: Refused | Mismatch) -> DeviceFault:
        """Put the previous map back; return the error that tells the whole story."""
        found: Matching | None = None
        try:
            found = self._read_back(fault)
            if back := Delta.between(found, self._before):
                _rewire(self._ocs, back, self._now_ns)
            left = _mismatch(self._before, self._read_back(fault))
        except DeviceFault as error:
            return self._not_restored(fault, found, str(error))
        if left.missing or left.unexpected:
            return self._not_restored(fault, found, str(left))
        told = "the previous map is restored"
        if isinstance(fault, Mismatch):
            return Mismatch(fault.missing, fault.unexpected, told)
        differs = _mismatch(self._wanted, found)
        return Refused(fault.code, f"{fault.text} ({differs}; {told})", fault.command)

    def _not_restored(self, fault: DeviceFault, found: Matching | None, why: str) -> Indeterminate:
        seen = "" if found is None else f"; then {_mismatch(self._wanted, found)}"
        failed = Indeterminate(
            f"{self._ocs.name}: {fault}{seen}; restoring the previous map failed: {why}"
        )
        failed.__cause__ = fault
        return failed


def _read(ocs: Ocs) -> Matching:
    """Read the whole map; a line that the unit closed while it was idle is opened again."""
    try:
        return ocs.read()
    except LinkLost:
        return ocs.read()


def _rewire(ocs: Ocs, delta: Delta, now_ns: Clock) -> Receipt:
    """Send deletes, then makes: in one exchange where the unit takes it."""
    if isinstance(ocs, Rewires):
        return ocs.rewire(delta.drop, delta.make)
    sent_ns = now_ns()
    if delta.drop:
        ocs.disconnect(delta.drop)
    if delta.make:
        sent_ns = now_ns()
        ocs.connect(delta.make)
    return Receipt(sent_ns, now_ns())


def _ours(whole: Matching, ours: frozenset[int]) -> Matching:
    return Matching(frozenset((a, b) for a, b in whole.circuits if a in ours and b in ours))


def _check_free(wanted: Matching, foreign: frozenset[Circuit]) -> None:
    """Raise `BadMatching` where a wanted circuit would take a port from a circuit not all ours."""
    taken = {port: circuit for circuit in foreign for port in circuit}
    faults = [
        f"{ingress}->{egress}: port {port} is held by {taken[port][0]}->{taken[port][1]},"
        " which is not all ours"
        for ingress, egress in wanted
        for port in (ingress, egress)
        if port in taken
    ]
    if faults:
        raise BadMatching("; ".join(faults))


def _mismatch(wanted: Matching, found: Matching) -> Mismatch:
    return Mismatch(wanted.circuits - found.circuits, found.circuits - wanted.circuits)


def _listed(circuits: Sequence[Circuit]) -> str:
    return ", ".join(f"{a}->{b}" for a, b in circuits) or "nothing"
