"""Weights from a file into real vLLM that runs: its tokens are then those of an engine built so."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agents.generation.tiny_model import write_model
from agents.weights_file import Tensor, read_header, tensors, write
from harness.wire.generation import EngineSpec, UpdateWeights, WeightsUpdated
from harness.wire.messages import Failure
from tests.emulated.vllm_ranks import Ledger, Ranks, vllm_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: `bash .ci/setup vllm` adds its CPU build",
    ),
    pytest.mark.timeout(600),
]

BLOCK = 128
SPEC = EngineSpec(
    engine="vllm", sequences_max=8, length_max_tokens=2048, kv_max_tokens=16_384, seed=7
)


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with vllm_ranks(2, tmp_path_factory.mktemp("logs"), SPEC) as ranks:
        yield ranks


@pytest.fixture
def ranks(resident: Ranks) -> Iterator[Ranks]:
    yield resident
    resident.leave()


def weights(folder: Path, version: int, *, without: str = "") -> Path:
    """A file of the tiny model's weights, as a trainer writes it: with checksums."""
    made = folder / f"model-{version}"
    made.mkdir(exist_ok=True)
    write_model(made, SPEC.seed, version)
    source, path = made / "model.safetensors", folder / f"weights-{version}.safetensors"
    header = read_header(source)
    write(
        path,
        [
            Tensor(name, header.entries[name].dtype, header.entries[name].shape, data)
            for name, data in tensors(source)
            if name != without
        ],
    )
    return path


def requests(*names: str, tokens: int = 24, same_prompt: bool = False) -> Ledger:
    prompts = {}
    for name in names:
        chance = random.Random("all" if same_prompt else name)
        prompts[name] = tuple(chance.randrange(3, 512) for _ in range(2 * BLOCK + 40))
    return Ledger(prompts, tokens)


def run(ranks: Ranks, ledger: Ledger) -> dict[str, list[int]]:
    while ranks.step(16, ledger):
        pass
    return ledger.tokens


def launched(ranks: Ranks, tp: int, version: int, ledger: Ledger) -> dict[str, list[int]]:
    """What an engine gives that was launched with weights of this version."""
    ranks.build(tp, version)
    ranks.submit(ledger)
    found = run(ranks, ledger)
    ranks.leave()
    return found


def update(ranks: Ranks, path: Path, version: int, *, drop_kv: bool) -> Sequence[object]:
    return ranks.order(
        UpdateWeights(instances=("g0",), version=version, source=str(path), drop_kv=drop_kv)
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_after_each_sync_tokens_are_those_of_an_engine_launched_so(
    ranks: Ranks, tmp_path: Path, tp: int
) -> None:
    fresh = {version: launched(ranks, tp, version, requests("a", "b")) for version in (0, 3, 4)}
    assert len({str(tokens) for tokens in fresh.values()}) == 3
    ranks.build(tp)
    for version in (3, 4, 3):
        answers = update(ranks, weights(tmp_path, version), version, drop_kv=True)
        assert all(isinstance(answer, WeightsUpdated) for answer in answers), answers
        ledger = requests("a", "b")
        ranks.submit(ledger)
        assert run(ranks, ledger) == fresh[version]
        assert {output.version for output in ledger.outputs if output.count} == {version}
        assert max(output.cached_tokens for output in ledger.outputs) == 0


def test_what_runs_goes_on_from_its_own_tokens_with_new_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    """With its KV computed anew, it goes on as a fresh engine would from prompt and output."""
    ranks.build(2)
    running = requests("a")
    ranks.submit(running)
    ranks.step(9, running)
    begun = list(running.tokens["a"])
    update(ranks, weights(tmp_path, 3), 3, drop_kv=True)
    run(ranks, running)
    ranks.leave()
    ranks.build(2, 3)
    again = requests("a")
    again.tokens["a"] = list(begun)
    ranks.submit(again)
    assert run(ranks, again) == running.tokens
    assert next(o.version for o in running.outputs if o.count) == 0


@pytest.mark.parametrize("drop_kv", [False, True])
def test_no_new_request_shares_kv_of_old_weights(
    ranks: Ranks, tmp_path: Path, *, drop_kv: bool
) -> None:
    fresh = launched(ranks, 1, 3, requests("late", same_prompt=True))
    ranks.build(1)
    early = requests("early", tokens=2 * BLOCK, same_prompt=True)
    ranks.submit(early)
    ranks.step(8, early)
    update(ranks, weights(tmp_path, 3), 3, drop_kv=drop_kv)
    late = requests("late", same_prompt=True)
    both = Ledger({**early.prompts, **late.prompts}, 0, early.tokens, early.outputs)
    ranks.submit(late)
    run(ranks, both)
    assert both.tokens["late"] == fresh["late"]
    cached = {o.id: o.cached_tokens for o in both.outputs if o.cached_tokens}
    # where KV was dropped, the early one computes its anew, and by that the late one may gain
    assert not cached or drop_kv
    grown = Ledger({"grown": (*early.prompts["early"], *both.tokens["early"][:BLOCK])}, 2)
    ranks.submit(grown)
    run(ranks, grown)
    assert max(output.cached_tokens for output in grown.outputs) <= 2 * BLOCK or drop_kv


def test_a_file_that_is_not_this_models_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    old = launched(ranks, 2, 0, requests("a"))
    ranks.build(2)
    partial = weights(tmp_path, 3, without="model.norm.weight")
    for path, text in (
        (partial, "1 tensors are not this model's: model.norm.weight (missing, not (64,))"),
        (tmp_path / "nowhere", "nowhere: No such file"),
    ):
        for answer in update(ranks, path, 3, drop_kv=True):
            assert isinstance(answer, Failure)
            assert text in answer.text
    ledger = requests("a")
    ranks.submit(ledger)
    assert run(ranks, ledger) == old


def test_an_engine_is_launched_with_a_files_weights(ranks: Ranks, tmp_path: Path) -> None:
    fresh = launched(ranks, 2, 3, requests("a"))
    built = ranks.build(2, 9, source=str(weights(tmp_path, 3)))
    assert not [answer for answer in built if isinstance(answer, Failure)], built
    ledger = requests("a")
    ranks.submit(ledger)
    assert run(ranks, ledger) == fresh
    assert {output.version for output in ledger.outputs if output.count} == {9}


def test_nothing_of_a_transfer_outlives_the_engine(ranks: Ranks, tmp_path: Path) -> None:
    path, seen = weights(tmp_path, 3), []
    for _ in range(3):
        ranks.build(2)
        update(ranks, path, 3, drop_kv=True)
        ranks.leave()
        seen.append([held(rank.process.pid) for rank in ranks.ranks])
    assert seen[-1] == seen[0]


def held(pid: int) -> tuple[int, int]:
    """Open files, and threads."""
    process = Path(f"/proc/{pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))
