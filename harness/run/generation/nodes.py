"""Asking the nodes of a fleet: several at once, all to the end, and none that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from harness.bench.base import Bench
from harness.errors import AgentLost
from harness.wire.asks import CommandFailed
from harness.wire.messages import Failure, Message

R = TypeVar("R", bound=Message)


class Answers(dict[str, R], Generic[R]):
    """By node; `error` tells of all that failed, `CommandFailed` or, outranking it, `AgentLost`."""

    error: Exception | None = None

    def complete(self) -> dict[str, R]:
        """Return the answers of all; raise the error where some are missing."""
        if self.error is not None:
            raise self.error
        return self


class Nodes:
    """The nodes of a fleet; `lost` says why some are out for good."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.lost: dict[str, str] = {}
        self.on_lost: Callable[[str, str], None] | None = None
        """Told of each that is lost, and why."""

    async def ask(self, node: str, body: Message, reply: type[R], timeout_ns: int) -> R:
        """Ask one. Raises `AgentLost`, at once where it was lost before, and `CommandFailed`."""
        if node in self.lost:
            raise AgentLost(self.lost[node])
        try:
            return await self._bench.ask(node, body, reply, timeout_ns)
        except AgentLost as error:
            if node not in self.lost:
                self.lost[node] = str(error)
                if self.on_lost is not None:
                    self.on_lost(node, str(error))
            raise

    async def each(
        self, bodies: Mapping[str, Message], reply: type[R], timeout_ns: int
    ) -> Answers[R]:
        """Ask several and wait for every answer: after a failure nothing is still under way."""
        asks = (self.ask(node, body, reply, timeout_ns) for node, body in bodies.items())
        results = await asyncio.gather(*asks, return_exceptions=True)
        answers: Answers[R] = Answers()
        failures: dict[str, Failure] = {}
        lost: list[str] = []
        kind = ""
        for node, result in zip(bodies, results, strict=True):
            if isinstance(result, CommandFailed):
                failures |= result.failures
                kind = result.kind
            elif isinstance(result, AgentLost):
                lost.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[node] = result
        failed = CommandFailed(kind, failures) if failures else None
        if lost:
            answers.error = AgentLost("; ".join([*lost, *([str(failed)] if failed else [])]))
        else:
            answers.error = failed
        return answers
