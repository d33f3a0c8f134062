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
