"""Weights from a file into a running vLLM, through its weight-transfer plug point.

vLLM's own transfer engines have a trainer that sends from a GPU of its own, and NCCL takes no two
ranks on one GPU. Here the sender is rank 0 of the instance itself, which has the file in its node's
memory: it packs tensors into buckets and broadcasts them to the other ranks, over gloo on CPUs,
over NCCL on GPUs (this was never run). Every rank verifies each tensor against the file's
checksums, and loads it as vLLM loads a checkpoint's. vLLM's four phases are kept: once the group;
then for each version one start, one update with all buckets, one finish.

`forget_prefixes` is what vLLM leaves to its caller: that no new request shares KV of old weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from agents import weights_file
from agents.generation.base import Seat
from agents.weights_file import Header
from harness.errors import BadFile

GLOO, NCCL = "gloo", "nccl_of_ranks"
"""Names of our engines among vLLM's. It has one called ``nccl``, see above."""
BUCKET_BYTES = 64 << 20
_LIMIT = timedelta(seconds=60)
_ALIGN_BYTES = 16
_NAMED_MOST = 3

Place = tuple[str, int]
"""A tensor's name, and where it begins in its bucket."""


@dataclass
class GroupInfo:
    """How the ranks of an instance meet: vLLM's init info. `address` is ``HOST:PORT``."""

    address: str
    rank: int
    size: int


@dataclass
class FileInfo:
    """What is to be loaded: vLLM's update info. The file is on the node of all ranks."""

    path: str


def load(engine: Any, path: str, meeting: Seat | None) -> None:
    """Load a file into a running engine: one start and one finish, whatever its size.

    `meeting` the first time: where this rank meets the others. All of them call this at once.
    """
    tell = engine.collective_rpc
    if meeting is not None:
        tell("init_weight_transfer_engine", kwargs={"init_info": _group_info(meeting)})
    tell("start_weight_update")
    tell("update_weights", kwargs={"update_info": {"path": path}})
    tell("finish_weight_update")


def _group_info(seat: Seat) -> dict[str, Any]:
    """Return how this rank meets the others: at the last port of those that are the instance's."""
    address = f"{seat.meeting.rpartition(':')[0]}:{seat.ports[-1]}"
    return {"address": address, "rank": seat.rank, "size": seat.instance.layout.gpus}


