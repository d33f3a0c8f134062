"""A process that is one rank of several small trainings, one after the other: the tests' labour.

``python -m tests.emulated.training_worker RANK FOLDER``: FOLDER holds ``tasks.json``. What each
training came to is left there: weights of versions 1 to 3, phases that were planned and told.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from agents.training.groups import join
from agents.training.orders import Join
from agents.training.torch_trainer import make
from harness.model.degrees import parse_degrees
from harness.model.shape import ModelShape
from harness.model.training.trainer import TrainerSpec
from harness.wire.training import PhaseHappened, Sample

EXPERTS = ModelShape(
    layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, vocab=64, intermediate=0, experts=4,
    experts_per_token=2, expert_intermediate=16, qk_norm=True, dtype_bytes=4,
)  # fmt: skip
"""A small mixture of experts."""


def samples(count: int, vocab: int) -> list[Sample]:
    """Samples of unequal lengths with advantages of both signs; every second knows its odds."""
    chance = random.Random(count)
    made = []
    for number in range(count):
        prompt, response = (
            tuple(chance.randrange(3, vocab) for _ in range(chance.randrange(4, 9)))
            for _ in range(2)
        )
        odds = tuple(chance.uniform(-7, -3) for _ in response) if number % 2 else ()
        advantage = chance.gauss(0, 1)
        sizes = len(prompt), len(response)
        made.append(Sample(str(number), "g", *sizes, 0.0, advantage, 0, 0, prompt, response, odds))
    return made


def spec_of(layout: str, model: str) -> TrainerSpec:
    """What trains: the tiny model, or ``experts``."""
    shape = EXPERTS if model == "experts" else None
    degrees = parse_degrees(layout)
    return TrainerSpec(mode="real", degrees=degrees, shape=shape, seed=5, micro_batch_tokens=48)


def train(rank: int, task: dict[str, Any], folder: Path) -> None:
    """Three steps; the last one twice, the second time from what was kept before it."""
    spec = spec_of(task["layout"], task["model"])
    groups = join(
        Join(
            spec=spec,
            rank=rank,
            local=rank,
            world_size=spec.degrees.ranks,
            store=task["store"],
            interface="lo",
            attempt=0,
            timeout_ns=60_000_000_000,
            tells=True,
        )
    )
    trainer = make(spec, groups)
    told: list[PhaseHappened] = []
    batch = samples(10, 64)
    phases = trainer.phases([one.prompt_tokens + one.response_tokens for one in batch])
    figures = []
    for version in range(3):
        if version == 2:
            trainer.keep(folder)
        figures.append(trainer.step(version, batch, told.append).figures)
        trainer.publish(folder / f"{version + 1}.safetensors" if rank == 0 else None)
    trainer.load(folder)
    trainer.step(2, batch, lambda _: None)
    trainer.publish(folder / "again.safetensors" if rank == 0 else None)
    everywhere = range(spec.degrees.ranks)
    trainer.publish(folder / f"at-{rank}.safetensors", everywhere)
    found = {"phases": phases, "told": told, "figures": figures, "facts": trainer.facts}
    (folder / f"rank{rank}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


def main() -> None:
    """Take part in every training that has this rank."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    for task in json.loads((folder / "tasks.json").read_text()):
        if rank < parse_degrees(task["layout"]).ranks:
            train(rank, task, folder / task["name"])


if __name__ == "__main__":
    main()
