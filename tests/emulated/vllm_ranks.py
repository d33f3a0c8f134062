"""Rank processes of real vLLM, ordered about as the agent does: what the engine's tests drive."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agents.frames import Frame, Unpacker, pack
from agents.generation.orders import FRAMES, Body, Leave, Ready, Seated, Sit, Start, Steps, Told
from agents.generation.ports import Ports, Range
from harness.clock import NS_PER_S
from harness.model.placement import Instance
from harness.model.requests import Carried
from harness.wire.generation import EngineSpec, Output, Stats, Submit, Withdraw, Work
from harness.wire.messages import Message

LIMIT_S = 300.0
"""For one order: the first imports vLLM, which takes long on a machine that is busy."""


class Rank:
    """One rank process and the line to it."""

    def __init__(self, gpu: int, log: Path) -> None:
        self._line, theirs = socket.socketpair()
        self._line.settimeout(LIMIT_S)
        self._log = log
        self._frames: list[Frame[Body]] = []
        self._unpacker = Unpacker(FRAMES)
        argv = ["--parent", str(os.getpid()), "--fd", str(theirs.fileno()), "--gpu", str(gpu)]
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agents.generation.rank", *argv],
                pass_fds=(theirs.fileno(),),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ask(self, order: Message) -> None:
        self._line.sendall(pack(1, time.monotonic_ns() + int(LIMIT_S * NS_PER_S), order))

    def heard(self) -> Iterator[Any]:
        """What it says, up to the answer to what it was asked."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                yield frame.body
                if frame.seq:
                    return
            data = self._line.recv(1 << 16)
            assert data, f"the rank ended: {self._log.read_text()[-3000:]}"
            self._frames += self._unpacker.feed(data)

    def end(self) -> None:
        self._line.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Ledger:
    """Requests and the tokens that were told of them; a gap or an overlap fails at once."""

    prompts: Mapping[str, tuple[int, ...]]
    response_tokens: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)

    def take(self, output: Output) -> None:
        known = self.tokens.setdefault(output.id, [])
        assert output.start == len(known), "lost" if output.start > len(known) else "doubled"
        assert output.count == len(output.ids)
        known.extend(output.ids)
        self.outputs.append(output)

    def works(self) -> tuple[Work, ...]:
        """All that are not finished, as they stand."""
        return tuple(
            self.work(name)
            for name in self.prompts
            if len(self.tokens.get(name, ())) < self.response_tokens
        )

    def work(self, name: str) -> Work:
        prompt, output = self.prompts[name], tuple(self.tokens.get(name, ()))
        carried = Carried(name, len(prompt), self.response_tokens, 0, len(output))
        return Work(carried=carried, prompt=prompt, output=output)


class Ranks:
    """All ranks of this test; an instance is built on the first of them."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.stats: Stats | None = None
        self.outputs: list[Output] = []
        self._up: Sequence[Rank] = ()

    def order(self, order: Message | Sequence[Message], to: Sequence[Rank] = ()) -> list[Any]:
        """Give all ranks of the instance an order; return their answers, keep what is told."""
        ranks = to or self._up
        orders = [order] * len(ranks) if isinstance(order, Message) else order
        for rank, one in zip(ranks, orders, strict=True):
            rank.ask(one)
        answers = []
        for number, rank in enumerate(ranks):
            *told, answer = rank.heard()
            for news in told:
                assert isinstance(news, Told)
                assert number == 0, "only the leader tells"
                self.outputs += news.outputs
                self.stats = news.stats
            answers.append(answer)
        return answers

    def build(self, tp: int, version: int = 0, source: str = "", **degrees: int) -> list[Any]:
        up = self.ranks[: math.prod([tp, degrees.get("pp", 1), degrees.get("dp", 1)])]
        first = free_ports()
        orders = [
            Sit(
                instance=Instance(name="g0", gpus=tuple(range(len(up))), tp=tp, **degrees),
                rank=rank,
                gpu=rank,
                address="127.0.0.1",
                meeting=f"127.0.0.1:{first}",
                port=first + 1,
                ports=15,
                version=version,
                source=source,
            )
            for rank in range(len(up))
        ]
        answers = self.order(orders, up)
        if all(isinstance(answer, Seated) for answer in answers):
            self._up = up
        return answers

    def leave(self) -> None:
        """Tear down what is built, if anything."""
        if self._up:
            self.order(Leave())
        self._up = ()

    def submit(self, ledger: Ledger, works: Sequence[Work] | None = None) -> dict[str, str]:
        works = ledger.works() if works is None else works
        answers = self.order(Submit(instance="g0", works=tuple(works)))
        assert all(answer == answers[0] for answer in answers)
        refused: dict[str, str] = answers[0].refused
        return refused

    def step(self, steps: int, ledger: Ledger) -> bool:
        """Take steps; the ledger has what they gave. Return whether there is more to do."""
        answers = self.order(Steps(steps=steps))
        assert len({(answer.steps, answer.more) for answer in answers}) == 1, "ranks disagree"
        self.settle(ledger)
        return bool(answers[0].more)

    def withdraw(self, ledger: Ledger, *ids: str) -> tuple[Carried, ...]:
        answers = self.order(Withdraw(instances=("g0",), ids=ids))
        assert len({timeless(answer.left) for answer in answers}) == 1, "ranks disagree"
        self.settle(ledger)
        left: tuple[Carried, ...] = answers[0].left
        return left

    def settle(self, ledger: Ledger) -> None:
        for output in self.outputs:
            ledger.take(output)
        self.outputs.clear()


def timeless(left: Sequence[Carried]) -> tuple[Carried, ...]:
    """Requests without when their first token came: each rank has a clock of its own."""
    return tuple(msgspec.structs.replace(one, first_token_ns=None) for one in left)


PORTS = Ports("127.0.0.1")
TAKEN: list[Range] = []


def free_ports() -> int:
    """The first of a range of ports that is ours for a while: the kernel gives them to nobody."""
    TAKEN.append(PORTS.take())
    if len(TAKEN) > 8:
        TAKEN.pop(0).close()
    return TAKEN[-1].ports.start


@contextmanager
def vllm_ranks(count: int, logs: Path, spec: EngineSpec) -> Iterator[Ranks]:
    """Start rank processes that have imported vLLM; end them all."""
    ranks: list[Rank] = []
    try:
        ranks.extend(Rank(gpu, logs / f"gpu{gpu}.log") for gpu in range(count))
        found = Ranks(ranks)
        for ready in found.order(Start(spec=spec), ranks):
            assert isinstance(ready, Ready), ready
        yield found
    finally:
        for rank in ranks:
            rank.end()
