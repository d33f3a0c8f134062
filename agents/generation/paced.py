"""The emulated accelerator: a life cycle in real time by a latency profile, with real bytes.

Nothing is computed. Rank 0 runs the instance's requests (`agents.generation.pace`); every rank
holds its shard of the weights and the KV that was sent to it, both of the model's size times
`bytes_scale`. A shard is copied from a file that weight sync brought, or from this process' host
copy of all weights (scaled, random, read by nothing), in the time that its GPU would take for all
of it, where the profile says; sleeping frees it. KV moves over TCP between ranks
(`agents.generation.transfer`), is checked on arrival, and is worth nothing unless all came.

Commands that take the device (weights, KV, timing) stop the steps, as in an engine whose loop
does one thing at a time; after them a new timeline begins.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import numpy as np

from agents.generation.base import Marks, Seat, Tell, Wait
from agents.generation.group import Group
from agents.generation.kv import Bytes, Kv
from agents.generation.pace import Pace, sleep_until_ns
from agents.generation.shards import Tensors
from agents.generation.transfer import SEND_NS, Landing, Piece, send
from harness.errors import UsageError
from harness.model import intake, room
from harness.model.batching import Batching, Limits
from harness.model.intake import Refused
from harness.model.layout import Layout, weight_bytes_per_gpu
from harness.model.profile import Profile, costs_of, load_ns
from harness.model.requests import Carried
from harness.model.reshard import Part, group_of, moves, part_of
from harness.model.steptime import Faster, StepCosts
from harness.wire.generation import Capacity, EngineSpec, KvTarget, Stats, Verb, Work


def make(spec: EngineSpec, tell: Tell) -> Paced:
    """Make the engine of one rank process."""
    return Paced(spec, tell)


@cache
def _host_copy(size: int, seed: int) -> Bytes:
    """Return all weights as the host holds them, filled once in a process' life."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


@dataclass
class _Up:
    """What there is between `build` and `tear_down`. `weights` is None while it sleeps."""

    seat: Seat
    limits: Limits
    group: Group
    landing: Landing
    pace: Pace
    kv: Kv
    weights: Bytes | None


