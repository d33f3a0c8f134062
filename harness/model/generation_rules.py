"""What must hold for a scenario that generates: in itself, with its files, and on a bench. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises.
What a model's shape, a GPU's memory or a bench's nodes make impossible is told here, before
anything is opened; the engines check the rest when they prepare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness.errors import UsageError
from harness.model.bench import Bench
from harness.model.layout import Gpu, Layout, Mix, infeasible, parse_layout
from harness.model.placement import gpus_of, place
from harness.model.profile import Profile, costs_of, gpu_of
from harness.model.replay import Replay
from harness.model.scenario import Generate, Generation, Scenario
from harness.model.schema import did_you_mean, dotted
from harness.model.shape import ModelShape
from harness.model.workload import Workload

GENERATION_PATHS = ("workload", "profile", "model")
COUNT_MAX = 1_000_000
TOKENS_MAX = 2**40

OURS = {
    "model": "generation.model",
    "tensor_parallel_size": "the layout",
    "pipeline_parallel_size": "the layout",
    "data_parallel_size": "the layout",
    "enable_expert_parallel": "the layout",
    "max_num_seqs": "generation.sequences_max",
    "max_num_batched_tokens": "generation.step_max_tokens",
    "seed": "the scenario's seed",
}
"""Options of vLLM's engine that another key decides."""
CPU_TAKES_TP_ONLY = (
    "without GPUs vLLM splits a model by TP only (its CPU build fails with PP and EP, and takes "
    "one DP rank a process); use TP, or more instances"
)
UNKNOWN_GPU = Gpu("the GPU", 2**62, 0)
"""A real one: its node knows its memory, and checks the layout against it."""
CPU_FREES_NOTHING = (
    "vLLM's sleep frees nothing without GPUs, so engines cannot wait beside each other"
)


@dataclass(frozen=True, kw_only=True)
class GenerationFiles:
    """What the files named in ``[generation]`` hold.

    `shape` is that of the profile's model or of the model folder's ``config.json``; None where
    the engine makes a tiny model, or where the folder is on the nodes only.
    """

    replay: Replay
    profile: Profile | None
    shape: ModelShape | None
    workload: Workload | None = None
    """Where the requests come from: drawn again with another seed for every repeat of a loop."""


# -- the table and its steps -------------------------------------------------------------------


def generation_problems(generation: Generation) -> Iterator[str]:
    """Yield all problems of the table ``[generation]`` by itself."""
    for where, text in _named(generation):
        yield from _layout(where, text)
    for key in ("pool", "nodes"):
        yield from each_once(f"generation.{key}", getattr(generation, key))
    yield from _paths(generation)
    if not 0 < generation.bytes_scale <= 1:
        yield "generation.bytes_scale: expected more than 0, and 1 at most (all bytes)"
    yield from _batches(generation)
    if not generation.temperature >= 0:
        yield "generation.temperature: expected 0 or more"
    if not generation.prompts_per_gpu >= 0:
        yield "generation.prompts_per_gpu: expected 0 (as the workload says) or more"
    if not generation.speed > 0:
        yield "generation.speed: expected more than 0"
    for name in generation.vllm_options:
        if name in OURS:
            yield f"{dotted('generation.vllm_options', name)}: leave it out; {OURS[name]} says it"


def _batches(generation: Generation) -> Iterator[str]:
    """Check how much one step of an engine takes."""
    for key, least, most in (
        ("sequences_max", 1, COUNT_MAX),
        ("step_max_tokens", 1, TOKENS_MAX),
        ("kv_max_tokens", 0, TOKENS_MAX),
    ):
        yield from between(f"generation.{key}", getattr(generation, key), least, most)
    most, sequences = generation.step_max_tokens, generation.sequences_max
    if generation.engine == "paced" and most <= sequences:
        yield (
            f"generation.step_max_tokens: {most} must exceed generation.sequences_max, "
            f"{sequences}: else a full batch never prefills"
        )


