"""What must hold between the values of a workload file. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from harness.model.percentiles import Law
from harness.model.workload import Columns, GeneratedWorkload, TraceWorkload, Workload

TOKENS_MAX = 10_000_000
TURNS_MAX = 2_000_000
"""Of all requests of a workload together: what is generated is held in memory."""


def workload_problems(workload: Workload) -> Iterator[str]:
    """Yield all problems of a workload file."""
    if not workload.question.strip():
        yield "question: empty; say what the workload is to find out"
    if isinstance(workload, TraceWorkload):
        yield from _trace(workload)
    else:
        yield from _generated(workload)


def _generated(workload: GeneratedWorkload) -> Iterator[str]:
    if workload.seed < 0:
        yield "seed: expected 0 or more"
    for key in ("steps", "prompts", "samples", "cap_tokens"):
        most = TOKENS_MAX if key == "cap_tokens" else TURNS_MAX
        if not 1 <= getattr(workload, key) <= most:
            yield f"{key}: expected 1 to {most}"
    turns = workload.steps * workload.prompts * workload.samples * len(workload.turn_weights)
    if turns > TURNS_MAX:
        yield (
            f"steps: steps x prompts x samples x turns is {turns}; {TURNS_MAX} at most can be held"
        )
    yield from _law("prompt_tokens", workload.prompt_tokens)
    yield from _law("response_tokens", workload.response_tokens)
    for key in ("sibling_correlation", "turn_correlation"):
        if not 0 <= getattr(workload, key) <= 1:
            yield f"{key}: expected 0 to 1"
    if not -0.5 <= workload.growth_per_step <= 1:
        yield "growth_per_step: expected -0.5 to 1; 0.02 lengthens responses by 2 % a step"
    yield from _turns(workload)


def _turns(workload: GeneratedWorkload) -> Iterator[str]:
    weights = workload.turn_weights
    if not weights:
        yield "turn_weights: empty; [1] is one turn each"
    for i, weight in enumerate(weights):
        if not 0 <= weight <= TURNS_MAX:
            yield f"turn_weights[{i}]: expected 0 to {TURNS_MAX}"
    if weights and not weights[-1] > 0:
        yield f"turn_weights[{len(weights) - 1}]: no request has so many turns; leave it out"
    if len(weights) > 1:
        yield from _law("tool_tokens", workload.tool_tokens)
        if workload.turn_correlation < workload.sibling_correlation:
            yield (
                "turn_correlation: below sibling_correlation; turns of one sample are at least as "
                "alike as those of two"
            )
        return
    for key in ("tool_tokens", "turn_correlation"):
        if getattr(workload, key):
            yield f"{key}: every request has one turn; leave it out, or set turn_weights"


def _law(key: str, percentiles: Mapping[str, float]) -> Iterator[str]:
    try:
        Law.of(percentiles)
    except ValueError as error:
        yield f"{key}: {error}"
    if any(length > TOKENS_MAX for length in percentiles.values()):
        yield f"{key}: a length is {TOKENS_MAX} tokens at most"


def _trace(workload: TraceWorkload) -> Iterator[str]:
    if not workload.path.strip():
        yield "path: empty; name the trace file, relative to this one"
    if workload.requests_max < 0:
        yield "requests_max: expected 0 (all) or more"
    if workload.format in ("jsonl", "csv"):
        yield from _columns(workload.format, workload.columns)
    elif workload.columns != Columns():
        yield (
            f'columns: format "{workload.format}" names them; leave this table out, or use '
            'format "jsonl" or "csv"'
        )


def _columns(form: str, columns: Columns) -> Iterator[str]:
    for key in ("prompt_tokens", "response_tokens"):
        if not getattr(columns, key):
            yield f"columns.{key}: missing; name the column that holds it"
    if form == "csv" and columns.blocks:
        yield 'columns.blocks: a CSV field holds no list; use format "jsonl"'
    if columns.blocks and not 1 <= columns.block_tokens <= TOKENS_MAX:
        yield f"columns.block_tokens: expected 1 to {TOKENS_MAX}, the tokens in each block"
    if columns.block_tokens and not columns.blocks:
        yield "columns.blocks: missing; name the column whose blocks block_tokens is for"
    named = (columns.prompt_tokens, columns.response_tokens, columns.arrival, columns.blocks)
    used = Counter(name for name in (*named, columns.step, columns.prompt) if name)
    for name, times in used.items():
        if times > 1:
            yield f"columns: {name!r} is named {times} times; a column is one thing"