class Paced:
    """`agents.generation.base.Engine`; see the module."""

    lockstep = False

    def __init__(self, spec: EngineSpec, tell: Tell) -> None:
        if spec.profile is None:
            raise UsageError("the paced engine needs a latency profile")
        self._spec, self._profile, self._tell = spec, spec.profile, tell
        self._host = _host_copy(self._scaled(spec.profile.shape.parameter_bytes), spec.seed)
        self._up_: _Up | None = None

    def facts(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Say that nothing is computed here, and by which profile it is paced."""
        profile = self._profile
        facts = {
            "engine": "paced",
            "version": f"profile of {profile.model} on {profile.gpu.name}",
            "device": f"an emulated {profile.gpu.name} (no token is computed)",
        }
        return facts, ()

    # -- life ----------------------------------------------------------------------------------

    def build(self, seat: Seat, version: int, marks: Marks, source: str = "") -> Capacity:
        """Meet the other ranks, copy the shard, lay out KV. Raises `UsageError`, with reasons."""
        layout, shape = seat.instance.layout, self._profile.shape
        limits = limits_of(self._spec, self._profile, layout)
        costs_of(self._profile, layout)  # a layout that the profile does not know is told first
        with marks("groups"):
            group = Group(seat.meeting, seat.rank, layout.gpus)
        try:
            with marks("weights"):
                weights = self._loaded(seat, source)
            with marks("kv_cache"):
                kv = Kv(part_of(layout, shape, seat.rank), shape, self._spec.bytes_scale)
                room = kv.bytes_of(limits.blocks * limits.block_tokens)
                landing = Landing(seat.address, room)
        except BaseException:
            group.close()
            raise
        pace = self._pace(seat, limits, version)
        self._up_ = _Up(seat, limits, group, landing, pace, kv, weights)
        return Capacity(
            sequences_max=limits.sequences_max,
            step_max_tokens=limits.step_max_tokens,
            blocks=limits.blocks,
            block_tokens=limits.block_tokens,
            length_max_tokens=limits.length_max_tokens,
            vocab=shape.vocab,
            weights_bytes=weights.nbytes,
        )

    def kv_peer(self) -> str:
        """Return where this rank takes KV."""
        return self._up.landing.peer

    def tear_down(self, marks: Marks) -> None:
        """Free all; harmless where nothing is built."""
        with marks("teardown"):
            self.close()

    def sleep(self) -> int:
        """Free the weights and all KV; the groups stay. Nothing stays on the device."""
        up = self._up
        self._refuse_if_used()
        up.weights = None
        up.kv.keep(())
        return 0

    def wake(self, version: int, marks: Marks, source: str = "") -> None:
        """Copy the shard again, and start with empty KV."""
        up = self._up
        with marks("weights"):
            up.weights = self._loaded(up.seat, source)
        with marks("kv_cache"):
            up.pace = self._pace(up.seat, up.limits, version)

    def close(self) -> None:
        """Leave nothing behind."""
        if up := self._up_:
            self._up_ = None
            up.landing.close()
            up.group.close()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Queue requests; those whose KV came, whole and on every rank, go on at once."""
        up = self._up
        came = self._claim([work for work in works if work.kv_transfer])
        refused: dict[str, str] = {}
        with_kv: list[str] = []
        if up.seat.rank == 0:
            up.pace.report()
            for work in works:
                self._enter(work.carried, work.carried.id in came, refused, with_kv)
        if any(work.kv_transfer for work in works):
            self._keep_running()
            up.pace.restart()
        return refused, tuple(with_kv)

    def _enter(
        self, request: Carried, came: bool, refused: dict[str, str], with_kv: list[str]
    ) -> None:
        pace = self._up.pace
        try:
            if came:
                intake.import_with_kv(pace.state, request)
                with_kv.append(request.id)
                pace.opened(request, request.kv_tokens)
                return
        except Refused:
            pass  # no seat, or no room: it is queued, and its KV computed anew
        try:
            intake.submit(pace.state, request)
        except Refused as error:
            refused[request.id] = str(error)
        else:
            pace.opened(request)

    def _claim(self, works: Sequence[Work]) -> AbstractSet[str]:
        """Take the KV that came for these requests; return, on rank 0, whose is whole."""
        up = self._up
        if not works:
            return frozenset()
        dp, mine = up.seat.instance.dp, up.seat.rank // (up.seat.instance.tp * up.seat.instance.pp)
        broken = [
            work.carried.id
            for work in works
            if group_of(work.carried.id, dp) == mine
            and not up.kv.put(
                work.carried.id,
                work.carried.kv_tokens,
                up.landing.claim(work.kv_transfer, work.carried.id),
            )
        ]
        anywhere = {name for names in up.group.gather(broken) for name in names}
        return {work.carried.id for work in works} - anywhere

    def withdraw(
        self, ids: Sequence[str] | None, verb: Verb, to: KvTarget | None
    ) -> tuple[list[Carried], dict[str, int]]:
        """End requests; with `to`, send their KV first. Sent bytes are those of this rank."""
        up = self._up
        left = self._leave(ids, verb) if up.seat.rank == 0 else []
        sent_bytes: dict[str, int] = {}
        if to is not None:
            sent_bytes = self._send_kv(left, to)
            self._keep_running()
            up.pace.restart()
        return left, sent_bytes

    def _leave(self, ids: Sequence[str] | None, verb: Verb) -> list[Carried]:
        pace = self._up.pace
        pace.report()
        if ids is None:
            ids = sorted(pace.state.requests, key=lambda name: pace.state.requests[name].place)
        leave = intake.abort if verb == "abort" else intake.export
        left = [request for name in ids if (request := leave(pace.state, name))]
        for request in left:
            pace.ended(request, "aborted" if verb == "abort" else "exported")
        return left

    def _send_kv(self, left: Sequence[Carried], to: KvTarget) -> dict[str, int]:
        """Send what this rank holds of the KV; return its bytes by request, of those all sent."""
        up, rank = self._up, self._up.seat.rank
        tokens = dict(up.group.broadcast([(r.id, r.kv_tokens) for r in left if r.kv_tokens]))
        outgoing: dict[int, list[tuple[str, Part]]] = defaultdict(list)
        for name in tokens:
            layouts = up.seat.instance.layout, to.instance.layout
            for move in moves(*layouts, self._profile.shape, name):
                if move.source == rank:
                    outgoing[move.target].append((name, move.part))
        failed: set[str] = set()
        sent_bytes: dict[str, int] = defaultdict(int)
        deadline_ns = time.monotonic_ns() + SEND_NS
        for target, parts in outgoing.items():
            pieces = (self._piece(to.transfer, name, tokens[name], part) for name, part in parts)
            tried = send(to.peers[target], pieces, deadline_ns - time.monotonic_ns())
            for piece, problem in tried:
                sent_bytes[piece.request] += piece.size_bytes
                if problem:
                    failed.add(piece.request)
            failed.update(name for name, _ in parts[len(tried) :])
        failed = set(up.group.broadcast([n for names in up.group.gather(failed) for n in names]))
        return {name: sent for name, sent in sent_bytes.items() if name not in failed}

    def _piece(self, transfer: str, name: str, tokens: int, part: Part) -> tuple[Piece, memoryview]:
        data = self._up.kv.cut(name, tokens, part).data.cast("B")
        (low, high), (first, last) = ((r.start, r.stop) for r in part)
        return Piece(
            transfer, name, tokens, (low, high), (first, last), data.nbytes, crc32(data)
        ), data

    def _keep_running(self) -> None:
        """Drop KV that was received for requests that no longer run here, on all ranks."""
        up = self._up
        up.kv.keep(up.group.broadcast([request.id for request in up.pace.state.running]))

    def admit(self, *, allowed: bool) -> None:
        """Let waiting requests in, or not."""
        (intake.admit_again if allowed else intake.stop_admitting)(self._up.pace.state)

    # -- weights and timing --------------------------------------------------------------------

    def update_weights(self, version: int, source: str, *, drop_kv: bool) -> int:
        """Copy this rank's shard anew, from a file or from host memory."""
        up = self._up
        file = Tensors(source) if source else None
        up.pace.report()
        intake.set_version(up.pace.state, version)
        if drop_kv:
            intake.drop_kv(up.pace.state)
            up.kv.keep(())
        assert up.weights is not None, "asleep: wake it instead"
        self._load(up.weights, up.seat, file)
        up.pace.restart()
        return up.weights.nbytes

    def measure(
        self, batch: int, context_tokens: int, prefill_tokens: int, steps: int
    ) -> tuple[int, ...]:
        """Time steps of a life cycle apart from the instance's own; rank 0 alone has times."""
        up = self._up
        self._refuse_if_used()
        if not batch and prefill_tokens > up.limits.step_max_tokens:
            raise Refused(
                f"{prefill_tokens} tokens are not prefilled in one step, which takes "
                f"{up.limits.step_max_tokens}"
            )
        up.pace.restart()
        apart = Pace(
            up.seat.instance.name,
            Batching(up.limits),
            self._costs(up.seat),
            lambda _output: None,
        )
        times_ns: list[int] = []
        for _ in range(1 if batch else steps):
            if batch:
                _decode(apart, batch, context_tokens - 1, steps + 2)
            else:
                _prefill(apart, prefill_tokens)
            if up.seat.rank:  # it has refused what rank 0 refuses
                break
            times_ns += apart.time_steps(steps if batch else 1)
        return tuple(times_ns)

    def _refuse_if_used(self) -> None:
        """Raise `Refused` on all ranks where rank 0 holds requests."""
        up = self._up
        if up.group.broadcast(bool(up.pace.state.requests)):
            raise Refused(f"{up.seat.instance.name} holds requests: withdraw them first")

    def stats(self) -> Stats:
        """Return where the instance stands; of use on rank 0 alone."""
        return self._up.pace.stats()

    def step(self) -> bool:
        """Return False: it steps by itself, see `run`."""
        return False

    def run(self, wait: Wait) -> None:
        """Step in real time until a command waits."""
        self._up.pace.run(wait)

    # -- bytes ---------------------------------------------------------------------------------

    @property
    def _up(self) -> _Up:
        if self._up_ is None:
            raise Refused("no engine is built here")
        return self._up_

    def _pace(self, seat: Seat, limits: Limits, version: int) -> Pace:
        return Pace(seat.instance.name, Batching(limits, version), self._costs(seat), self._tell)

    def _costs(self, seat: Seat) -> StepCosts:
        costs = costs_of(self._profile, seat.instance.layout)
        return costs if self._spec.speed == 1 else Faster(costs, self._spec.speed)

    def _scaled(self, size: int) -> int:
        return max(1, round(size * self._spec.bytes_scale))

    def _loaded(self, seat: Seat, source: str) -> Bytes:
        """Return this rank's shard; of its size, whichever part of the weights that is."""
        size = self._scaled(weight_bytes_per_gpu(seat.instance.layout, self._profile.shape))
        weights = np.empty(min(size, self._host.nbytes), np.uint8)
        self._load(weights, seat, Tensors(source) if source else None)
        return weights

    def _load(self, into: Bytes, seat: Seat, file: Tensors | None) -> None:
        """Fill a shard, and be done no sooner than its GPU would be."""
        lasts_ns = load_ns(self._profile, seat.instance.layout, self._spec.speed)
        done_ns = time.monotonic_ns() + lasts_ns
        if file:
            file.fill(into, seat.rank * into.nbytes)
        else:
            first = min(seat.rank * into.nbytes, self._host.nbytes - into.nbytes)
            np.copyto(into, self._host[first : first + into.nbytes])
        sleep_until_ns(done_ns)


def _decode(apart: Pace, batch: int, known_tokens: int, response_tokens: int) -> None:
    """Let sequences decode that have one token of their response, and its KV."""
    for number in range(batch):
        request = Carried(f"timed{number}", known_tokens, response_tokens, 0, 1, known_tokens)
        intake.import_with_kv(apart.state, request)
        apart.opened(request)


def _prefill(apart: Pace, prompt_tokens: int) -> None:
    request = Carried("timed", prompt_tokens, 1, 0)
    intake.submit(apart.state, request)
    apart.opened(request)


def limits_of(spec: EngineSpec, profile: Profile, layout: Layout) -> Limits:
    """Return what an instance of `layout` takes. Raises `UsageError` with every reason if none."""
    return room.limits_of(
        profile,
        layout,
        sequences_max=spec.sequences_max,
        step_max_tokens=spec.step_max_tokens,
        kv_max_tokens=spec.kv_max_tokens,
        block_tokens=spec.block_tokens,
        length_max_tokens=spec.length_max_tokens,
    )
