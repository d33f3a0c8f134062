"""What must hold between the values of a scenario file, and between it and a bench. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from harness.model.bench import Bench
from harness.model.busbw import smallest_bytes
from harness.model.fabric_rules import arms_of, fabric_problems
from harness.model.generation_rules import (
    COUNT_MAX,
    GenerationFiles,
    generate_problems,
    generation_on,
    generation_problems,
)
from harness.model.metrics import metric_problem, parse_metric
from harness.model.nccl import NCCL_ALLOWED, refused_names
from harness.model.ports import is_trunk, parse_cable, parse_circuit
from harness.model.rl_rules import rl_on, rl_problems, training_problems
from harness.model.scenario import (
    Check,
    Collectives,
    Generate,
    Op,
    Reconfigure,
    Rl,
    Scenario,
    Shape,
    Shift,
)
from harness.model.schema import did_you_mean, dotted
from harness.model.sizes import format_size, parse_size

ELECTRICAL = "electrical"
"""The path that is always there; no shape can have its name."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}", re.ASCII)
_PRINTABLE = re.compile(r"[ -~]*")


def scenario_problems(scenario: Scenario) -> Iterator[str]:
    """Yield all problems of a scenario, in the order of the file's tables."""
    if not scenario.question.strip():
        yield "question: empty; say what the run is to find out"
    yield from _whole_number("repeats", scenario.repeats, 1)
    if scenario.seed < 0:
        yield "seed: expected 0 or more"
    if not scenario.timeout_s > 0:
        yield "timeout_s: expected more than 0"
    for name, shape in scenario.shapes.items():
        yield from _shape(name, shape)
    if scenario.generation is not None:
        yield from generation_problems(scenario.generation)
    if scenario.training is not None:
        yield from training_problems(scenario.training, scenario.generation)
    yield from fabric_problems(scenario)
    if not scenario.steps:
        yield "steps: empty; a scenario has at least one step"
    for i, step in enumerate(scenario.steps):
        yield from _step(scenario, f"steps[{i}]", step)
    for i, check in enumerate(scenario.checks):
        yield from _check(scenario, f"checks[{i}]", check)
    yield from _nccl(scenario)


def together_problems(
    scenario: Scenario, bench: Bench, files: GenerationFiles | None = None
) -> Iterator[str]:
    """Yield what keeps this scenario, with its files, from being asked of this bench."""
    used = {shape for step in scenario.steps for _, shape in _shapes_of("", step)}
    for name in scenario.shapes:
        yield from _circuits_on(bench, scenario.shapes[name], dotted("shapes", name))
        lit = name in used and scenario.shapes[name].template != "dark"
        if lit and not bench.cables:
            yield f"{dotted('shapes', name)}: bench {bench.name!r} has no cable to any switch"
        elif lit and len(bench.tors) < 2:
            yield f"{dotted('shapes', name)}: bench {bench.name!r} has one ToR; a circuit joins two"
    ranks = sum(max(1, node.gpus) for node in bench.nodes.values())
    for i, step in enumerate(scenario.steps):
        if isinstance(step, Collectives | Reconfigure) and ranks < 2:
            yield f"steps[{i}]: bench {bench.name!r} has one rank; a collective needs two"
        elif isinstance(step, Collectives):
            yield from _sizes_for(step, f"steps[{i}]", ranks if step.group == "all" else 2)
        elif isinstance(step, Reconfigure):
            yield from _size_for(step, step.op, step.size, f"steps[{i}].size", ranks)
    yield from generation_on(scenario, bench, files)
    yield from rl_on(scenario, bench, files)


def _nccl(scenario: Scenario) -> Iterator[str]:
    for name in refused_names(scenario.nccl_env):
        yield f"{dotted('nccl_env', name)}: may not be set{did_you_mean(name, NCCL_ALLOWED)}"
    for name, value in scenario.nccl_env.items():
        if not _PRINTABLE.fullmatch(value):
            yield f"{dotted('nccl_env', name)}: expected printable ASCII"


# -- shapes and steps --------------------------------------------------------------------------


def _shape(name: str, shape: Shape) -> Iterator[str]:
    where = dotted("shapes", name)
    if name == ELECTRICAL:
        yield f"{where}: this name means that no circuit is used; choose another"
    elif not _NAME.fullmatch(name):
        yield f"{where}: a name is a letter and up to 31 letters, digits, '_' and '-'"
    if shape.rotate < 0:
        yield f"{where}.rotate: expected 0 or more"
    if shape.template != "listed" and shape.circuits:
        yield f'{where}.circuits: template "{shape.template}" makes them; keep one of the two keys'
    if shape.template == "listed" and not shape.circuits:
        yield (
            f'{where}: list its circuits, as in circuits = ["tor0-tor1@agg0"], or name a template '
            '("ring", "pairs" or "dark")'
        )
    if shape.template in ("listed", "dark") and shape.rotate:
        yield f'{where}.rotate: template "{shape.template}" has nothing to rotate; leave it out'
    for i, text in enumerate(shape.circuits):
        try:
            parse_circuit(text)
        except ValueError as error:
            yield f"{where}.circuits[{i}]: {error}"


def _shapes_of(where: str, step: object) -> list[tuple[str, str]]:
    """Return (key path, shape) of every shape that a step names."""
    if isinstance(step, Shift):
        return [(f"{where}.shape", step.shape)]
    if isinstance(step, Reconfigure):
        return [(f"{where}.shapes[{i}]", shape) for i, shape in enumerate(step.shapes)]
    return []