def generate_problems(generation: Generation | None, where: str, step: Generate) -> Iterator[str]:
    """Yield all problems of one ``generate`` step at `where`."""
    for i, text in enumerate(step.layouts):
        yield from _layout(f"{where}.layouts[{i}]", text)
    for key in ("workload_step", "requests_max", "in_flight_max", "count", "migrations"):
        yield from between(f"{where}.{key}", getattr(step, key), 0, COUNT_MAX)
    for key in ("rest_s", "migrate_every_ms"):
        if not getattr(step, key) >= 0:
            yield f"{where}.{key}: expected 0 or more"
    for key in ("stall_s", "stage_timeout_s", "timeout_s"):
        if not getattr(step, key) > 0:
            yield f"{where}.{key}: expected more than 0"
    if step.requests == "migrate" and step.order != "rolling":
        yield (
            f'{where}.requests: with "migrate" requests move to nodes that go on generating; set '
            'order = "rolling"'
        )
    if step.count and not step.layouts:
        yield f"{where}.layouts: empty; name the layouts to switch through, in turn"
    if generation is None:
        yield f"{where}.do: generate needs a table [generation]: engine, layout and workload"
    else:
        yield from _by_the_table(generation, where, step)


def _paths(generation: Generation) -> Iterator[str]:
    """Check the paths that the table names, as far as they tell."""
    if not generation.workload.strip():
        yield "generation.workload: empty; name a workload file, relative to this one"
    if generation.engine == "paced" and not generation.profile.strip():
        yield (
            "generation.profile: missing; the paced engine takes its step times from a latency "
            'profile, such as "profiles/qwen2.5-14b-h800.toml"'
        )
    for key in GENERATION_PATHS:
        yield from own_home(f"generation.{key}", getattr(generation, key))


def _named(generation: Generation) -> list[tuple[str, str]]:
    """Return (key path, text) of the table's layouts."""
    pool = ((f"generation.pool[{i}]", text) for i, text in enumerate(generation.pool))
    return [("generation.layout", generation.layout), *pool]


def _layout(where: str, text: str) -> Iterator[str]:
    try:
        parse_layout(text)
    except ValueError as error:
        yield f"{where}: {error}"


def _instances(text: str) -> int:
    """Return a layout's instances; one that is none counts as enough: it is told elsewhere."""
    try:
        return parse_layout(text).instances
    except ValueError:
        return 2


def _by_the_table(generation: Generation, where: str, step: Generate) -> Iterator[str]:
    """Check a step against the table: what it wakes was built; a request has where to move to."""
    for i, text in enumerate(step.layouts):
        if step.strategy == "pool" and text not in generation.pool:
            yield (
                f'{where}.layouts[{i}]: {text!r} is not in generation.pool; strategy "pool" wakes '
                "engines that were built beforehand"
            )
    if step.migrations and all(_instances(text) < 2 for text in (generation.layout, *step.layouts)):
        yield f"{where}.migrations: no layout has two instances for a request to move between"


def each_once(where: str, values: Iterable[str]) -> Iterator[str]:
    """Check that nothing is listed twice."""
    for value, times in Counter(values).items():
        if times > 1:
            yield f"{where}: {value!r} is listed {times} times"


def own_home(where: str, path: str) -> Iterator[str]:
    """Check that a path names no other person's home folder."""
    if path.startswith("~") and not path.startswith("~/"):
        yield f"{where}: only your own home folder can be written with ~, as in ~/x"


def between(where: str, value: int, least: int, most: int) -> Iterator[str]:
    """Check a whole number."""
    if not least <= value <= most:
        yield f"{where}: expected {least} to {most}"


# -- with a bench and with the files -----------------------------------------------------------


def generation_on(
    scenario: Scenario, bench: Bench, files: GenerationFiles | None = None
) -> Iterator[str]:
    """Yield what keeps a sound scenario from generating on this bench, and with these files."""
    generation = scenario.generation
    if generation is None:
        return
    steps = {
        f"steps[{i}]": step for i, step in enumerate(scenario.steps) if isinstance(step, Generate)
    }
    if files is not None:
        yield from _requests(files.replay, steps)
    if generation.engine != "paced" and bench.world == "simulated":
        yield (
            f'generation.engine: "{generation.engine}" computes tokens, and a simulated bench only '
            'times: use "paced", with a profile'
        )
        return
    if problems := [*_nodes(generation, bench)]:
        yield from problems
        return
    for where, text in _layouts(generation, steps):
        layout = parse_layout(text)
        if reasons := reasons_against(generation, layout, bench, files):
            yield f"{where}: {text!r} cannot be on bench {bench.name!r}: {'; '.join(reasons)}"
    for where, step in steps.items():
        yield from _step_on(generation, bench, where, step)


