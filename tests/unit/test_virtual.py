"""A loop whose time jumps: what takes hours is over at once, and what never ends is told."""

import asyncio
import os
import signal

import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.virtual import EPOCH, LOOK_EVERY, Deadlock, VirtualClock, run_virtually

CLOCK = VirtualClock()
HOUR_NS = 3600 * NS_PER_S


def test_hours_are_over_at_once_and_to_the_nanosecond() -> None:
    async def main() -> int:
        await CLOCK.sleep_ns(100 * HOUR_NS + 7)
        return CLOCK.now_ns()

    assert run_virtually(main()) == 100 * HOUR_NS + 7
    assert CLOCK.wall() == EPOCH


def test_what_is_due_first_happens_first_and_ties_in_the_order_they_were_made() -> None:
    told: list[tuple[str, int]] = []

    async def tell(name: str, ms: int) -> None:
        await CLOCK.sleep_ns(ms * NS_PER_MS)
        told.append((name, CLOCK.now_ns()))

    async def main() -> None:
        await asyncio.gather(tell("c", 3), tell("a", 1), tell("b", 3), tell("d", 0))

    run_virtually(main())
    assert told == [("d", 0), ("a", NS_PER_MS), ("c", 3 * NS_PER_MS), ("b", 3 * NS_PER_MS)]


def test_many_ties_keep_their_order_whatever_else_is_due() -> None:
    async def main(others_ms: list[int]) -> list[int]:
        told: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(100):
            for ms in others_ms:
                loop.call_later(ms * number / 1000, lambda: None)
            loop.call_later(0.05, told.append, number)
        await CLOCK.sleep_ns(NS_PER_S)
        return told

    for others_ms in ([], [1], [3, 7]):
        assert run_virtually(main(others_ms)) == list(range(100))


def test_a_limit_lives_by_the_same_time() -> None:
    async def main() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return CLOCK.now_ns()

    assert run_virtually(main()) == HOUR_NS


async def waits_for_her(event: asyncio.Event) -> None:
    await event.wait()


def test_a_deadlock_names_who_waits_for_what() -> None:
    async def main() -> None:
        him, her = asyncio.Event(), asyncio.Event()
        him_waiting = asyncio.create_task(waits_for_her(her), name="he")
        try:
            await him.wait()
        finally:
            him_waiting.cancel()

    with pytest.raises(Deadlock, match=r"he waits in waits_for_her > Event\.wait") as told:
        run_virtually(main())
    assert "main > Event.wait" in str(told.value)
    assert told.value.exit_code == 1


def test_a_deadlock_of_hundreds_names_some_and_counts_the_rest() -> None:
    async def main() -> None:
        never = asyncio.Event()
        await asyncio.gather(*(waits_for_her(never) for _ in range(300)))

    with pytest.raises(Deadlock, match="and 281 more"):
        run_virtually(main())


def test_what_is_handed_to_a_thread_is_done_at_once_and_fails_as_there() -> None:
    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(CLOCK.now_ns)

    assert run_virtually(main()) == 0


def test_time_passes_while_something_keeps_the_loop_at_work() -> None:
    async def main() -> int:
        asyncio.get_running_loop().busy(5 * NS_PER_MS)  # type: ignore[attr-defined]
        await CLOCK.sleep_ns(NS_PER_MS)
        return CLOCK.now_ns()

    assert run_virtually(main()) == 6 * NS_PER_MS


def test_ctrl_c_is_heard_though_nobody_ever_waits_in_earnest() -> None:
    async def main() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, stopped.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        rounds = 0
        while not stopped.is_set():
            rounds += 1
            assert rounds < 10 * LOOK_EVERY
            await CLOCK.sleep_ns(HOUR_NS)
        loop.remove_signal_handler(signal.SIGUSR1)

    run_virtually(main())


def test_a_virtual_clock_is_of_no_use_in_real_time() -> None:
    async def main() -> None:
        CLOCK.now_ns()

    with pytest.raises(TypeError, match="outside a virtual loop"):
        asyncio.run(main())
