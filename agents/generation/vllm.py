"""vLLM as an engine: real tokens, on GPUs or on the CPU of a machine without them.

Every rank process runs a whole `LLMEngine` (`agents.generation.launch`), whose scheduler decides by
itself; that they agree is why verbs and steps come in one sequence everywhere. A response's length
is replayed (``ignore_eos`` with ``max_tokens``) and tokens are the likeliest ones, so a request
that goes on elsewhere, from prompt and partial output, goes on with the same tokens.

vLLM moves no KV by itself unless its options configure a KV connector; what then came is told by
`Output.cached_tokens`, which also counts what the prefix cache had.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from agents.generation import launch, weight_transfer
from agents.generation.base import Marks, Seat, Tell, Wait
from agents.generation.sources import Sources
from agents.generation.tally import Running, Totals
from agents.generation.timing import Timer
from harness.errors import UsageError
from harness.model.generation_rules import CPU_FREES_NOTHING, CPU_TAKES_TP_ONLY
from harness.model.intake import Refused
from harness.model.layout import weight_bytes_per_gpu
from harness.model.requests import Carried
from harness.model.shape import shape_of_config
from harness.wire.generation import Capacity, EngineSpec, KvTarget, Output, Stats, Verb, Work


def make(spec: EngineSpec, tell: Tell) -> Vllm:
    """Make the engine of one rank process: imports vLLM. Raises `UsageError`."""
    return Vllm(spec, tell)


@dataclass
class _Up:
    """What there is between `build` and `tear_down`."""

    seat: Seat
    engine: Any
    totals: Totals
    capacity: Capacity
    used_before_bytes: int
    """Of the device's memory, before anything was built."""
    shapes: dict[str, tuple[int, ...]]
    """Of the tensors that it was launched with: a file of new weights has them too."""
    met: bool = False
    """Whether the ranks have met to transfer weights."""

    @property
    def scheduler(self) -> Any:
        """Return vLLM's scheduler, which is this rank's own."""
        return self.engine.engine_core.engine_core.scheduler


