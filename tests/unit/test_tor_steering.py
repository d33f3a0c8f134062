"""The contract that all ToR drivers share, on a device whose every answer is written here."""

from collections.abc import Callable, Iterable

import pytest

from drivers.errors import AccessDenied, DeviceFault, Indeterminate, LinkLost, Misuse, Refused
from drivers.tor.base import Route
from drivers.tor.steering import Steering

FAR = "198.18.128.9"
ONE, TWO = Route.one("10.0.1.0/24", FAR, "u1"), Route.one("10.0.2.0/24", FAR, "u1")
ONE_BY_U2 = Route.one("10.0.1.0/24", FAR, "u2")
Routes = frozenset[Route]


def routes(*found: Route) -> Routes:
    return frozenset(found)


class Device(Steering):
    """A ToR in memory. `faults` are met by the next changes, `deaf` by the next reads."""

    remote = False

    def __init__(self, *there: Route) -> None:
        super().__init__("tor0")
        self.there: Routes = routes(*there)
        self.faults: list[Callable[[Routes, Routes], Routes] | None] = []
        self.deaf: list[DeviceFault] = []
        self.reads, self.changes = 0, 0

    def close(self) -> None:
        """Nothing to close."""

    def _read(self) -> Routes:
        self.reads += 1
        if self.deaf:
            raise self.deaf.pop(0)
        return self.there

    def _send(self, before: Routes, wanted: Routes) -> None:
        self.changes += 1
        fault = self.faults.pop(0) if self.faults else None
        after = self.there - before | wanted
        if fault is not None:
            self.there = after  # unless the fault says otherwise
            self.there = fault(before, after)
        self.there = after


def lost(take: Callable[[Routes, Routes], Iterable[Route]], device: Device, fault: DeviceFault):
    """A change of which `take` is in force when `fault` comes instead of an answer."""

    def meet(before: Routes, after: Routes) -> Routes:
        device.there = routes(*take(before, after))
        raise fault

    return meet


GONE = LinkLost("the session has ended")
NO = Refused("EPERM", "ToR tor0: not allowed")


def test_routes_that_are_there_cost_one_read_and_no_change() -> None:
    device = Device(ONE)
    device.apply(routes(ONE))
    assert (device.reads, device.changes) == (1, 0)


def test_a_change_after_the_first_reads_only_once() -> None:
    device = Device()
    device.apply(routes(ONE))
    before = device.reads
    device.apply(routes(ONE_BY_U2, TWO))
    assert (device.there, device.reads - before) == ({ONE_BY_U2, TWO}, 1)


@pytest.mark.parametrize("taken", ["nothing", "half", "all"])
def test_a_lost_answer_is_resolved_by_reading(taken: str) -> None:
    device = Device(ONE)
    parts = {"nothing": (ONE,), "half": (ONE_BY_U2,), "all": (ONE_BY_U2, TWO)}
    device.faults.append(lost(lambda _b, _a: parts[taken], device, GONE))
    device.apply(routes(ONE_BY_U2, TWO))
    assert device.there == {ONE_BY_U2, TWO}
    assert device.changes == (1 if taken == "all" else 2)


def test_after_two_lost_answers_the_previous_routes_are_put_back() -> None:
    device = Device(ONE)
    device.faults += [lost(lambda b, _: b, device, GONE)] * 2
    with pytest.raises(Refused, match=r"READBACK .*10.0.2.0/24 .* missing .*nothing was changed"):
        device.apply(routes(ONE, TWO))
    assert device.there == {ONE}


def test_a_refusal_half_way_is_undone_and_told() -> None:
    device = Device(ONE)
    device.faults.append(lost(lambda _b, _a: (ONE_BY_U2,), device, NO))
    with pytest.raises(Refused, match=r"EPERM ToR tor0: not allowed \(the previous routes are"):
        device.apply(routes(ONE_BY_U2, TWO))
    assert device.there == {ONE}


def test_a_refusal_because_others_changed_our_routes_is_no_refusal() -> None:
    device = Device()
    device.apply(routes(ONE, TWO))
    device.there = routes(TWO)
    device.faults.append(lost(lambda _b, _a: (TWO,), device, Refused("ESRCH", "no such route")))
    device.apply(routes(TWO))
    assert device.there == {TWO}


def test_what_others_added_to_our_routes_goes() -> None:
    device = Device()
    device.apply(routes(ONE))
    device.there |= {TWO}
    device.apply(routes(ONE_BY_U2))
    assert device.there == {ONE_BY_U2}


def test_a_refusal_that_cannot_be_undone_is_indeterminate() -> None:
    device = Device(ONE)
    device.faults += [lost(lambda _b, _a: (), device, NO), lost(lambda _b, _a: (), device, NO)]
    with pytest.raises(Indeterminate, match=r"not allowed; restoring the previous routes failed"):
        device.apply(routes(TWO))


def test_routes_that_cannot_be_read_back_are_unknown() -> None:
    device = Device()
    device.apply(routes(ONE))
    device.deaf = [LinkLost("gone"), LinkLost("gone for good")]
    with pytest.raises(Indeterminate, match="could not be read back: gone for good"):
        device.apply(routes(TWO))
    device.apply(routes(TWO))
    assert device.there == {TWO}


def test_a_login_that_is_refused_is_not_tried_again() -> None:
    device = Device()
    device.apply(routes(ONE))
    device.deaf = [AccessDenied("no"), AccessDenied("no")]
    with pytest.raises(Indeterminate):
        device.apply(routes(TWO))
    assert len(device.deaf) == 1


def test_a_session_that_ended_while_idle_is_opened_again() -> None:
    device = Device(ONE)
    device.deaf = [LinkLost("idle for too long")]
    assert device.read() == {ONE}


def test_what_cannot_be_is_refused_before_anything_is_asked() -> None:
    device = Device()
    with pytest.raises(Misuse, match="two steering routes"):
        device.apply(routes(ONE, ONE_BY_U2))
    assert (device.reads, device.changes) == (0, 0)
