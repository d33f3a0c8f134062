"""Of several agents that fail, those whose ranks are the cause are named first, and waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.errors import AgentLost, HarnessError
from harness.wire import asks
from harness.wire.asks import Ask, CommandFailed
from harness.wire.messages import Done, Failure

BROKEN = Failure(error="CollectiveBroken", text="connection reset by peer")
DIED = Failure(error="RankDied", text="rank 1 (pid 9) killed by SIGKILL", ranks=(1,))
LATE_S = 0.01


def ask(agent: str) -> Ask:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return Ask(1, agent, "run_collective", b"", Done, future, 0, 0)


def failed(agent: str, failure: Failure) -> CommandFailed:
    return CommandFailed("run_collective", {agent: failure})


def outcome(first: Exception, second: Exception) -> HarnessError:
    """Return what is raised when n0 fails at once, n1 a little later, and n2 never answers."""

    async def main() -> None:
        waiting = [ask("n0"), ask("n1"), ask("n2")]
        waiting[0].future.set_exception(first)
        later = asyncio.get_running_loop().call_later(
            LATE_S, waiting[1].future.set_exception, second
        )
        try:
            await asks.answers(waiting)
        finally:
            later.cancel()

    with pytest.raises(HarnessError) as caught:
        asyncio.run(main())
    return caught.value


@pytest.fixture(autouse=True)
def settles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "SETTLE_NS", 0)


def test_a_failure_that_only_follows_waits_for_the_rank_at_fault() -> None:
    error = outcome(failed("n0", BROKEN), failed("n1", DIED))
    assert isinstance(error, CommandFailed)
    assert error.ranks == (1,)
    assert error.failures == {"n0": BROKEN, "n1": DIED}
    assert str(error) == (
        "n1: run_collective failed: RankDied: rank 1 (pid 9) killed by SIGKILL (ranks 1); "
        "it failed then on n0 too"
    )


def test_a_failure_that_only_follows_waits_for_the_agent_that_is_gone() -> None:
    error = outcome(failed("n0", BROKEN), AgentLost("n1 fell silent"))
    assert isinstance(error, AgentLost)
    assert str(error).startswith("n1 fell silent; n0: run_collective failed")


def test_where_the_rank_at_fault_is_known_nobody_else_is_waited_for() -> None:
    error = outcome(failed("n0", DIED), failed("n1", BROKEN))
    assert isinstance(error, CommandFailed)
    assert error.failures == {"n0": DIED}


def test_the_search_for_who_is_at_fault_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "CULPRIT_NS", 0)
    error = outcome(failed("n0", BROKEN), failed("n1", DIED))
    assert str(error) == "n0: run_collective failed: CollectiveBroken: connection reset by peer"


def test_what_failed_on_hundreds_is_told_of_a_few() -> None:
    failures = {f"n{i}": BROKEN for i in range(300)}
    said = str(CommandFailed("train_step", failures))
    assert said.startswith(
        "n0: train_step failed: CollectiveBroken: connection reset by peer; n1: "
    )
    assert said.endswith(" and 292 more")
    said = str(CommandFailed("train_step", failures | {"n7": DIED}))
    assert said.endswith("it failed then on n0, n1, n2, n3, n4, n5, n6, n8 and 291 more too")
