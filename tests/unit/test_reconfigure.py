"""One reconfiguration: what is told when several things fail, and what is not stamped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clock import RealClock
from harness.errors import InfrastructureError, StepFailed
from harness.fabric.links import DARK
from harness.model.scenario import Reconfigure
from harness.run import reconfigure
from harness.run.change import Change
from harness.run.reconfigure import _Once
from harness.wire.messages import Resumed

STEP = Reconfigure(shapes=("ring",), ride_through=True)


def answers(value: Any) -> Any:
    async def answer(*_: object, **__: object) -> Any:
        return value

    return answer


def session(**more: Any) -> Any:
    bench = SimpleNamespace(clock=RealClock())
    return SimpleNamespace(shape="dark", lit=frozenset(), plans={"ring": DARK}, bench=bench, **more)


def test_where_it_began_is_told_when_the_traffic_fails_after_a_switch_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = Change(before=frozenset(), wanted=frozenset(), failures={"agg0": "agg0: refused 1->9"})
    for name, value in (("_iteration_ns", 1), ("beacons_on", None), ("listen", None),
                        ("prepare", None), ("switch_over", change)):  # fmt: skip
        monkeypatch.setattr(reconfigure, name, answers(value))

    async def fail(*_: object) -> None:
        raise StepFailed("n0: resume failed: connection reset")

    monkeypatch.setattr(_Once, "_resume", fail)
    with pytest.raises(InfrastructureError, match=r"agg0: refused 1->9; n0: resume failed"):
        asyncio.run(_Once(session(), STEP, "ring").run(0, 0))


def test_an_iteration_that_never_came_back_has_no_stamp() -> None:
    never = Resumed(
        released_ns={0: 5, 1: 5}, first_good_ns={0: 7, 1: 0}, steady_ns={0: 7, 1: 0},
        longest_ns={0: 2, 1: 9},
    )  # fmt: skip
    once = _Once(session(everyone=answers({"n0": never}), at=lambda _, t_ns: t_ns), STEP, "ring")
    asyncio.run(once._resume(Change(before=frozenset(), wanted=frozenset()), 1))
    assert once.stamps == {}
    assert once.waits.traffic_ns == 0
