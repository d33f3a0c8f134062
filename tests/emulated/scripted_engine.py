"""An engine that only counts, and misbehaves as told: run in place of `agents.generation.rank`.

Every request gets a token a step. ``options["lockstep"]`` chooses the flavour; ``options["odd"]``
says what goes wrong on which GPU: ``{"1": "hangs in build"}``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agents.generation import rank
from agents.generation.base import Marks, Seat, Tell, Wait
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.intake import Refused
from harness.model.requests import Carried
from harness.wire.generation import Capacity, EngineSpec, KvTarget, Output, Stats, Verb, Work

STEP_NS = 2 * NS_PER_MS


class Scripted:
    """`agents.generation.base.Engine`."""

    def __init__(self, spec: EngineSpec, tell: Tell) -> None:
        self.spec, self.tell = spec, tell
        self.lockstep = bool(spec.options.get("lockstep"))
        self.oddities: dict[str, str] = spec.options.get("odd", {})
        self.requests: dict[str, Carried] = {}
        self.seat: Seat | None = None
        self.admits = True
        self.version = self.steps = self.generated = self.first_ns = self.last_ns = 0

    def odd(self, what: str) -> bool:
        return self.seat is not None and self.oddities.get(str(self.seat.gpu)) == what

    def facts(self) -> tuple[dict[str, str], tuple[str, ...]]:
        return {"engine": "scripted", "version": "1", "device": "none"}, ("nothing is computed",)

    def build(self, seat: Seat, version: int, marks: Marks, source: str = "") -> Capacity:
        self.seat, self.version = seat, version
        self.steps = self.generated = self.first_ns = self.last_ns = 0
        self.admits = True
        if self.odd("refuses to build"):
            raise Refused("no room for KV")
        if self.odd("raises in build"):
            raise RuntimeError("out of memory")
        with marks("groups"):
            if self.odd("hangs in build"):
                threading.Event().wait()
            meet(seat)
        with marks("weights"), marks("kv_cache"):
            pass
        return Capacity(
            sequences_max=64,
            step_max_tokens=64,
            blocks=100,
            block_tokens=16,
            length_max_tokens=1000,
            vocab=99,
            weights_bytes=10,
        )

    def kv_peer(self) -> str:
        return f"{self.here.address}:{self.here.ports[self.here.rank]}"

    @property
    def here(self) -> Seat:
        assert self.seat is not None
        return self.seat

    def tear_down(self, marks: Marks) -> None:
        with marks("teardown"):
            if self.odd("hangs in teardown"):
                threading.Event().wait()
            self.requests.clear()
            self.seat = None

    def sleep(self) -> int:
        if self.odd("never sleeps"):
            raise Refused("this engine cannot sleep")
        return 7

    def wake(self, version: int, marks: Marks, source: str = "") -> None:
        self.version = version
        with marks("weights"), marks("kv_cache"):
            pass

    def submit(self, works: Sequence[Work]) -> tuple[dict[str, str], tuple[str, ...]]:
        if self.odd("hangs in submit"):
            threading.Event().wait()
        long = {w.carried.id: "too long" for w in works if w.carried.response_tokens > 100_000}
        self.requests |= {w.carried.id: w.carried for w in works if w.carried.id not in long}
        return long, ()

    def withdraw(
        self, ids: Sequence[str] | None, verb: Verb, to: KvTarget | None
    ) -> tuple[list[Carried], dict[str, int]]:
        wanted = self.requests if ids is None else ids
        left = [self.requests.pop(name) for name in list(wanted) if name in self.requests]
        for request in left:
            self.say(request, 0, "exported" if verb == "export" else "aborted")
        return left, {request.id: 5 for request in left} if to else {}

    def admit(self, *, allowed: bool) -> None:
        self.admits = allowed

    def update_weights(self, version: int, source: str, *, drop_kv: bool) -> int:
        if self.odd("updates slowly"):
            threading.Event().wait(1)
        if self.odd("hangs in update"):
            threading.Event().wait()
        if self.odd("raises in update"):
            raise RuntimeError("the device fell off the bus")
        if self.odd("refuses an update"):
            raise Refused("these are not its weights")
        self.version = version
        return 3

    def measure(
        self, batch: int, context_tokens: int, prefill_tokens: int, steps: int
    ) -> tuple[int, ...]:
        return (batch,) * steps

    def stats(self) -> Stats:
        return Stats(
            t_ns=time.monotonic_ns(),
            running=len(self.requests),
            waiting=0,
            kv_blocks_used=len(self.requests),
            kv_blocks=100,
            generated_tokens=self.generated,
            prefilled_tokens=0,
            cached_tokens=0,
            preemptions=0,
            steps=self.steps,
            first_token_ns=self.first_ns,
            last_token_ns=self.last_ns,
        )

    def step(self) -> bool:
        if not self.requests or not self.admits:
            return False
        threading.Event().wait(STEP_NS / NS_PER_S)
        self.one_more()
        return not (self.odd("runs ahead") and self.steps > 20)

    def run(self, wait: Wait) -> None:
        while not wait(time.monotonic_ns() + (STEP_NS if self.requests else NS_PER_S)):
            if self.requests and self.admits:
                self.one_more()

    def one_more(self) -> None:
        if self.odd("raises in step"):
            raise RuntimeError("the device fell off the bus")
        self.steps += 1
        for request in list(self.requests.values()):
            more = msgspec.structs.replace(request, produced_tokens=request.produced_tokens + 1)
            self.requests[request.id] = more
            done = more.produced_tokens >= more.response_tokens
            if done:
                del self.requests[request.id]
            self.say(request, 1, "finished" if done else "")

    def say(self, request: Carried, count: int, ended: str) -> None:
        now_ns = time.monotonic_ns()
        self.generated += count
        if count:
            self.first_ns, self.last_ns = self.first_ns or now_ns, now_ns
        if self.here.rank:
            return
        output = Output(
            instance=self.here.instance.name,
            id=request.id,
            start=request.produced_tokens,
            count=count,
            first_ns=now_ns,
            last_ns=now_ns,
            ended=ended,  # type: ignore[arg-type]  # one of the words that it may be
            version=self.version,
        )
        self.tell(output)

    def close(self) -> None:
        if folder := self.spec.options.get("closed"):
            Path(folder, f"{time.monotonic_ns()}").touch()


def meet(seat: Seat) -> None:
    """Meet the other ranks at a port, as engines do; never ends if one does not come."""
    host, _, port = seat.meeting.partition(":")
    if seat.rank == 0:
        with socket.create_server((host, int(port))) as server:
            for _ in seat.instance.gpus[1:]:
                server.accept()[0].close()
        return
    while True:
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
        else:
            return


def make(spec: EngineSpec, tell: Tell) -> Scripted:
    return Scripted(spec, tell)


if __name__ == "__main__":
    rank.main({"paced": "scripted_engine", "vllm": "scripted_engine"})
