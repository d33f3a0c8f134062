"""The loop on a bench in virtual time: what trains, how old it is, and what it survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_bench import RlBench, replay, rl_session
from virtual_time import run_virtually

from harness.model.load import load_profile
from harness.model.scenario import Rl
from harness.run.rl.loop import rl


def loop(tmp_path: Path, step: Rl, bench: RlBench | None = None, **more: Any) -> Any:
    """Run one step; return its bench and its events."""

    async def main() -> Any:
        there = bench or RlBench()
        session = rl_session(there, tmp_path, step, more.pop("requests", replay()), **more)
        async with session.closing:
            await rl(session, step, 0)
        return there, session.record

    return run_virtually(main())


STATIC = ("static:4xTP1",)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_every_sample_trains_once_and_none_is_over_the_bound(tmp_path: Path, bound: int) -> None:
    bench, events = loop(tmp_path, Rl(steps=5, policies=STATIC, staleness_max=bound))
    stepped = bench.trainer.stepped
    assert [version for version, _ in stepped] == [0, 1, 2, 3, 4]
    used = [id_ for _, ids in stepped for id_ in ids]
    assert len(used) == len(set(used)) == 5 * 8
    rows = events.of("rl_step")
    assert all(len(row["staleness"]) <= bound + 1 for row in rows)
    assert events.of("rl")[0]["staleness_max"] <= bound
    assert all(row["outcome"] == "synced" for row in events.of("sync"))


PROFILE = load_profile("scenarios/profiles/qwen2.5-14b-h800.toml")


def tail(step: int, index: int) -> int:
    return 3000 if index == step else 30 + 7 * index % 100


@pytest.mark.parametrize(
    "policy", ["orchestrl", "proactive", "reactive", "oracle", "best_static", "static:2xTP1+1xTP2"]
)
def test_every_policy_gets_all_samples_trained(tmp_path: Path, policy: str) -> None:
    step = Rl(steps=4, policies=(policy,), switch_s=0.5)
    requests = replay(4, 8, 4, tail)
    bench, events = loop(tmp_path, step, requests=requests, profile=PROFILE)
    assert [len(ids) for _, ids in bench.trainer.stepped] == [32] * 4
    [row] = events.of("rl")
    assert row["samples"] == 128
    assert row["tokens"] == sum(r.response_tokens for r in requests.requests)
    print(policy, row["samples_per_s"], row["switches_taken"], row["switches_wasted"], row["moves"])
    for r in events.of("planned"): print({k: r[k] for k in ("layout","best","outcome","reason")})
