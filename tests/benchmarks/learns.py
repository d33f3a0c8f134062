"""Does the real trainer learn the task? Its own decoder draws the responses; no engine is needed.

The prompts of ``scenarios/workloads/tiny-task.toml``, the tiny model, one rank, over seeds of
weights and chance: once on weights of now, once a step behind (staleness 1), once more a step
behind with the log-probabilities of what was drawn. The rewards are means of a batch.

Mark: from chance to at least 0.8 within 40 steps, for every seed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from agents.training.base import Groups
from agents.training.decoder import Decoder
from agents.training.first_weights import first
from agents.training.torch_trainer import TorchTrainer, make
from harness.model.degrees import Degrees
from harness.model.load import load_workload, requests_of
from harness.model.prompts import Prompts
from harness.model.replay import ReplayRequest
from harness.model.reward import CHANCE, advantages, reward
from harness.model.training.axes import Place
from harness.model.training.trainer import TrainerSpec
from harness.wire.training import Sample

WORKLOAD = Path(__file__).parents[2] / "scenarios" / "workloads" / "tiny-task.toml"
STEPS, GOAL, SEEDS, LEARNING_RATE = 40, 0.8, 5, 6e-3
CASES: Mapping[str, tuple[int, bool]] = {
    "on policy": (0, False), "a step behind": (1, False), "the same, ratios known": (1, True),
}  # fmt: skip
"""How many steps behind responses are drawn, and whether their log-probabilities are known."""


def run() -> dict[str, object]:
    """Return, by case and seed, the rewards of the first, the last and the first good batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    requests = sorted(requests_of(load_workload(WORKLOAD)).requests, key=lambda r: r.prompt)
    rows = {
        name: [_learn(requests, seed, *case) for seed in range(SEEDS if name == "on policy" else 2)]
        for name, case in CASES.items()
    }
    dist.destroy_process_group()
    reached = [row["steps_to_goal"] for row in rows["on policy"]]
    return {"rows": rows, "goal": GOAL, "met": max(reached) <= STEPS}


def table(figures: dict[str, object]) -> str:
    """Return the rows as text."""
    lines = [f"chance {CHANCE}; goal {GOAL} within {STEPS} steps at learning rate {LEARNING_RATE}"]
    rows = figures["rows"]
    assert isinstance(rows, dict)
    for name, found in rows.items():
        for seed, row in enumerate(found):
            told = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
            lines.append(f"{name:24} seed {seed}  {told}")
    return "\n".join([*lines, "met" if figures["met"] else "NOT met"])


def _learn(requests: list[ReplayRequest], seed: int, behind: int, known: bool) -> dict[str, float]:
    spec = TrainerSpec(mode="real", degrees=Degrees(), seed=seed, learning_rate=LEARNING_RATE)
    trainer = make(spec, Groups(0, Degrees(), Place(0, 0, 0, 0), "cpu"))
    actor = Decoder(first(spec)[0])
    vocab = actor.lm_head.out_features
    prompts = Prompts(vocab=vocab, seed=seed)
    chance = torch.Generator().manual_seed(seed)
    versions: deque[dict[str, torch.Tensor]] = deque([_weights(trainer)], maxlen=behind + 1)
    rewards, times_s = [], []
    for version in range(STEPS):
        actor.load_state_dict(versions[0])
        batch = _drawn(actor, requests, prompts, chance, known)
        begin_s = time.monotonic()
        trainer.step(version, batch, lambda _: None)
        times_s.append(time.monotonic() - begin_s)
        versions.append(_weights(trainer))
        rewards.append(statistics.fmean(sample.reward for sample in batch))
    good = next((step for step, mean in enumerate(rewards) if mean >= GOAL), STEPS + 1)
    return {
        "first": rewards[0], "last": statistics.fmean(rewards[-3:]), "steps_to_goal": good,
        "step_ms": 1e3 * statistics.median(times_s),
    }  # fmt: skip


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.whole_weights().items()}


@torch.no_grad()
def _drawn(
    actor: Decoder,
    requests: list[ReplayRequest],
    prompts: Prompts,
    chance: torch.Generator,
    known: bool,
) -> list[Sample]:
    """Draw a response to every request; prompts and responses are of one length here."""
    given = [prompts.added(request, 0) for request in requests]
    tokens, odds = torch.tensor(given), []
    for _ in range(requests[0].response_tokens):
        likely = actor(tokens)[:, -1].log_softmax(-1)
        drawn = likely.exp().multinomial(1, generator=chance)
        odds.append(likely.gather(1, drawn))
        tokens = torch.cat((tokens, drawn), dim=1)
    responses = tokens[:, len(given[0]) :].tolist()
    vocab = actor.lm_head.out_features
    worth = [reward(p, r, vocab) for p, r in zip(given, responses, strict=True)]
    log_probs = torch.cat(odds, dim=1).tolist()
    samples = []
    for number, request in enumerate(requests):
        siblings = [n for n, other in enumerate(requests) if other.prompt == request.prompt]
        gains = advantages([worth[n] for n in siblings])
        samples.append(
            Sample(
                request.id, str(request.prompt), len(given[number]), len(responses[number]),
                worth[number], gains[siblings.index(number)], 0, 0, given[number],
                tuple(responses[number]), tuple(log_probs[number]) if known else (),
            )
        )  # fmt: skip
    return samples
