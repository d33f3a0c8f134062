"""`harness check`: what would be done, in words, with the device's own commands."""

from __future__ import annotations

from pathlib import Path

from harness.entry import plan_text

SCENARIO = Path(__file__).parents[2] / "scenarios/quickstart.toml"


def test_the_plan_shows_shapes_commands_and_checks_in_order() -> None:
    text = plan_text(SCENARIO, None)
    lines = text.splitlines()
    assert lines[0].startswith("question")
    assert any("tor0-tor1@agg0" in line for line in lines)
    assert "      :OXC:SWIT:CONN:ADD (@1,2,3,4),(@18,17,20,19);STAT?" in lines
    assert "      ENT-PATCH::1&2&3&4,20&19&18&17:<ctag>:;" in lines
    assert lines[-1] == "nothing was opened and nothing was sent"
    order = [text.index(word) for word in ("custody", "step 1", "step 4", "restore", "check")]
    assert order == sorted(order)


def test_what_does_not_change_is_not_sent() -> None:
    text = plan_text(SCENARIO, None)
    assert ":OXC:SWIT:CONN:ONLY" not in text
    assert "DISC" not in text


def test_the_plan_of_generation_shows_engine_requests_layouts_and_switches() -> None:
    scenario = SCENARIO.with_name("parallelism-switch.toml")
    text = plan_text(scenario, None)
    assert "paced by the latency profile of Qwen2.5-14B on H800 (emulated accelerator)" in text
    assert "workload step 0: 64 requests, prompts of" in text
    assert "digest of all requests: " in text
    assert "4xTP1, up first: g0 GPUs 0 | 1; g1 GPUs 0 | 1" in text
    assert "2xTP2: g0 GPUs 0-1; g1 GPUs 0-1" in text
    assert "14.8 GB of weights a GPU; KV of 32,768 tokens an instance" in text
    assert "4 switches through 2xTP2, 4xTP1, by rebuild, all nodes at once" in text
    order = [text.index(word) for word in ("generate  ", "4xTP1, up first", "\nstep 1", "\nstep 2")]
    assert order == sorted(order)
    on_cpu = plan_text(scenario, None, "vllm")
    assert "by vLLM, with a tiny random model, on the CPU of g0, g1" in on_cpu
    assert "GB of weights" not in on_cpu
