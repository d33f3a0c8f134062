"""How ranks carry a decoder together, each by torch's own means. Imports torch: import it late.

- dp: FSDP2 (`fully_shard`), a layer a unit. Parameters are gathered once a step, gradients summed.
- tp: DTensor (`parallelize_module`): heads and MLPs are split, two all-reduces a layer and way.
  Embeddings are whole on each rank.
- pp: `torch.distributed.pipelining`, GPipe's schedule; a stage has its layers only.
- ep: experts are split over all ranks of dp; tokens go to them and back by all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from agents.training.base import Groups
from agents.training.decoder import Config, Decoder, Experts
from harness.model.degrees import Degrees
from harness.model.shape import ModelShape
from harness.model.training.schedule import stages

_MEANS = {
    "dp": "FSDP2, gradients summed",
    "tp": "DTensor, embeddings whole",
    "pp": "torch.distributed.pipelining, GPipe",
    "ep": "all_to_all_single, experts over all ranks of DP",
}


def misfits(shape: ModelShape, degrees: Degrees) -> list[str]:
    """Return why a model cannot be carried on these degrees; none: it can."""
    dp, tp, pp, ep = degrees.dp, degrees.tp, degrees.pp, degrees.ep
    split = {"heads": shape.heads, "KV heads": shape.kv_heads, "MLP": shape.intermediate}
    problems = [f"TP {tp} does not divide the {split[part]} of {part}" for part in split
                if split[part] % tp]  # fmt: skip
    if tp > 1 and shape.experts:
        problems.append(f"TP {tp} does not split experts: use EP")
    if pp > shape.layers:
        problems.append(f"PP {pp} is more than the {shape.layers} layers")
    if pp > 1 and shape.tied_embeddings:
        problems.append(f"PP {pp} would part the embeddings, which are one table in this model")
    if ep > 1 and (not shape.experts or shape.experts % ep):
        problems.append(f"EP {ep} does not divide the {shape.experts} experts")
    if ep not in (1, dp):
        problems.append(f"EP {ep} with DP {dp}: experts are split over all ranks of DP or none")
    return problems


def means(groups: Groups) -> dict[str, str]:
    """Return what carries each axis that has more than one rank."""
    backend = "NCCL" if groups.device.startswith("cuda") else "gloo"
    return {axis: f"{_MEANS[axis]}, over {backend}" for axis in groups.handles}


def carried(config: Config, groups: Groups, weights: Mapping[str, Tensor]) -> Decoder:
    """Return this rank's part of the decoder; collective. `weights` are whole, by name."""
    decoder = Decoder(config, stages(config.shape.layers, groups.degrees.pp)[groups.place.pp])
    decoder.load_state_dict({name: weights[name] for name in decoder.state_dict()})
    decoder.to(groups.device)
    mesh = _mesh(groups)
    for layer in decoder.model.layers.values():
        if "tp" in groups.handles:
            parallelize_module(layer, mesh["tp"], _plan(), src_data_rank=None)
        if "ep" in groups.handles:
            layer.mlp.keep(groups.place.ep, groups.degrees.ep)
            layer.mlp.exchange = Exchange(groups.handles["ep"])
    if "dp" in groups.handles:
        _shard(decoder, mesh["dp"], tied=config.shape.tied_embeddings)
    return decoder


def _mesh(groups: Groups) -> Any:
    """Return the mesh of this rank's pipeline stage over those of dp and tp that there are."""
    axes = [axis for axis in ("dp", "tp") if axis in groups.handles]
    kind = groups.device.partition(":")[0]
    if not axes:
        return None
    if len(axes) == 1:
        handle = groups.handles[axes[0]]  # type: ignore[index]  # of the list above
        return {axes[0]: DeviceMesh.from_group(handle, kind, mesh_dim_names=(axes[0],))}
    degrees = groups.degrees
    first = groups.place.pp * degrees.dp * degrees.tp
    ranks = first + torch.arange(degrees.dp * degrees.tp).view(degrees.dp, degrees.tp)
    handles = [groups.handles["dp"], groups.handles["tp"]]
    return DeviceMesh.from_group(handles, kind, mesh=ranks, mesh_dim_names=("dp", "tp"))


def _plan() -> dict[str, ParallelStyle]:
    """Return how a layer is split: what comes in is one DTensor, so its gradients are one sum."""
    whole = Replicate()
    attention = PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None))
    columns = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    return {
        "self_attn": attention,
        **{f"self_attn.{name}": style for name, style in columns.items()},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def _shard(decoder: Decoder, mesh: DeviceMesh, *, tied: bool) -> None:
    units: list[Any] = [*decoder.model.layers.values()]
    if decoder.is_first and not tied:
        units.append(decoder.model.embed_tokens)
    if decoder.is_last and not tied:
        units.append([decoder.model.norm, decoder.lm_head])
    stay = set(exchanged(decoder))
    for unit in (*units, decoder):
        fully_shard(unit, mesh=mesh, reshard_after_forward=False, ignored_params=stay)
    for unit in decoder.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)  # losses are parts of one mean already
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it sums


def exchanged(decoder: Decoder) -> list[nn.Parameter]:
    """Return the parameters of experts that are split by EP: no other rank has them."""
    return [
        parameter
        for module in decoder.modules()
        if isinstance(module, Experts) and module.exchange
        for parameter in module.experts.parameters()
    ]


def is_split(name: str) -> bool:
    """Whether TP splits this parameter: the matrices of layers."""
    return name.endswith("_proj.weight")


def reshard(decoder: Decoder) -> None:
    """Let go of gathered parameters: shards are about to change."""
    for unit in decoder.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def accumulate(decoder: Decoder, *, is_last: bool) -> None:
    """Say whether a backward pass is the step's last: FSDP reduces gradients only then."""
    if isinstance(decoder, FSDPModule):
        decoder.set_is_last_backward(is_last)
        decoder.set_reshard_after_backward(is_last)
        decoder.set_requires_gradient_sync(is_last)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of it; collective over the ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Exchange:
    """Tokens on their way to experts of other ranks, and back."""

    def __init__(self, group: Any) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)

    def __call__(
        self, copies: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Send `copies`, sorted by expert, `counts` for each; return what `compute` makes of them.

        What arrives is sorted by sender, then expert; `compute` wants it by expert alone.
        """
        sent = counts.view(self._ranks, -1)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent.contiguous(), group=self._group)
        there = self._moved(copies, sent, came)
        experts = torch.arange(came.shape[1], device=came.device).repeat(self._ranks)
        order = experts.repeat_interleave(came.flatten()).argsort(stable=True)
        answers = compute(there[order], came.sum(0))
        return self._moved(answers[order.argsort()], came, sent)

    def _moved(self, copies: Tensor, sent: Tensor, came: Tensor) -> Tensor:
        sizes = came.sum(1).tolist(), sent.sum(1).tolist()
        moved: Tensor = all_to_all_single_autograd(copies.contiguous(), *sizes, self._group)
        return moved
