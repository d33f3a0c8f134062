"""What a run would generate, and with what, in words; nothing is opened. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.model.layout import Layout, kv_capacity_tokens, parse_layout, weight_bytes_per_gpu
from harness.model.listing import first
from harness.model.placement import Instance, place
from harness.model.profile import gpu_of
from harness.model.replay import ReplayRequest
from harness.model.scenario import Generate, Scenario
from harness.run.generation.asked import GenerationAsked, engine_of, rows_left_out

BECOMES = {
    "abort": "running requests leave with their partial output",
    "drain": "running requests end first",
    "migrate": "running requests move to other nodes while there are seats, the others leave",
}
ORDER = {"at_once": "all nodes at once", "rolling": "node after node, the others generating"}
MOVES_BY = {
    "auto": "by KV or recompute, whichever is expected to be faster",
    "kv": "KV sent along",
    "recompute": "KV computed anew",
}


def tell_generation(asked: GenerationAsked, scenario: Scenario) -> Iterator[str]:
    """Yield the engine, the requests, and where each layout puts its instances."""
    yield f"generate  {engine_of(asked)}"
    replay = asked.replay
    for step in sorted({request.step for request in replay.requests}):
        yield f"  workload step {step}: {_lengths(replay.step(step))}"
    if left_out := rows_left_out(replay):
        yield f"  {left_out}"
    yield f"  digest of all requests: {replay.digest[:16]}"
    for layout in _layouts(asked, scenario):
        first = ", up first" if layout == asked.layout else ""
        built = ", built beforehand" if layout in asked.pool else ""
        yield f"  {layout}{first}{built}: {placed_text(place(layout, asked.gpus_of))}"
        yield from _room(asked, layout)


def tell_step(step: Generate) -> Iterator[str]:
    """Yield what happens while the requests of one step are generated."""
    if step.layouts:
        times = step.count or len(step.layouts)
        many = "1 switch" if times == 1 else f"{times} switches"
        yield f"  {many} through {', '.join(step.layouts)}, by {step.strategy}, {ORDER[step.order]}"
        yield f"    {BECOMES[step.requests]}; {step.rest_s:g} s before each switch"
    if step.migrations:
        yield (
            f"  {step.migrations} requests move to another instance, one every"
            f" {step.migrate_every_ms:g} ms, {MOVES_BY[step.migrate_by]}"
        )
    if step.layouts or step.migrations:
        yield "  requests are repeated until all of that has happened"


def requests_of(step: Generate) -> str:
    """Return which requests a step generates: ``the first 64 of workload step 0, 32 at once``."""
    which = f"the first {step.requests_max} of" if step.requests_max else "all of"
    at_once = f"{step.in_flight_max} at once" if step.in_flight_max else "as many as fit at once"
    return f"{which} workload step {step.workload_step}, {at_once}"


def _lengths(requests: tuple[ReplayRequest, ...]) -> str:
    responses = [request.response_tokens for request in requests]
    prompts = [request.prompt_tokens for request in requests]
    return (
        f"{len(requests)} requests, prompts of {_span(prompts)} tokens, responses of"
        f" {_span(responses)}, {sum(responses):,} in all"
    )


def _span(lengths: Iterable[int]) -> str:
    ordered = sorted(lengths)
    return f"{ordered[0]:,} to {ordered[-1]:,}"


def _layouts(asked: GenerationAsked, scenario: Scenario) -> Iterator[Layout]:
    """Yield every layout of the run once, the first one first."""
    named = [
        parse_layout(text)
        for step in scenario.steps
        if isinstance(step, Generate)
        for text in step.layouts
    ]
    yield from dict.fromkeys([asked.layout, *asked.pool, *named])


def placed_text(placed: dict[str, tuple[Instance, ...]]) -> str:
    """Write instances by node: ``g0 GPUs 0-1 and 2-3``."""
    return first(
        f"{node} GPUs {' | '.join(one.name.removeprefix(f'{node}:') for one in instances)}"
        if instances
        else f"{node} idle"
        for node, instances in placed.items()
    )


def _room(asked: GenerationAsked, layout: Layout) -> Iterator[str]:
    """Yield what the layout leaves for KV, where it is known before, and what does not fit in."""
    if asked.shape is None:
        return
    weights = f"{weight_bytes_per_gpu(layout, asked.shape) / 1e9:.1f} GB of weights a GPU"
    kv_tokens = asked.spec.kv_max_tokens
    if asked.spec.profile is not None:
        held = kv_capacity_tokens(layout, asked.shape, gpu_of(asked.spec.profile))
        kv_tokens = min(held, kv_tokens or held)
    yield f"    {weights}" + (f"; KV of {kv_tokens:,} tokens an instance" if kv_tokens else "")
    longest = asked.shape.length_max_tokens
    if kv_tokens:
        longest = min(longest, kv_tokens + 1)  # the last token of a response needs no KV
    lengths = [request.context_tokens for request in asked.replay.requests]
    if longer := sum(length > longest for length in lengths):
        yield (
            f"    {longer:,} of {len(lengths):,} requests cannot run: up to {max(lengths):,} tokens"
            f" with their responses, and an instance takes {longest:,}"
        )
