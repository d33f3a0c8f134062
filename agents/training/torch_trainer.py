"""A trainer that learns: a decoder, GRPO's loss and AdamW in torch, over any degrees that fit.

Every rank is given all samples and takes its shard. All micro batches of a step have the same rows
and length, padded, so that ranks meet in every one and the step's traffic follows from the lengths
alone. The loss is one mean over the tokens of all ranks; gradients are clipped by their norm over
all ranks, and the optimizer steps once. Imports torch: import it late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from agents import weights_file
from agents.training import grpo, parallel
from agents.training.base import Groups, StepDone, Tell
from agents.training.decoder import Config
from agents.training.first_weights import first
from agents.training.gathering import gather
from agents.training.padded import Padded, Planner
from agents.training.phase_watch import PhaseWatch
from harness.errors import UsageError
from harness.model.training.axes import Axis
from harness.model.training.phase import Phase
from harness.model.training.trainer import TrainerSpec
from harness.wire.training import Sample

NORM_MAX = 1.0
"""Of all gradients together; longer ones are shortened to it."""


def make(spec: TrainerSpec, groups: Groups) -> TorchTrainer:
    """Make one rank's trainer; collective. Raises `UsageError` for what cannot be carried so."""
    config, weights = first(spec)
    if problems := parallel.misfits(config.shape, spec.degrees):
        raise UsageError(f"{spec.degrees} cannot be trained: {'; '.join(problems)}")
    return TorchTrainer(spec, groups, config, weights)