class Vllm:
    """`agents.generation.base.Engine`; see the module."""

    lockstep = True

    def __init__(self, spec: EngineSpec, tell: Tell) -> None:
        if spec.model and not (Path(spec.model) / "config.json").is_file():
            raise UsageError(f"{spec.model}: no config.json there; a model directory has one")
        self._spec, self._tell = spec, tell
        self._vllm = launch.import_vllm()
        self._cpu = launch.on_cpu()
        self._sources = Sources(spec)
        self._version = 0
        self._running: dict[str, Running] = {}
        self._up_: _Up | None = None

    def facts(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return vLLM's version and its device; warn of a version that was not tried."""
        version = str(self._vllm.__version__)
        facts = {"engine": "vllm", "version": version, "device": "cpu"}
        if not self._cpu:
            import torch

            facts["device"] = torch.cuda.get_device_name()
        if version.startswith(launch.TESTED):
            return facts, ()
        tested = ", ".join(f"{prefix}x" for prefix in launch.TESTED)
        return facts, (f"vLLM {version} was never tried with this harness; {tested} was",)

    # -- life ----------------------------------------------------------------------------------

    def build(self, seat: Seat, version: int, marks: Marks, source: str = "") -> Capacity:
        """Start vLLM's engine together with the other ranks. Raises `UsageError`."""
        layout = seat.instance.layout
        if layout.dp > 1 or (self._cpu and (layout.pp > 1 or layout.ep > 1)):
            why = CPU_TAKES_TP_ONLY if self._cpu else "vLLM takes one DP rank here: use instances"
            raise Refused(f"{layout}: {why}")
        if source:
            self._sources.name(version, source)
        self._sources.check(version)
        totals, used_bytes = Totals(), self._device_used_bytes()
        with self._sources.folder(version) as folder:
            shapes = weight_transfer.shapes_in(folder)
            engine = launch.launch(self._spec, seat, folder, marks, lambda *_: totals)
        capacity = self._capacity(engine, seat)
        self._up_ = _Up(seat, engine, totals, capacity, used_bytes, shapes)
        self._version = version
        return capacity

    def _capacity(self, engine: Any, seat: Seat) -> Capacity:
        config = engine.vllm_config
        return Capacity(
            sequences_max=config.scheduler_config.max_num_seqs,
            step_max_tokens=config.scheduler_config.max_num_batched_tokens,
            blocks=config.cache_config.num_gpu_blocks - 1,  # vLLM keeps one for itself
            block_tokens=config.cache_config.block_size,
            length_max_tokens=config.model_config.max_model_len,
            vocab=config.model_config.get_vocab_size(),
            weights_bytes=_weights_bytes(engine, seat),
        )

    def kv_peer(self) -> str:
        """Return "": a KV connector of vLLM finds its own way."""
        return ""

    def tear_down(self, marks: Marks) -> None:
        """Shut vLLM's engine down and free all; harmless where nothing is built."""
        with marks("teardown"):
            self.close()

    def close(self) -> None:
        """Leave nothing behind."""
        self._running.clear()
        up, self._up_ = self._up_, None
        if up:
            up.engine.engine_core.shutdown()
            del up
            gc.collect()  # an engine is full of cycles: its KV would stay until some later time

    def sleep(self) -> int:
        """Move the weights to host memory and drop the KV; GPUs only."""
        up = self._up
        if self._cpu:
            raise Refused(CPU_FREES_NOTHING)
        if self._running:
            raise Refused(f"{up.seat.instance.name} holds requests: withdraw them first")
        up.engine.sleep(level=1)
        return max(0, self._device_used_bytes() - up.used_before_bytes)

    def wake(self, version: int, marks: Marks, source: str = "") -> None:
        """Bring the weights back, then room for KV; load those of `version` if they are others."""
        up = self._up
        if source:
            self._sources.name(version, source)
        with marks("weights"):
            up.engine.wake_up(tags=["weights"])
            if version != self._version:
                self._load(version)
        with marks("kv_cache"):
            up.engine.wake_up(tags=["kv_cache"])
        up.totals.restart()  # a woken engine tells of its own time only, as one just built

    def _device_used_bytes(self) -> int:
        if self._cpu:
            return 0
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return int(total_bytes - free_bytes)

    # -- requests ------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Queue requests. What a KV connector brings shows with the first output only."""
        refused = {}
        for work in works:
            if why := self._unfit(work):
                refused[work.carried.id] = why
            else:
                inner = self._add(
                    work.carried.id,
                    (*work.prompt, *work.output),
                    work.carried.response_tokens - work.carried.produced_tokens,
                )
                self._running[work.carried.id] = Running(work.carried, inner)
        return refused, ()

    def _unfit(self, work: Work) -> str:
        carried, longest = work.carried, self._up.capacity.length_max_tokens
        tokens = carried.prompt_tokens + carried.response_tokens
        if carried.id in self._running:
            return f"{carried.id} is here already"
        if tokens > longest:
            return f"{carried.id} grows to {tokens} tokens; this model takes {longest}"
        came = len(work.prompt), len(work.output)
        if came != (carried.prompt_tokens, carried.produced_tokens) or not work.prompt:
            return (
                f"{carried.id} came with {came[0]} and {came[1]} token ids of a prompt of "
                f"{carried.prompt_tokens} and an output of {carried.produced_tokens}; vLLM needs "
                "all of them, and a prompt of at least one"
            )
        if carried.produced_tokens >= carried.response_tokens:
            return f"{carried.id} has all of its {carried.response_tokens} tokens"
        return ""

    def _add(self, name: str, tokens: Sequence[int], more_tokens: int) -> Any:
        """Give vLLM a request; return its scheduler's record of it."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=self._spec.temperature,
            seed=self._seed_of(name, len(tokens)),
            ignore_eos=True,
            max_tokens=more_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        inner = self._up.engine.add_request(name, tokens_input(list(tokens)), params)
        return self._up.scheduler.requests[inner]

    def _seed_of(self, name: str, position: int) -> int | None:
        """Return what draws a request's tokens from here on: the same on all of its ranks."""
        if not self._spec.temperature:
            return None
        return zlib.crc32(f"{self._spec.seed} {name} {position}".encode())

    def withdraw(
        self, ids: Sequence[str] | None, verb: Verb, to: KvTarget | None
    ) -> tuple[list[Carried], dict[str, int]]:
        """End requests between two steps, when all of their tokens are told. Sends no KV."""
        names = [name for name in (self._running if ids is None else ids) if name in self._running]
        left = [self._running[name].leaves() for name in names]
        self._up.engine.abort_request(names)
        now_ns = time.monotonic_ns()
        for request in left:
            del self._running[request.id]
            self._told(
                request.id,
                request.produced_tokens,
                now_ns,
                ended="aborted" if verb == "abort" else "exported",
            )
        return left, {}

    def admit(self, *, allowed: bool) -> None:
        """Let waiting requests in, or not."""
        from vllm.v1.core.sched.interface import PauseState

        state = PauseState.UNPAUSED if allowed else PauseState.PAUSED_NEW
        self._up.scheduler.set_pause_state(state)

    def step(self) -> bool:
        """Take one step and tell what it gave; return whether anything is left to do."""
        up = self._up
        outputs = up.engine.step()
        now_ns = time.monotonic_ns()
        up.totals.steps += 1
        for output in outputs:
            self._heard(output, now_ns)
        return bool(up.scheduler.has_requests())

    def _heard(self, output: Any, now_ns: int) -> None:
        request, ids = self._running[output.request_id], tuple(output.outputs[0].token_ids)
        totals = self._up.totals
        if ids:
            totals.first_token_ns = totals.first_token_ns or now_ns
            totals.last_token_ns = now_ns
            request.first_token_ns = request.first_token_ns or now_ns
            request.version_last = self._version
            if request.version_first is None:
                request.version_first = self._version
        self._told(
            output.request_id,
            request.next_token,
            now_ns,
            count=len(ids),
            ids=ids,
            ended="finished" if output.finished else "",
            cached_tokens=0 if request.produced_tokens else output.num_cached_tokens or 0,
        )
        request.produced_tokens += len(ids)
        if output.finished:
            del self._running[output.request_id]

    def _told(self, name: str, start: int, now_ns: int, count: int = 0, **more: Any) -> None:
        self._tell(
            Output(
                instance=self._up.seat.instance.name,
                id=name,
                start=start,
                count=count,
                first_ns=now_ns,
                last_ns=now_ns,
                version=self._version,
                **more,
            )
        )

    def run(self, wait: Wait) -> None:
        """Do nothing: steps are taken as told."""

    def stats(self) -> Stats:
        """Return where vLLM's scheduler stands, and its counts."""
        up = self._up
        running, waiting = up.scheduler.get_request_counts()
        going = sum(1 for request in self._running.values() if request.produced_tokens)
        return Stats(
            t_ns=time.monotonic_ns(),
            running=running,
            waiting=waiting,
            kv_blocks_used=round(up.scheduler.kv_cache_manager.usage * up.capacity.blocks),
            kv_blocks=up.capacity.blocks,
            prefilling=max(0, running - going),
            **vars(up.totals),
        )

    # -- weights and timing --------------------------------------------------------------------

    def update_weights(self, version: int, source: str, *, drop_kv: bool) -> int:
        """Load weights from a file, or a directory of them; "" is the model's own.

        The tiny model has weights of every version. Returns what this rank holds. Raises
        `UsageError`.
        """
        up = self._up
        if source and not Path(source).is_dir():
            weight_transfer.checked_header(source, up.shapes)
        elif source and not any(Path(source).glob("*.safetensors")):
            raise UsageError(
                f"{source}: no *.safetensors there; weights are loaded from such files"
            )
        connector = up.engine.vllm_config.kv_transfer_config is not None
        if drop_kv and connector and not up.scheduler.reset_connector_cache():
            raise Refused(
                "the KV connector cannot forget the KV of the old weights: update without drop_kv, "
                "or run without a connector"
            )
        self._sources.name(version, source)
        self._load(version)
        weight_transfer.forget_prefixes(up.engine, up.scheduler, version, drop_kv=drop_kv)
        return up.capacity.weights_bytes

    def _load(self, version: int) -> None:
        up = self._up
        if path := self._sources.file(version):
            weight_transfer.load(up.engine, path, None if up.met else up.seat)
            up.met = True
        else:
            with self._sources.folder(version) as folder:
                up.engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._version = version

    def measure(
        self, batch: int, context_tokens: int, prefill_tokens: int, steps: int
    ) -> tuple[int, ...]:
        """Time steps with requests of its own, which are in no count and no output."""
        up = self._up
        if self._running:
            raise Refused(f"{up.seat.instance.name} holds requests: withdraw them first")
        timer, kept = Timer(up.engine, up.capacity, self._add), replace(up.totals)
        try:
            if batch:
                return tuple(timer.decode(batch, context_tokens, steps))
            return tuple(timer.prefill(prefill_tokens, steps))
        finally:
            vars(up.totals).update(vars(kept))

    @property
    def _up(self) -> _Up:
        if self._up_ is None:
            raise Refused("no engine is built here")
        return self._up_


def _weights_bytes(engine: Any, seat: Seat) -> int:
    """Return what this rank holds. On CPU vLLM repacks weights out of sight: then by the shape."""
    parameters = list(engine.model_executor.driver_worker.worker.get_model().parameters())
    if all(parameter.numel() for parameter in parameters):
        return sum(parameter.nbytes for parameter in parameters)
    config = engine.vllm_config.model_config
    shape, problems = shape_of_config(config.hf_config.to_dict())
    if problems:
        return 0
    shape = msgspec.structs.replace(shape, dtype_bytes=config.dtype.itemsize)
    return weight_bytes_per_gpu(seat.instance.layout, shape)
