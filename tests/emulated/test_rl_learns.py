"""A tiny model learns: torch trains, vLLM generates, and the weights get from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated.lab import Lab, lab

pytestmark = [pytest.mark.emulated, pytest.mark.root, pytest.mark.timeout(600)]
pytest.importorskip("vllm", reason="vLLM is not installed here: bash .ci/setup vllm")

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LIMIT_S = 560.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def asked(bench: Lab, *, more: str = "") -> None:
    """Ask for the shipped scenario, with its files where they are, and lines added to its step."""
    text = (SCENARIOS / "rl-learns.toml").read_text()
    for folder in ("benches", "workloads"):
        text = text.replace(f'"{folder}/', f'"{SCENARIOS}/{folder}/')
    text = text.replace('do = "rl"\n', f'do = "rl"\n{more}')
    (bench.folder / "scenario.toml").write_text(text)


def rewards(bench: Lab) -> list[float]:
    return [row["reward"] for row in bench.events("rl_step")]


def test_the_reward_rises_to_four_fifths_of_all_there_is(bench: Lab) -> None:
    asked(bench)
    code, out = bench.run(limit_s=LIMIT_S)
    assert code == 0, out
    found = rewards(bench)
    assert found[0] < 0.4
    assert found[-1] >= 0.8
    versions = [row["outcome"] for row in bench.events("sync")]
    assert versions == ["synced"] * (len(found) + 1)  # the first weights too


def test_it_does_not_rise_when_engines_load_the_first_weights_again_and_again(bench: Lab) -> None:
    asked(bench, more=f"sync_faults = {['noop'] * 45}\n".replace("'", '"'))
    code, out = bench.run(limit_s=LIMIT_S)
    assert code == 1, out  # its own check says so
    assert len(rewards(bench)) == 45
    assert max(rewards(bench)) < 0.4
    assert not bench.events("given_up")  # they could load them, every time
    assert {row["outcome"] for row in bench.events("sync")} == {"synced", "noop"}