class TorchTrainer:
    """`agents.training.base.Trainer`; see the module."""

    def __init__(
        self, spec: TrainerSpec, groups: Groups, config: Config, weights: Mapping[str, Tensor]
    ) -> None:
        self._spec, self._groups, self._config = spec, groups, config
        self.parameters = config.shape.parameters
        self.facts = parallel.means(groups) | {"device": groups.device}
        self._decoder = parallel.carried(config, groups, weights)
        self._parameters = dict(self._decoder.named_parameters())
        shards = (parallel.local(found).detach() for found in self._parameters.values())
        self._shards = dict(zip(self._parameters, map(nn.Parameter, shards), strict=True))
        self._optimizer = torch.optim.AdamW(
            self._shards.values(), lr=spec.learning_rate, weight_decay=0.0
        )
        self._planner = Planner(config.shape, spec.degrees, spec.micro_batch_tokens)

    # -- a step --------------------------------------------------------------------------------

    def phases(self, tokens: Sequence[int]) -> tuple[Phase, ...]:
        """Return what a step on samples of these lengths will communicate, in order."""
        return self._planner.plan(tokens).phases

    def step(self, version: int, samples: Sequence[Sample], tell: Tell) -> StepDone:
        """Learn from the samples: this rank takes its shard of them, and all ranks step once."""
        begin_ns = time.monotonic_ns()
        lengths = [len(sample.prompt) + len(sample.response) for sample in samples]
        if not any(sample.response for sample in samples):
            raise UsageError("these samples have no token ids: there is nothing to learn from")
        plan = self._planner.plan(lengths)
        watch = PhaseWatch(plan.phases, self._groups, version, tell)
        with watch:
            sums = self._differentiate(plan, samples)
            self._sum_head_norms()
            figures = self._update(sums, sum(len(sample.response) for sample in samples))
        compute_ns = time.monotonic_ns() - begin_ns - watch.communicated_ns
        self._planner.took(plan, self._groups.place, compute_ns)
        mine = plan.dealt[self._groups.place.dp]
        return StepDone(
            tokens=sum(lengths[index] for batch in mine for index in batch),
            micro_batches=len(mine),
            compute_ns=compute_ns,
            communicate_ns=watch.communicated_ns,
            figures=figures,
        )

    def _differentiate(self, plan: Padded, samples: Sequence[Sample]) -> Tensor:
        """Give every parameter its gradient; return this rank's part of the `grpo.SUMS`."""
        rows: list[Sample | None] = []
        for micro in plan.dealt[self._groups.place.dp]:
            rows += [samples[index] for index in micro] + [None] * (plan.rows - len(micro))
        batch = grpo.collate(rows, plan.length, self._groups.device)
        answers = sum(len(sample.response) for sample in samples)
        sums = torch.zeros(len(grpo.SUMS), device=self._groups.device)

        def loss(logits: Tensor, chosen: Tensor) -> Tensor:
            part = batch.rows(chosen)
            total, found = grpo.loss(logits, part, self._spec.clip, self._spec.temperature)
            sums.add_(found)
            return total / answers

        self._optimizer.zero_grad()
        self._decoder.zero_grad()
        count = len(rows) // plan.rows
        if "pp" in self._groups.handles:
            self._pipeline(plan, count, loss, batch.tokens)
        else:
            for number, chosen in enumerate(torch.arange(len(rows)).chunk(count)):
                parallel.accumulate(self._decoder, is_last=number == count - 1)
                loss(self._decoder(batch.tokens[chosen]), chosen).backward()  # type: ignore[no-untyped-call]  # torch's
        return sums

    def _pipeline(
        self, plan: Padded, count: int, loss: Callable[[Tensor, Tensor], Tensor], tokens: Tensor
    ) -> None:
        """Run `count` micro batches through this stage and back."""
        decoder, shape = self._decoder, self._config.shape
        states = torch.empty(
            plan.rows, plan.length, shape.hidden, device="meta", requires_grad=True
        )
        logits = torch.empty(plan.rows, plan.length, shape.vocab, device="meta", requires_grad=True)
        stage = PipelineStage(
            decoder,
            self._groups.place.pp,
            self._groups.degrees.pp,
            torch.device(self._groups.device),
            input_args=tokens[: plan.rows].to("meta") if decoder.is_first else states,
            output_args=logits if decoder.is_last else states,
            group=self._groups.handles["pp"],
        )
        schedule = ScheduleGPipe(stage, count, loss_fn=loss, scale_grads=False)
        chosen = torch.arange(len(tokens), device=tokens.device)
        schedule.step(
            *([tokens] if decoder.is_first else []),
            target=chosen if decoder.is_last else None,
            return_outputs=False,
        )

    # -- gradients -----------------------------------------------------------------------------

    def _gradients(self) -> dict[str, Tensor]:
        """Return what this rank holds of the gradients; a parameter that took no part has 0."""
        return {
            name: torch.zeros_like(self._shards[name]) if p.grad is None else parallel.local(p.grad)
            for name, p in self._parameters.items()
        }

    def _sum_head_norms(self) -> None:
        """Add up, over TP, gradients of the norms that each rank applied to its own heads."""
        if "tp" in self._groups.handles:
            found = self._gradients()
            parts = [g for name, g in found.items() if "q_norm" in name or "k_norm" in name]
            flat = torch.cat(parts)
            dist.all_reduce(flat, group=self._groups.handles["tp"])
            for part, summed in zip(parts, torch.split(flat, list(map(len, parts))), strict=True):
                part.copy_(summed)

    @torch.no_grad()
    def _update(self, sums: Tensor, answers: int) -> dict[str, float]:
        """Clip gradients by their norm over all ranks and step; return the step's figures."""
        found, copies = self._gradients(), self._groups.degrees.tp
        told = torch.cat((sums.new_zeros(1), sums / copies))
        for name, gradient in found.items():
            told[0] += gradient.square().sum() / (1 if parallel.is_split(name) else copies)
        axes: tuple[Axis, ...] = ("tp", "pp", "dp")
        for axis in axes:
            if axis in self._groups.handles:
                dist.all_reduce(told, group=self._groups.handles[axis])
        norm = float(told[0].sqrt())
        for name, gradient in found.items():
            self._shards[name].grad = gradient.mul_(min(1.0, NORM_MAX / (norm + 1e-6)))
        self._optimizer.step()
        means = zip(grpo.SUMS, (told[1:] / answers).tolist(), strict=True)
        return {**dict(means), "grad_norm": norm, "tokens": float(answers)}

    # -- weights and state ---------------------------------------------------------------------

    def publish(self, path: Path | None, writers: Sequence[int] = (0,)) -> None:
        """Gather the weights at the ranks `writers`, which are given a path: float32."""
        weights = self.whole_weights(writers)
        if path is not None:
            weights_file.write(path, [_written(name, weights[name]) for name in sorted(weights)])

    def whole_weights(self, writers: Sequence[int] = (0,)) -> dict[str, Tensor]:
        """Return all weights by Hugging Face's names at the writers, some of them elsewhere."""
        own = self._held()
        shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(shapes, {name: tuple(held.shape) for name, held in own.items()})
        like = next(iter(self._shards.values()))
        return gather(own, shapes, writers, self._groups.rank, like)

    def _held(self) -> dict[str, Tensor]:
        """Return the weights that this rank has whole, and may give away; collective.

        Of those that TP does not split each of its ranks has a copy: only the first one's counts.
        """
        wholes = {name: parallel.whole(found.detach()) for name, found in self._parameters.items()}
        if self._groups.place.tp:
            return {}
        return {name: tensor.contiguous() for name, tensor in wholes.items()}

    def weights_bytes(self) -> int:
        """Return the size of the file that `publish` writes, less its header."""
        return self.parameters * 4

    def keep(self, folder: Path) -> None:
        """Write this rank's training state into a folder: weights and optimizer."""
        state = {
            "degrees": str(self._spec.degrees),
            "shards": {name: shard.detach() for name, shard in self._shards.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, folder / self._file)

    def load(self, folder: Path) -> None:
        """Read it; goes on as the one that wrote it would have. Raises `UsageError`."""
        path = folder / self._file
        if not path.is_file():
            raise UsageError(f"{path}: not there; `keep` writes one file a rank")
        state: dict[str, Any] = torch.load(path, map_location=self._groups.device)
        if state["degrees"] != str(self._spec.degrees):
            raise UsageError(f"{path} was kept by {state['degrees']}, not {self._spec.degrees}")
        parallel.reshard(self._decoder)
        with torch.no_grad():
            for name, shard in self._shards.items():
                shard.copy_(state["shards"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    @property
    def _file(self) -> str:
        return f"rank{self._groups.rank}.pt"


def _written(name: str, tensor: Tensor) -> weights_file.Tensor:
    return weights_file.Tensor(name, "F32", tuple(tensor.shape), tensor.cpu().numpy())
