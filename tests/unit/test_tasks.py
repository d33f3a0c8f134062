"""Work beside other work is never left behind, and what must end is not cut short."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from harness.tasks import beside, to_the_end, together


async def a_turn() -> None:
    """Let every task that can go on do so."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()


def complaints_of(main: Any) -> list[str]:
    """Run `main`; return what the event loop had to complain of, such as errors nobody saw."""
    found: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: found.append(context["message"]))
        await main()
        gc.collect()
        await a_turn()

    asyncio.run(watched())
    return found


def test_work_that_is_not_needed_any_longer_is_over_when_the_body_is_left() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await a_turn()
            ended.append(True)

    async def main() -> None:
        async with beside(work()):
            await a_turn()
        assert ended == [True]

    assert complaints_of(main) == []


def test_an_error_beside_a_body_that_fails_is_not_reported_as_lost() -> None:
    async def work() -> None:
        raise OSError("beside")

    async def body() -> None:
        async with beside(work()):
            await a_turn()
            raise ValueError("body")

    async def main() -> None:
        with pytest.raises(ValueError, match="body"):
            await body()

    assert complaints_of(main) == []


def test_the_body_gets_the_result_or_the_error() -> None:
    async def fine() -> int:
        return 7

    async def wrong() -> int:
        raise OSError("no")

    async def main() -> None:
        async with beside(fine()) as task:
            assert await task == 7
        with pytest.raises(OSError, match="no"):
            async with beside(wrong()) as task:
                await task

    assert complaints_of(main) == []


def test_a_cancellation_waits_for_what_must_end() -> None:
    async def main() -> None:
        may_end, done = asyncio.Event(), []

        async def work() -> None:
            await may_end.wait()
            done.append(True)

        task = asyncio.create_task(to_the_end(work()))
        await a_turn()
        task.cancel()
        await a_turn()
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [True]

    assert complaints_of(main) == []


def test_an_error_of_what_must_end_outranks_the_cancellation() -> None:
    async def main() -> None:
        may_end = asyncio.Event()

        async def work() -> None:
            await may_end.wait()
            raise OSError("not restored")

        task = asyncio.create_task(to_the_end(work()))
        await a_turn()
        task.cancel()
        await a_turn()
        may_end.set()
        with pytest.raises(OSError, match="not restored"):
            await task

    assert complaints_of(main) == []


def test_where_one_of_several_fails_the_others_are_over_and_its_error_is_raised_as_it_is() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await a_turn()
            ended.append(True)

    async def fails() -> None:
        await a_turn()
        raise OSError("one of them")

    async def main() -> None:
        with pytest.raises(OSError, match="one of them"):
            await together([waits(), fails(), fails(), waits()])
        assert ended == [True, True]

    assert complaints_of(main) == []
