"""The workload file: which requests a run generates, either drawn by law or replayed from a trace.

Both kinds open with the question they ask. `generator` draws the lengths of RL rollouts from
percentiles (`harness.model.percentiles`, `harness.model.lengths`), seeded. `trace` reads a file of
logged requests (`harness.model.traces`). Lengths are in tokens. Rules that tie values together are
in `harness.model.workload_rules`; `harness.model.load` adds the files.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from harness.model.bench import Strict


class GeneratedWorkload(Strict, frozen=True, kw_only=True, tag_field="kind", tag="generator"):
    """RL rollouts: in each of `steps`, `prompts` times `samples` requests, all there at once.

    Lengths are given by percentiles, such as ``{p50 = 465, p90 = 1041}``: through the points given,
    and beyond the outermost, the logarithm of the length is linear in the normal score. One point
    alone is a constant; two are a log-normal.
    """

    question: str
    seed: int = 0
    steps: int = 1
    prompts: int
    """Per step."""
    samples: int = 1
    """Responses to each prompt (a GRPO group)."""
    cap_tokens: int
    """The longest response of one turn; a longer one ends there, as ``max_tokens`` ends it."""
    prompt_tokens: dict[str, float]
    response_tokens: dict[str, float]
    """Of one turn, before the cap."""
    sibling_correlation: float = 0.0
    """Of the normal scores of two samples of one prompt: 0 independent, 1 all the same length."""
    growth_per_step: float = 0.0
    """Responses of step n are (1 + growth) ** n times those of step 0, before the cap."""
    turn_weights: tuple[float, ...] = (1.0,)
    """How often a request has 1, 2, ... turns, in proportion."""
    turn_correlation: float = 0.0
    """As `sibling_correlation`, of two turns of one sample; not below it."""
    tool_tokens: dict[str, float] = {}
    """What the environment adds to the context before each turn after the first."""


ArrivalUnit = Literal["datetime", "s", "ms", "us", "ns"]


class Columns(Strict, frozen=True, kw_only=True):
    """Names of a trace's columns (CSV header, JSON keys); "" where the trace has no such column."""

    prompt_tokens: str = ""
    response_tokens: str = ""
    arrival: str = ""
    """Without it, all requests of a step arrive at once."""
    arrival_unit: ArrivalUnit = "s"
    """`datetime` is ``YYYY-MM-DD HH:MM:SS`` with up to nine decimals; UTC where no zone is given"""
    blocks: str = ""
    """List of ids of the prompt's blocks in order; equal ids are one prefix. JSON lines only."""
    block_tokens: int = 0
    step: str = ""
    """RL step, a whole number; without it, all rows are of step 0."""
    prompt: str = ""
    """Whatever tells the prompts of a step apart; rows that share it are samples of one prompt."""


class TraceWorkload(Strict, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """Requests from a file of rows. `mooncake` and `azure` bring the names of their columns."""

    question: str
    path: str
    """Relative to this file."""
    format: Literal["mooncake", "azure", "jsonl", "csv"]
    columns: Columns = Columns()
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """`skip` leaves bad rows out, and counts them."""
    requests_max: int = 0
    """Read this many requests and no more; 0 reads all."""


Workload: TypeAlias = GeneratedWorkload | TraceWorkload

MOONCAKE = Columns(
    prompt_tokens="input_length",
    response_tokens="output_length",
    arrival="timestamp",
    arrival_unit="ms",
    blocks="hash_ids",
    block_tokens=512,
)
"""JSON lines of the Mooncake traces."""
AZURE = Columns(
    prompt_tokens="ContextTokens",
    response_tokens="GeneratedTokens",
    arrival="TIMESTAMP",
    arrival_unit="datetime",
)
"""CSV of the Azure LLM inference traces."""


def columns_of(workload: TraceWorkload) -> Columns:
    """Return the columns that the trace's format, or else the workload file, names."""
    return {"mooncake": MOONCAKE, "azure": AZURE}.get(workload.format, workload.columns)
