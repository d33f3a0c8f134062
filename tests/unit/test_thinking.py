"""What is thought out beside the event loop: the loop goes on, and virtual time stands still."""

from __future__ import annotations

import asyncio
import threading

import pytest

from harness.processes import think
from harness.virtual import VirtualClock, run_virtually


def test_the_event_loop_goes_on_while_something_is_thought_out() -> None:
    async def main() -> bool:
        told = threading.Event()
        asyncio.get_running_loop().call_soon(told.set)
        return await think(lambda: told.wait(10))

    assert asyncio.run(main())


def test_in_virtual_time_a_thought_takes_none_and_nobody_has_a_turn_meanwhile() -> None:
    async def main() -> tuple[int, list[str]]:
        turns: list[str] = []
        asyncio.get_running_loop().call_soon(turns.append, "another's")
        await think(lambda: turns.append("thought"))
        return VirtualClock().now_ns(), list(turns)

    assert run_virtually(main()) == (0, ["thought"])


def test_what_goes_wrong_in_a_thought_is_for_whoever_awaits_it() -> None:
    async def main() -> None:
        await think(lambda: int("seven"))

    with pytest.raises(ValueError, match="seven"):
        asyncio.run(main())
