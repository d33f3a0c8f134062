"""What must hold for a scenario that trains: in itself, with its files, and on a bench. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from harness.model.bench import Bench
from harness.model.degrees import Degrees, parse_degrees
from harness.model.fabric_rules import fabrics_on, fabrics_problems
from harness.model.generation_rules import (
    COUNT_MAX,
    CPU_FREES_NOTHING,
    TOKENS_MAX,
    GenerationFiles,
    between,
    each_once,
    own_home,
    reasons_against,
    without_gpus,
)
from harness.model.layout import Mix
from harness.model.placement import gpus_of, trainers_of
from harness.model.policies import parse_policy_name
from harness.model.replay import Replay
from harness.model.scenario import Generation, Rl, Scenario, Training
from harness.model.schema import did_you_mean
from harness.model.shape import ModelShape
from harness.model.sizes import parse_size

TRAINING_PATHS = ("profile", "model")

COUNTS = {"steps": 1, "staleness_max": 0, "prompts_per_step": 0, "sync_retries": 0}
"""Whole numbers of a step, and the least of each."""
ABOVE_ZERO = (
    "sync_timeout_s",
    "replan_s",
    "balance_ms",
    "stall_s",
    "stage_timeout_s",
    "train_timeout_s",
)
BUCKET_MIN_BYTES = 4096
"""Each bucket has a header and an answer: with less, weights would be the least of what is sent."""
ZERO_OR_MORE = ("moves_per_s_max", "switch_s")


# -- the table ---------------------------------------------------------------------------------


def training_problems(training: Training, generation: Generation | None) -> Iterator[str]:
    """Yield all problems of the table ``[training]``, by itself and beside ``[generation]``."""
    try:
        parse_degrees(training.layout)
    except ValueError as error:
        yield f"training.layout: {error}"
    for key in ("flops_share", "bytes_scale"):
        if not 0 < getattr(training, key) <= 1:
            yield f"training.{key}: expected more than 0, and 1 at most"
    yield from between("training.micro_batch_tokens", training.micro_batch_tokens, 1, TOKENS_MAX)
    if not training.learning_rate > 0:
        yield "training.learning_rate: expected more than 0"
    if not 0 < training.clip < 1:
        yield "training.clip: expected more than 0 and less than 1"
    yield from each_once("training.nodes", training.nodes)
    for key in TRAINING_PATHS:
        yield from own_home(f"training.{key}", getattr(training, key))
    if generation is None:
        yield "training: needs a table [generation], whose responses it learns from"
    else:
        yield from _beside(training, generation)


def _beside(training: Training, generation: Generation) -> Iterator[str]:
    """Check that engines give what the trainer learns from, and can load what it makes."""
    if training.mode == "paced" and generation.engine == "vllm":
        yield (
            'training.mode: vLLM cannot load what "paced" trains, which is no model; use "real", '
            'or generation.engine = "paced"'
        )
    elif training.mode == "real" and generation.engine != "vllm":
        yield (
            'training.mode: "real" learns from tokens, and a paced engine makes none; use '
            '"paced", or generation.engine = "vllm"'
        )
    elif training.mode == "real" and not generation.temperature > 0:
        yield (
            "generation.temperature: with 0 all responses to a prompt are alike, and training.mode "
            '= "real" learns from how they differ; use 1.0'
        )


# -- the step ----------------------------------------------------------------------------------


def rl_problems(scenario: Scenario, where: str, step: Rl) -> Iterator[str]:
    """Yield all problems of one ``rl`` step at `where`."""
    yield from _numbers(where, step)
    yield from _policies(where, step)
    yield from fabrics_problems(where, step)
    for table in ("generation", "training"):
        if getattr(scenario, table) is None:
            yield f"{where}.do: rl needs a table [{table}]"
    if scenario.generation is not None and step.strategy == "pool":
        yield from _built(scenario.generation, where, step)


def _numbers(where: str, step: Rl) -> Iterator[str]:
    for key, least in COUNTS.items():
        yield from between(f"{where}.{key}", getattr(step, key), least, COUNT_MAX)
    for key in ABOVE_ZERO:
        if not getattr(step, key) > 0:
            yield f"{where}.{key}: expected more than 0"
    for key in ZERO_OR_MORE:
        if not getattr(step, key) >= 0:
            yield f"{where}.{key}: expected 0 or more"
    if not 0 <= step.gain_min_pct < 100:
        yield f"{where}.gain_min_pct: expected 0 or more, and less than 100"
    try:
        if parse_size(step.bucket) < BUCKET_MIN_BYTES:
            yield f"{where}.bucket: {step.bucket!r} is very little; use 4KiB or more, such as 4MiB"
    except ValueError as error:
        yield f"{where}.bucket: {error}"
    if len(step.sync_faults) > step.steps:
        yield f"{where}.sync_faults: {len(step.sync_faults)} faults for {step.steps} steps"


def _policies(where: str, step: Rl) -> Iterator[str]:
    if not step.policies:
        yield f'{where}.policies: empty; name at least one, such as "orchestrl"'
    yield from each_once(f"{where}.policies", step.policies)
    for i, text in enumerate(step.policies):
        try:
            parse_policy_name(text)
        except ValueError as error:
            yield f"{where}.policies[{i}]: {error}"


def _built(generation: Generation, where: str, step: Rl) -> Iterator[str]:
    """Check what strategy ``pool`` wakes: it was built beforehand."""
    for i, text in enumerate(step.policies):
        mix = _held(text)
        if mix is not None and str(mix) not in generation.pool:
            yield (
                f'{where}.policies[{i}]: {str(mix)!r} is not in generation.pool; strategy "pool" '
                "wakes engines that were built beforehand"
            )
    if not generation.pool:
        yield f'{where}.strategy: "pool" has nothing to wake; list layouts in generation.pool'


def _held(policy: str) -> Mix | None:
    """Return the layout that a policy holds on to; one that is none is told elsewhere."""
    try:
        return parse_policy_name(policy).mix
    except ValueError:
        return None


# -- with a bench and with the files -----------------------------------------------------------


def rl_on(scenario: Scenario, bench: Bench, files: GenerationFiles | None = None) -> Iterator[str]:
    """Yield what keeps a sound scenario from training on this bench, and with these files."""
    training, generation = scenario.training, scenario.generation
    if training is None or generation is None:
        return
    yield from _nodes(training, generation, bench)
    degrees = parse_degrees(training.layout)
    if training.mode == "paced" and not training.profile and files and files.shape:
        for reason in _undivided(degrees, files.shape):
            yield f"training.layout: {training.layout!r}: {reason}"
    steps = {f"steps[{i}]": step for i, step in enumerate(scenario.steps) if isinstance(step, Rl)}
    for where, step in steps.items():
        if files is not None:
            yield from _requests(where, step, training, files.replay)
        yield from _layouts(where, step, generation, bench, files)
        yield from fabrics_on(where, step, bench)
        if step.sync == "pairs" and (alone := _alone(training, bench)):
            yield (
                f'{where}.sync: "pairs" needs two nodes that train, and all ranks of '
                f'{training.layout!r} are on {alone}; use "chain", or more ranks'
            )


def _alone(training: Training, bench: Bench) -> str:
    """Return the node that has all ranks; "" where there are several, or too few ranks."""
    name, there = next(iter(trainers_of(training, bench).items()), ("", 0))
    return name if parse_degrees(training.layout).ranks <= there else ""


def _nodes(training: Training, generation: Generation, bench: Bench) -> Iterator[str]:
    """Check who trains: nodes that are there, do nothing else, and have ranks enough."""
    for i, name in enumerate(training.nodes):
        if name not in bench.nodes:
            near = did_you_mean(name, bench.nodes)
            yield f"training.nodes[{i}]: bench {bench.name!r} has no node {name!r}{near}"
    ranks = trainers_of(training, bench)
    if not ranks and not training.nodes:
        yield (
            f'training: bench {bench.name!r} has no node with pod = "train"; give it one, or name '
            "nodes in training.nodes"
        )
    for name in ranks.keys() & gpus_of(generation, bench).keys():
        yield (
            f"training: node {name!r} of bench {bench.name!r} generates; name others in "
            "training.nodes, or in generation.nodes"
        )
    degrees, there = parse_degrees(training.layout), sum(ranks.values())
    if ranks and degrees.ranks > there:
        listed = ", ".join(f"{name} has {count}" for name, count in ranks.items())
        yield (
            f"training.layout: {training.layout!r} takes {degrees.ranks} ranks, and bench "
            f"{bench.name!r} has {there} that train: {listed}"
        )


def _undivided(degrees: Degrees, shape: ModelShape) -> Iterator[str]:
    """Yield why a model of this shape cannot be split so; see `harness.model.layout`."""
    if shape.heads % degrees.tp:
        yield f"TP {degrees.tp} does not divide the {shape.heads} attention heads"
    if degrees.pp > shape.layers:
        yield f"PP {degrees.pp} exceeds the {shape.layers} layers"
    if degrees.ep > 1 and not shape.experts:
        yield f"EP {degrees.ep}: the model has no experts"
    elif degrees.ep > 1 and shape.experts % degrees.ep:
        yield f"EP {degrees.ep} does not divide the {shape.experts} experts"


def _requests(where: str, step: Rl, training: Training, replay: Replay) -> Iterator[str]:
    """Check that each batch has prompts enough, and for real training, what GRPO learns from."""
    samples = Counter((request.step, request.prompt) for request in replay.requests)
    prompts = Counter(number for number, _ in samples)
    if not prompts:
        yield f"{where}: the workload has no requests"
        return
    fewest = min(prompts, key=lambda number: prompts[number])
    wanted = step.prompts_per_step or prompts[min(prompts)]
    if wanted > prompts[fewest]:
        yield (
            f"{where}.prompts_per_step: a batch of {wanted} is asked for, and step {fewest} of the "
            f"workload has {prompts[fewest]} prompts; ask for no more"
        )
    if training.mode != "real":
        return
    if any(len(request.turns) > 1 for request in replay.requests):
        yield 'training.mode: "real" learns from one turn, and the workload has requests of several'
    if max(samples.values()) < 2:
        yield (
            'training.mode: "real" compares responses to the same prompt, and the workload has '
            "one for each; give it samples = 2 or more"
        )


def _layouts(
    where: str, step: Rl, generation: Generation, bench: Bench, files: GenerationFiles | None
) -> Iterator[str]:
    """Check the layouts that policies hold on to, and what can be woken on these nodes."""
    gpus: Mapping[str, int] = gpus_of(generation, bench)
    if not gpus or not all(gpus.values()):
        return  # told where the nodes that generate are checked
    for i, text in enumerate(step.policies):
        mix = _held(text)
        if mix is not None and (reasons := reasons_against(generation, mix, bench, files)):
            yield (
                f"{where}.policies[{i}]: {str(mix)!r} cannot be on bench {bench.name!r}: "
                f"{'; '.join(reasons)}"
            )
    bare = without_gpus(generation, bench)
    if generation.engine == "vllm" and step.strategy == "pool" and bare:
        yield f"{where}.strategy: {CPU_FREES_NOTHING} on {bare[0]}; use rebuild or restart"