def _step(
    scenario: Scenario, where: str, step: Collectives | Shift | Reconfigure | Generate | Rl
) -> Iterator[str]:
    for path, shape in _shapes_of(where, step):
        if shape not in scenario.shapes:
            yield f"{path}: no shape {shape!r}{did_you_mean(shape, scenario.shapes)}"
    if isinstance(step, Collectives):
        yield from _collectives(where, step)
    elif isinstance(step, Reconfigure):
        yield from _reconfigure(where, step)
    elif isinstance(step, Generate):
        yield from generate_problems(scenario.generation, where, step)
    elif isinstance(step, Rl):
        yield from rl_problems(scenario, where, step)


def _collectives(where: str, step: Collectives) -> Iterator[str]:
    for key in ("ops", "sizes"):
        values = getattr(step, key)
        if not values:
            yield f"{where}.{key}: empty; name at least one"
        if doubled := [value for value, n in Counter(values).items() if n > 1]:
            yield f"{where}.{key}: {doubled[0]!r} is listed twice"
    for i, size in enumerate(step.sizes):
        yield from _size(f"{where}.sizes[{i}]", size)
    yield from _whole_number(f"{where}.iterations", step.iterations, 1)
    yield from _whole_number(f"{where}.warmup", step.warmup, 0)
    if not step.timeout_s > 0:
        yield f"{where}.timeout_s: expected more than 0"


def _reconfigure(where: str, step: Reconfigure) -> Iterator[str]:
    if not step.shapes:
        yield f"{where}.shapes: empty; name the shapes to change through, in turn"
    elif step.count > 1 and len(set(step.shapes)) < 2:
        yield f"{where}.shapes: the same shape again changes nothing; name at least two"
    yield from _size(f"{where}.size", step.size)
    yield from _whole_number(f"{where}.count", step.count, 1)
    for key in ("window_ms", "rest_ms"):
        if getattr(step, key) < 0:
            yield f"{where}.{key}: expected 0 or more"
    for key in ("steady_within_pct", "timeout_s"):
        if not getattr(step, key) > 0:
            yield f"{where}.{key}: expected more than 0"


def _size(where: str, text: str) -> Iterator[str]:
    try:
        parse_size(text)
    except ValueError as error:
        yield f"{where}: {error}"


def _whole_number(where: str, value: int, least: int) -> Iterator[str]:
    if not least <= value <= COUNT_MAX:
        yield f"{where}: expected {least} to {COUNT_MAX}"


# -- checks ------------------------------------------------------------------------------------


def _check(scenario: Scenario, where: str, check: Check) -> Iterator[str]:
    for key in ("metric", "ratio_to"):
        text = getattr(check, key)
        if key == "ratio_to" and not text:
            continue
        if problem := metric_problem(text):
            yield f"{where}.{key}: {problem}"
            continue
        labels = parse_metric(text)[1]
        yield from (f"{where}.{key}: {problem}" for problem in _labels(scenario, labels))
    if check.at_least is None and check.at_most is None:
        yield f"{where}: no limit; set at_least or at_most"
    elif (
        check.at_least is not None and check.at_most is not None and check.at_least > check.at_most
    ):
        yield f"{where}.at_least: above at_most, so nothing can pass"


def _labels(scenario: Scenario, labels: Mapping[str, str]) -> Iterator[str]:
    """Check what a metric's labels name: paths are shapes, policies those that run."""
    steps = (step for step in scenario.steps if isinstance(step, Rl))
    policies = [str(arm) for step in steps for arm in arms_of(step)]
    for key, names in (
        ("path", [ELECTRICAL, *scenario.shapes]),
        ("policy", policies),
        ("over", policies),
    ):
        if key in labels and labels[key] not in names:
            yield f"no {key} {labels[key]!r}{did_you_mean(labels[key], names)}"


# -- scenario and bench ------------------------------------------------------------------------


def _sizes_for(step: Collectives, where: str, ranks: int) -> Iterator[str]:
    for i, size in enumerate(step.sizes):
        for op in step.ops:
            yield from _size_for(step, op, size, f"{where}.sizes[{i}]", ranks)


def _size_for(
    step: Collectives | Reconfigure, op: Op, size: str, where: str, ranks: int
) -> Iterator[str]:
    """Check that something of `size` is left for each of `ranks`, or of more where GPUs are."""
    least = smallest_bytes(op, ranks, step.dtype)
    if parse_size(size) < least:
        yield (
            f"{where}: {size!r} leaves nothing to {op} among {ranks} ranks; {step.dtype} takes "
            f"{format_size(least)} or more"
        )


def _circuits_on(bench: Bench, shape: Shape, where: str) -> Iterator[str]:
    """Check listed circuits against the bench: names, and one free uplink for each end."""
    free: dict[tuple[str, str], list[str]] = {}
    for near, far in bench.cables.items():
        if not is_trunk(near):
            cable = parse_cable(near, far)
            free.setdefault((cable.tor, cable.switch), []).append(cable.uplink)
    for i, text in enumerate(shape.circuits):
        here = f"{where}.circuits[{i}]"
        circuit = parse_circuit(text)
        switch = circuit.switch
        missing = [tor for tor in circuit.tors if tor not in bench.tors]
        for tor in missing:
            yield f"{here}: bench {bench.name!r} has no ToR {tor!r}{did_you_mean(tor, bench.tors)}"
        if switch not in bench.switches:
            near_by = did_you_mean(switch, bench.switches)
            yield f"{here}: bench {bench.name!r} has no switch {switch!r}{near_by}"
            continue
        if bench.switches[switch].tier == "core":
            continue  # whether trunks are left is told where it is planned
        for tor, uplink in zip(circuit.tors, circuit.uplinks, strict=True):
            left = free.get((tor, switch), [])
            if tor in missing:
                continue
            if not left or (uplink and uplink not in left):
                which = f"uplink {uplink}" if uplink else "uplink"
                yield f"{here}: no {which} of {tor} on {switch} is left for it"
                continue
            left.remove(uplink or left[0])
