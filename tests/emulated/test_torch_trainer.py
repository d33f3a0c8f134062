"""The trainer that learns: the same weights on any degrees, phases as announced, state as kept.

Four processes on loopback go through all layouts once; see `tests.emulated.training_worker`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from agents import weights_file
from agents.training import grpo
from agents.training.base import Groups
from agents.training.torch_trainer import make
from harness.errors import UsageError
from harness.model.degrees import parse_degrees
from harness.model.training.axes import place_of
from harness.model.training.phase import Phase
from harness.wire.training import PhaseHappened
from tests.emulated.training_worker import samples, spec_of
from tests.emulated.vllm_ranks import free_ports

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

RANKS, LIMIT_S = 4, 500
TINY = ("DP2", "TP2", "PP2", "DP2TP2", "DP2PP2", "TP2PP2")
EXPERTS = ("DP2", "DP2EP2", "DP2PP2EP2")
LAYOUTS = [(layout, "tiny") for layout in TINY] + [(layout, "experts") for layout in EXPERTS]

Weights = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Found(msgspec.Struct):
    """What a rank leaves behind."""

    phases: tuple[Phase, ...]
    told: tuple[PhaseHappened, ...]
    figures: tuple[dict[str, float], ...]
    facts: dict[str, str]


class Trained(NamedTuple):
    """Of one layout: weights by version, and what each rank found."""

    weights: dict[str, Weights]
    ranks: list[Found]


def read(path: Path) -> Weights:
    return {name: np.frombuffer(data, np.float32) for name, data in weights_file.tensors(path)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trained]:
    folder = tmp_path_factory.mktemp("trained")
    tasks = [("DP1", "tiny"), ("DP1", "experts"), *LAYOUTS]
    rows = []
    for layout, model in tasks:
        (folder / f"{layout}-{model}").mkdir()
        row = {"name": f"{layout}-{model}", "layout": layout, "model": model}
        rows.append(row | {"store": f"127.0.0.1:{free_ports()}"})
    (folder / "tasks.json").write_text(json.dumps(rows))
    argv = [sys.executable, "-m", "tests.emulated.training_worker"]
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(RANKS)]
    ranks = [
        subprocess.Popen([*argv, str(rank), str(folder)], stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(LIMIT_S) for process in ranks]
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    text = "".join(Path(log.name).read_text()[-2000:] for log in logs)
    assert codes == [0] * RANKS, text
    return {task: collected(folder / "-".join(task), *task) for task in tasks}


def collected(folder: Path, layout: str, model: str) -> Trained:
    count = parse_degrees(layout).ranks
    found = [(folder / f"rank{rank}.json").read_bytes() for rank in range(count)]
    return Trained(
        {path.stem: read(path) for path in folder.glob("*.safetensors")},
        [msgspec.json.decode(text, type=Found) for text in found],
    )


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_weights_are_those_of_a_single_rank(
    trained: dict[tuple[str, str], Trained], layout: str, model: str
) -> None:
    single, found = trained["DP1", model], trained[layout, model]
    for version in ("1", "2", "3"):
        expected, ours = single.weights[version], found.weights[version]
        assert ours.keys() == expected.keys()
        for name in expected:
            # Adam's first step is the gradient's sign: a sum of next to nothing may be a bit off.
            assert np.allclose(ours[name], expected[name], atol=1e-4), (version, name)
    moved = [
        np.abs(single.weights["3"][name] - single.weights["1"][name]).max()
        for name in single.weights["3"]
    ]
    assert min(moved) > 1e-3, "all parameters learn, far more than they may differ"
    for one in found.ranks:
        for ours, expected in zip(one.figures, single.ranks[0].figures, strict=True):
            assert ours == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_every_rank_can_write_the_same_weights(
    trained: dict[tuple[str, str], Trained], layout: str, model: str
) -> None:
    weights = trained[layout, model].weights
    for rank in range(parse_degrees(layout).ranks):
        assert weights[f"at-{rank}"].keys() == weights["again"].keys()
        for name, expected in weights["again"].items():
            assert weights[f"at-{rank}"][name].tobytes() == expected.tobytes(), (rank, name)


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_each_phase_comes_as_it_was_announced(
    trained: dict[tuple[str, str], Trained], layout: str, model: str
) -> None:
    ranks = trained[layout, model].ranks
    assert all(one.phases == ranks[0].phases for one in ranks)
    assert {phase.axis for phase in ranks[0].phases} == set(ranks[0].facts) - {"device"}
    for rank, one in enumerate(ranks):
        own = {i for i, phase in enumerate(one.phases) if any(rank in g for g in phase.groups)}
        for version in range(3):
            told = [event for event in one.told if event.version == version]
            assert {event.index for event in told if not event.end_ns} == own
            assert {event.index for event in told if event.end_ns} == own
            assert len(told) == 2 * len(own)
            ends = [event for event in told if event.end_ns]
            assert all(event.begin_ns <= event.end_ns for event in ends)
            for event in ends:
                phase = one.phases[event.index]
                assert (event.name, event.op, event.axis) == (phase.name, phase.op, phase.axis)
                if event.op != "all_to_all":  # what goes to experts depends on the tokens
                    assert event.bytes == pytest.approx(phase.bytes, rel=0.05)


@pytest.mark.parametrize(("layout", "model"), [("DP1", "tiny"), *LAYOUTS])
def test_what_was_kept_goes_on_exactly(
    trained: dict[tuple[str, str], Trained], layout: str, model: str
) -> None:
    weights = trained[layout, model].weights
    for name, expected in weights["3"].items():
        assert np.array_equal(weights["again"][name], expected), name


@pytest.mark.parametrize(
    ("layout", "model", "why"),
    [
        ("TP8", "tiny", "TP 8 does not divide the 4 of heads"),
        ("PP3", "tiny", "PP 3 is more than the 2 layers"),
        ("DP2EP2", "tiny", "EP 2 does not divide the 0 experts"),
        ("TP2", "experts", "TP 2 does not split experts"),
        ("DP4EP2", "experts", "EP 2 with DP 4"),
    ],
)
def test_degrees_that_cannot_be_carried_are_refused(layout: str, model: str, why: str) -> None:
    spec = spec_of(layout, model)
    groups = Groups(0, spec.degrees, place_of(0, spec.degrees), "cpu")
    with pytest.raises(UsageError, match=f"^{layout} cannot be trained: .*{why}"):
        make(spec, groups)


def test_ratios_are_clipped_only_where_that_lowers_the_gain() -> None:
    one = samples(2, 64)[1]
    assert one.log_probs
    length = one.prompt_tokens + one.response_tokens
    logits = torch.zeros(1, length, 64)
    now = -float(torch.tensor(64.0).log())
    for advantage, shift, expected in (
        (1.0, 1.0, 1.2), (1.0, -1.0, 2.718281828**-1), (-2.0, 1.0, -2 * 2.718281828),
        (-2.0, -1.0, -2 * 0.8), (3.0, 0.0, 3.0),
    ):  # fmt: skip
        odds = (now - shift,) * one.response_tokens
        sample = msgspec.structs.replace(one, advantage=advantage, log_probs=odds)
        batch = grpo.collate([sample, None], length, "cpu")
        total, sums = grpo.loss(logits.expand(2, -1, -1), batch, 0.2, 1.0)
        assert float(total) == pytest.approx(-expected * one.response_tokens, rel=1e-4)
        cut = one.response_tokens if abs(expected - advantage * 2.718281828**shift) > 1e-6 else 0
        assert float(sums[2]) == cut
        assert float(sums[1]) == pytest.approx(-now * one.response_tokens, rel=1e-4)