def _step_on(generation: Generation, bench: Bench, where: str, step: Generate) -> Iterator[str]:
    """Check what a step does to requests and engines against the nodes that generate."""
    if step.requests == "migrate" and len(gpus_of(generation, bench)) < 2:
        yield (
            f"{where}.requests: bench {bench.name!r} has one node that generates, so no request "
            'can "migrate" to another; use "abort" or "drain"'
        )
    pooled = generation.engine == "vllm" and step.strategy == "pool"
    if pooled and (bare := without_gpus(generation, bench)):
        yield f"{where}.strategy: {CPU_FREES_NOTHING} on {bare[0]}; use rebuild or restart"


def _layouts(generation: Generation, steps: Mapping[str, Generate]) -> Iterator[tuple[str, str]]:
    """Yield (key path, text) of all layouts of the scenario, each text once."""
    found = dict[str, str]()
    for where, text in _named(generation):
        found.setdefault(text, where)
    for path, step in steps.items():
        for i, text in enumerate(step.layouts):
            found.setdefault(text, f"{path}.layouts[{i}]")
    return ((where, text) for text, where in found.items())


def _requests(replay: Replay, steps: Mapping[str, Generate]) -> Iterator[str]:
    there = sorted({request.step for request in replay.requests})
    for where, step in steps.items():
        if not there:
            yield f"{where}: the workload has no requests"
        elif step.workload_step not in there:
            shown = (
                f"steps {there[0]} to {there[-1]}" if len(there) > 1 else f"step {there[0]} only"
            )
            yield f"{where}.workload_step: the workload has {shown}"


def _nodes(generation: Generation, bench: Bench) -> Iterator[str]:
    for i, name in enumerate(generation.nodes):
        if name not in bench.nodes:
            near = did_you_mean(name, bench.nodes)
            yield f"generation.nodes[{i}]: bench {bench.name!r} has no node {name!r}{near}"
    found = gpus_of(generation, bench)
    if not found and not generation.nodes:
        yield (
            f'generation: bench {bench.name!r} has no node with pod = "generate"; give it one, or '
            "name nodes in generation.nodes"
        )
    for name, gpus in found.items():
        if not gpus:
            yield (
                f"generation: node {name!r} of bench {bench.name!r} has no GPU; give it gpus, or "
                "emulated_gpus to stand for them"
            )


def reasons_against(
    generation: Generation, layout: Layout | Mix, bench: Bench, files: GenerationFiles | None
) -> list[str]:
    """Return every reason why this layout cannot be on a bench whose nodes have GPUs."""
    found, reasons = gpus_of(generation, bench), list[str]()
    most, gpus = max(found.values()), sum(found.values())
    parts = Mix((layout,)) if isinstance(layout, Layout) else layout
    profile = files.profile if files and generation.engine == "paced" else None
    split_otherwise = any((part.pp, part.ep, part.dp) != (1, 1, 1) for part in parts)
    if generation.engine == "vllm" and split_otherwise and without_gpus(generation, bench):
        reasons.append(CPU_TAKES_TP_ONLY)
    if files and files.shape:
        gpu, shape = gpu_of(profile) if profile else UNKNOWN_GPU, files.shape
        reasons += [text for part in parts for text in infeasible(part, shape, gpu, most, gpus)]
    try:
        if not reasons:
            place(parts, found)
        if profile:
            for part in parts:
                costs_of(profile, part)
    except UsageError as error:
        reasons.append(str(error))
    return list(dict.fromkeys(reasons))


def without_gpus(generation: Generation, bench: Bench) -> list[str]:
    """Return the nodes that would generate on their CPU."""
    return [name for name in gpus_of(generation, bench) if not bench.nodes[name].gpus]
