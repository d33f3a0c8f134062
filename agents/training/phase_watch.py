"""Sees every collective that torch makes in a step, and tells the phase of the plan that it is.

Everything passes torch's dispatcher, whoever asks for it: FSDP2, DTensor, a pipeline's schedule,
experts' exchange. Each collective is waited for here, so that its end is known and phases do not
overlap. Those of integers (sizes, ids) are not told. Imports torch: import it late.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from agents.training.base import Groups, Tell
from harness.model.scenario import Op
from harness.model.training.axes import Axis
from harness.model.training.phase import Phase
from harness.wire.training import PhaseHappened

_C10D: Any = torch._C._distributed_c10d  # noqa: SLF001 - where torch keeps its works

_OPS: Mapping[str, tuple[Op, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send_recv", 0),
    "recv_": ("send_recv", 0),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
}
"""By its name in torch: what it is, and which argument has the bytes that nccl-tests counts."""


@dataclass
class _Ahead:
    """A phase that is not over: how many of its times are left, and when the first began."""

    phase: Phase
    left: int
    begin_ns: int = 0


class PhaseWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Entered around a step. `communicated_ns`: in collectives, waiting for others included."""

    def __init__(self, plan: Sequence[Phase], groups: Groups, version: int, tell: Tell) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._rank, self._version, self._tell = groups.rank, version, tell
        self._axes: dict[str, Axis] = {
            handle.group_name: axis for axis, handle in groups.handles.items()
        }
        self._ahead = {
            index: _Ahead(phase, phase.times)
            for index, phase in enumerate(plan)
            if any(groups.rank in ranks for ranks in phase.groups)
        }
        self.communicated_ns = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run anything; tell when a collective begins and ends."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as what it is made of
        name = func._opname  # noqa: SLF001 - torch has no public name for it
        if func.namespace not in ("c10d", "_c10d_functional") or name not in _OPS:
            return func(*args, **(kwargs or {}))
        op, place = _OPS[name]
        tensor = args[place][0] if isinstance(args[place], list) else args[place]
        if not tensor.is_floating_point():
            return func(*args, **(kwargs or {}))
        index = self._which(op, self._axes.get(_group_name(args)), tensor.nbytes)
        begin_ns = self._begun(index, tensor.nbytes)
        out = _waited(func(*args, **(kwargs or {})))
        self._ended(index, tensor.nbytes, begin_ns)
        return out

    def _which(self, op: Op, axis: Axis | None, size: int) -> int | None:
        """Return the first phase to come of this kind, one of the same size if there is any."""
        alike = [
            index
            for index, ahead in self._ahead.items()
            if (ahead.phase.op, ahead.phase.axis) == (op, axis)
        ]
        same = (index for index in alike if self._ahead[index].phase.bytes == size)
        return next(same, alike[0] if alike else None)

    def _begun(self, index: int | None, size: int) -> int:
        begin_ns = time.monotonic_ns()
        if index is not None and not self._ahead[index].begin_ns:
            self._ahead[index].begin_ns = begin_ns
            self._say(index, size, 0)
        return begin_ns

    def _ended(self, index: int | None, size: int, begin_ns: int) -> None:
        end_ns = time.monotonic_ns()
        self.communicated_ns += end_ns - begin_ns
        if index is not None:
            self._ahead[index].left -= 1
            if not self._ahead[index].left:
                self._say(index, size, end_ns)
                del self._ahead[index]

    def _say(self, index: int, size: int, end_ns: int) -> None:
        ahead = self._ahead[index]
        self._tell(
            PhaseHappened(
                version=self._version,
                index=index,
                name=ahead.phase.name,
                op=ahead.phase.op,
                axis=ahead.phase.axis,
                bytes=size,
                begin_ns=ahead.begin_ns,
                end_ns=end_ns,
                rank=self._rank,
            )
        )


def _group_name(args: Sequence[Any]) -> str:
    """Return the name of the group among a collective's arguments: itself, or its object."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return arg
        if isinstance(arg, torch.ScriptObject) and str(arg._type()).endswith("ProcessGroup"):  # noqa: SLF001 - no public name
            return str(torch.distributed.ProcessGroup.unbox(arg).group_name)
    return ""


def _waited(out: Any) -> Any:
    """Wait for a collective's end; return what it gave, with a work that is done already.

    Waiting twice for the same message of gloo would wait for the next one.
    """
    if isinstance(out, torch.Tensor):
        return torch.ops._c10d_functional.wait_tensor(out)  # noqa: SLF001 - that is its name
    if isinstance(out, tuple | list):
        return type(out)(
            _waited(one) if isinstance(one, torch.ScriptObject) else one for one in out
        )
    _C10D.Work.unbox(out).wait()
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([])
    return _C10D._create_work_from_future(done).boxed()  # noqa: SLF001 - its only maker