def shapes_in(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes in a model directory's files of weights. Raises `BadFile`."""
    headers = [
        weights_file.read_header(path) for path in sorted(Path(folder).glob("*.safetensors"))
    ]
    return {name: entry.shape for header in headers for name, entry in header.entries.items()}


def checked_header(path: str, shapes: Mapping[str, tuple[int, ...]]) -> Header:
    """Return a file's header. Raises `BadFile` unless it has a model's tensors and no others.

    vLLM would keep old weights where new ones are missing.
    """
    try:
        header = weights_file.read_header(path)
    except OSError as error:
        raise BadFile(path, [str(error.strerror)]) from error
    found = {name: entry.shape for name, entry in header.entries.items()}
    if shapes and (odd := found.items() ^ shapes.items()):
        names = sorted({name for name, _ in odd})
        text = ", ".join(
            f"{name} ({found.get(name, 'missing')}, not {shapes.get(name, 'there')})"
            for name in names[:_NAMED_MOST]
        )
        raise BadFile(path, [f"{len(names)} tensors are not this model's: {text}"])
    return header


def buckets_of(
    header: Header, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[list[Place], int]]:
    """Yield each bucket's tensors with their places in it, and its size.

    Places are aligned for any dtype. A tensor is never split; a larger one has a bucket of its own.
    """
    places: list[Place] = []
    size = 0
    for name, entry in header.entries.items():
        length = entry.data_offsets[1] - entry.data_offsets[0]
        if places and size + length > bucket_bytes:
            yield places, size
            places, size = [], 0
        places.append((name, size))
        size += length + -length % _ALIGN_BYTES
    if places:
        yield places, size


def register() -> None:
    """Make our engines known to vLLM; harmless twice."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for name in (GLOO, NCCL):
        if name not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it has no question
            WeightTransferEngineFactory.register_engine(name, _engine_class())


def _engine_class() -> Any:
    from vllm.distributed.weight_transfer import WeightTransferEngine

    class FromFile(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
        init_info_cls, update_info_cls = GroupInfo, FileInfo
        group: Any = None
        rank = 0

        def init_transfer_engine(self, info: GroupInfo) -> None:
            self.rank = info.rank
            self.group = _group(info, "gloo" if self.config.backend == GLOO else "nccl")

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, info: FileInfo) -> None:
            for tensors in _received(info.path, self.group, self.rank, self.device):
                self.model.load_weights(tensors)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            group, self.group = self.group, None
            if group is not None:
                group.shutdown()

    return FromFile


def _group(info: GroupInfo, backend: str) -> Any:
    """Return a group of the ranks outside torch's global state; None where there is but one."""
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    if info.size == 1:
        return None
    host, _, port = info.address.rpartition(":")
    return stateless_init_torch_distributed_process_group(
        host, int(port), info.rank, info.size, backend, timeout=_LIMIT
    )


def _received(path: str, group: Any, rank: int, device: Any) -> Iterator[list[tuple[str, Any]]]:
    """Yield the tensors of each bucket. Raises `weights_file.Corrupt`."""
    import torch
    from torch.distributed import BroadcastOptions

    header = weights_file.read_header(path)
    data = dict(weights_file.tensors(path)) if rank == 0 else {}
    options = BroadcastOptions()
    options.rootRank = 0
    for places, size in buckets_of(header):
        # each its own: vLLM keeps views of it until a layer is whole
        bucket = torch.zeros(size, dtype=torch.uint8)
        if rank == 0:
            _pack(bucket, places, data)
        if group is not None:
            moved = bucket.to(device)
            group.broadcast([moved], options).wait()
            bucket = moved.cpu() if header.checksums else moved
        yield [(name, tensor.to(device)) for name, tensor in _unpack(path, header, places, bucket)]


def _pack(bucket: Any, places: Iterable[Place], data: Mapping[str, memoryview]) -> None:
    into = memoryview(bucket.numpy())
    for name, begins in places:
        into[begins : begins + len(data[name])] = data[name]


def _unpack(
    path: str, header: Header, places: Iterable[Place], bucket: Any
) -> Iterator[tuple[str, Any]]:
    """Yield each tensor, verified, as a view of its bucket."""
    for name, begins in places:
        entry = header.entries[name]
        length = math.prod(entry.shape) * weights_file.ITEM_BYTES[entry.dtype]
        part = bucket[begins : begins + length]
        if header.checksums:
            weights_file.check(path, name, memoryview(part.numpy()), header.checksums)
        yield name, part.view(_dtype(entry.dtype)).reshape(entry.shape)


def _dtype(name: str) -> Any:
    import torch

    names = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}
    special = {
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
    letters = name.rstrip("0123456789")
    return special.get(name) or getattr(torch, names[letters] + name[len(letters) :])


def forget_prefixes(engine: Any, scheduler: Any, version: int, *, drop_kv: bool) -> None:
    """Leave no KV of old weights that a new request could share; with `drop_kv`, none at all.

    vLLM empties its prefix cache only while nothing runs, or by preempting all that does. Else all
    blocks are evicted from it one by one, and what runs gets a salt: blocks that it fills from now
    on hold KV that looks back on old KV, and must never be found by their tokens.
    """
    if drop_kv:
        engine.reset_prefix_cache(reset_running_requests=True)
        return
    for request in scheduler.running:
        request.cache_salt = f"{request.request_id}, begun before weights {version}"
        request.block_hashes.clear()
        request.update_block_hashes()
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks})
