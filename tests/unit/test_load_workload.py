"""A workload file is read whole, or refused with everything that is wrong with it."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BadFile, ExitCode
from harness.model.load import load_bench, load_scenario, load_workload, requests_of
from harness.model.workload import GeneratedWorkload, TraceWorkload

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SHIPPED = SCENARIOS / "workloads/multi-turn.toml"
TEXT = SHIPPED.read_text()
TRACE = """question = "Does it hold on a trace?"
kind = "trace"
path = "rows.csv"
format = "csv"
[columns]
prompt_tokens = "in"
response_tokens = "out"
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "workload.toml"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_workload(path)
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value.problems


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def test_a_trace_lies_beside_its_workload_file(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(TRACE)
    (tmp_path / "rows.csv").write_text("in,out\n3,4\n")
    workload = load_workload(tmp_path / "w.toml")
    assert isinstance(workload, TraceWorkload)
    assert workload.path == str(tmp_path / "rows.csv")
    assert [request.context_tokens for request in requests_of(workload).requests] == [7]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "generator"', 'kind = "generate"', "kind: 'generate' is not one of"),
        ('kind = "generator"\n', "", 'kind: missing; expected one of "generator", "trace"'),
        ("prompts = 256", "promts = 256", "promts: unknown key; did you mean 'prompts'?"),
        ("prompts = 256", "prompts = 0", "prompts: expected 1 to"),
        ("samples = 5", "samples = 5.0", "samples: expected a whole number"),
        ("steps = 4", "steps = 4000", "steps: steps x prompts x samples x turns is 25600000; "),
        ("seed = 1", "seed = -1", "seed: expected 0 or more"),
        ("cap_tokens = 3000", "cap_tokens = 0", "cap_tokens: expected 1 to"),
        ("p50 = 57", "q50 = 57", "response_tokens: 'q50' is no percentile such as p50"),
        ("p50 = 57", "p100 = 57", "response_tokens: 'p100' is no percentile such as p50"),
        ("p50 = 57", "p0 = 57", "response_tokens: 'p0' is no percentile such as p50"),
        ("p50 = 57", "p50 = 157", "response_tokens: p50 is above p90"),
        ("p50 = 57", 'p50 = 57\n"p50.0" = 57', "are the same percentile"),
        ("p2 = 16", "p2 = 0.5", "response_tokens: p2 is 0.5; a length is 1 token or more"),
        ("p99 = 357", "p99 = 1e9", "response_tokens: a length is 10000000 tokens at most"),
        ("p99 = 357", "p99 = inf", "response_tokens.p99: expected a finite number"),
        ("p50 = 130\np90 = 180", "", "prompt_tokens: empty; give at least one"),
        ("p50 = 450\np90 = 560", "", "tool_tokens: empty; give at least one"),
        ("[8, 43, 34, 11, 5]", "[]", "turn_weights: empty; [1] is one turn each"),
        ("[8, 43, 34, 11, 5]", "[8, -1, 5]", "turn_weights[1]: expected 0 to"),
        ("[8, 43, 34, 11, 5]", "[8, 0]", "turn_weights[1]: no request has so many turns"),
        ("[8, 43, 34, 11, 5]", "[1]", "tool_tokens: every request has one turn"),
        ("turn_correlation = 0.3", "turn_correlation = 1.1", "turn_correlation: expected 0 to 1"),
        ("turn_correlation = 0.3", "", "turn_correlation: below sibling_correlation"),
        ("seed = 1", "seed = 1\ngrowth_per_step = 2", "growth_per_step: expected -0.5 to 1"),
        ("samples = 5", 'samples = 5\npath = "x"', "path: unknown key"),
    ],
)
def test_a_problem_of_a_generator_is_named_with_its_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in "\n".join(problems(tmp_path, changed(TEXT, old, new)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"rows.csv"', '""', "path: empty; name the trace file"),
        ('format = "csv"', 'format = "cvs"', "format: 'cvs' is not one of"),
        ('format = "csv"', 'format = "azure"', 'columns: format "azure" names them; leave this'),
        ('response_tokens = "out"', "", "columns.response_tokens: missing; name the column"),
        ('"out"', '"in"', "columns: 'in' is named 2 times; a column is one thing"),
        ('"out"', '"out"\nblocks = "b"', "columns.blocks: a CSV field holds no list"),
        ('"out"', '"out"\nblocks = "b"', "columns.block_tokens: expected 1 to"),
        ('"out"', '"out"\nblock_tokens = 512', "columns.blocks: missing; name the column"),
        ('"out"', '"out"\narrival_unit = "min"', "columns.arrival_unit: 'min' is not one of"),
        ("[columns]", 'on_bad_row = "drop"\n[columns]', "on_bad_row: 'drop' is not one of"),
        ("[columns]", "requests_max = -1\n[columns]", "requests_max: expected 0 (all) or more"),
        ('"Does it hold on a trace?"', '" "', "question: empty"),
    ],
)
def test_a_problem_of_a_trace_is_named_with_its_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in "\n".join(problems(tmp_path, changed(TRACE, old, new)))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    text = changed(changed(TEXT, "steps = 4", "steps = 0"), "seed = 1", "seed = -1")
    assert [line.partition(":")[0] for line in problems(tmp_path, text)] == ["seed", "steps"]


def test_a_workload_and_a_scenario_are_told_apart() -> None:
    for load, path, said in (
        (load_scenario, SHIPPED, "this is a workload; a scenario is expected here"),
        (load_bench, SHIPPED, "this is a workload; a bench file is expected here"),
        (
            load_workload,
            SCENARIOS / "quickstart.toml",
            "this is a scenario; a workload is expected here",
        ),
    ):
        with pytest.raises(BadFile) as caught:
            load(path)
        assert caught.value.problems == [said]


SCRAPS = st.one_of(
    st.sampled_from(["[", "]", '"', "=", "\n", ".", "-", "9", "nan", "[[", "#", "''", "p", ","]),
    st.text(alphabet=string.printable, max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.sampled_from([TEXT, TRACE]),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), SCRAPS), min_size=1, max_size=6),
)
def test_no_edit_of_the_text_gives_a_traceback(tmp_path: Path, text: str, edits: Any) -> None:
    for part, cut, scrap in edits:
        place = int(part * len(text))
        text = text[:place] + scrap + text[place + cut :]
    path = tmp_path / "edited.toml"
    path.write_text(text)
    (tmp_path / "rows.csv").write_text("in,out\n3,4\n")
    with contextlib.suppress(BadFile):
        workload = load_workload(path)
        if isinstance(workload, GeneratedWorkload):  # whatever is valid can be drawn
            workload = msgspec.structs.replace(workload, steps=1, prompts=2, samples=1)
        requests_of(workload)
