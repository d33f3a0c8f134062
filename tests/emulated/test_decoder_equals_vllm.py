"""The trainer's decoder is the model that vLLM runs: the same weights give the same greedy tokens.

Before any step, for both make the tiny model of a seed; and after two, with the weights published.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agents import weights_file
from agents.training.base import Groups
from agents.training.decoder import Decoder
from agents.training.first_weights import first
from agents.training.torch_trainer import make
from harness.model.degrees import Degrees
from harness.model.training.axes import Place
from harness.model.training.trainer import TrainerSpec
from harness.wire.generation import EngineSpec, UpdateWeights, WeightsUpdated
from tests.emulated.training_worker import samples
from tests.emulated.vllm_ranks import Ledger, vllm_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: `bash .ci/setup vllm` adds its CPU build",
    ),
    pytest.mark.timeout(600),
]

SEED, RESPONSE_TOKENS = 7, 24
TRAINER = TrainerSpec(mode="real", degrees=Degrees(), seed=SEED, learning_rate=1e-2)
ENGINE = EngineSpec(
    engine="vllm", sequences_max=8, length_max_tokens=512, kv_max_tokens=4096, seed=SEED
)


@pytest.fixture
def alone() -> Iterator[Groups]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Groups(0, Degrees(), Place(0, 0, 0, 0), "cpu")
    dist.destroy_process_group()


def requests() -> Ledger:
    chance = random.Random(SEED)
    lengths = (1, 5, 12, 40, 150)
    prompts = {f"r{n}": tuple(chance.randrange(3, 512) for _ in range(n)) for n in lengths}
    return Ledger(prompts, RESPONSE_TOKENS)


@torch.no_grad()
def greedy(decoder: Decoder, prompt: tuple[int, ...]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(RESPONSE_TOKENS):
        likeliest = decoder(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, likeliest), dim=1)
    return tokens[0, len(prompt) :].tolist()


def test_vllm_continues_as_the_decoder_does(alone: Groups, tmp_path: Path) -> None:
    config, weights = first(TRAINER)
    decoder = Decoder(config)
    decoder.load_state_dict(weights)
    trainer = make(TRAINER, alone)
    for version in range(2):
        trainer.step(version, samples(12, 512), lambda _: None)
    published = tmp_path / "2.safetensors"
    trainer.publish(published)

    with vllm_ranks(1, tmp_path, ENGINE) as ranks:
        ranks.build(1)
        before, after = requests(), requests()
        for ledger in (before, after):
            if ledger is after:
                order = UpdateWeights(instances=("g0",), version=2, source=str(published))
                (updated,) = ranks.order(order)
                assert isinstance(updated, WeightsUpdated), updated
            assert not ranks.submit(ledger)
            while ranks.step(16, ledger):
                pass
        ranks.leave()

    for name, prompt in before.prompts.items():
        assert before.tokens[name] == greedy(decoder, prompt), name
    entries = weights_file.read_header(published).entries
    decoder.load_state_dict(
        {
            name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(entries[name].shape)
            for name, data in weights_file.tensors(published)
        }
    )
    for name, prompt in after.prompts.items():
        assert after.tokens[name] == greedy(decoder, prompt), name
    assert before.tokens != after.tokens, "the steps changed what it says"
