"""Scenarios that fill whatever bench they are asked of."""

import msgspec
import pytest

from harness.errors import UsageError
from harness.model.bench import Bench, Node, Tor
from harness.model.filling import filled, filling
from harness.model.scenario import Generate, Generation, Rl, Scenario, Training
from harness.model.workload import GeneratedWorkload


def bench(generating: tuple[int, ...] = (8, 8), training: tuple[int, ...] = (8, 8)) -> Bench:
    nodes = {
        f"g{i}": Node(tor="t", pod="generate", emulated_gpus=n) for i, n in enumerate(generating)
    }
    nodes |= {f"t{i}": Node(tor="t", emulated_gpus=n) for i, n in enumerate(training)}
    return Bench(name="some", world="simulated", nodes=nodes, tors={"t": Tor()})


def scenario(layout: str = "*xTP2", train: str = "DP*TP4", *steps: Generate | Rl) -> Scenario:
    return Scenario(
        question="?",
        generation=Generation(layout=layout, workload="w", profile="p"),
        training=Training(layout=train),
        steps=steps,
        timeout_s=1,
    )


def test_stars_are_as_many_as_fit() -> None:
    policies = ("orchestrl", "static:*xTP4/least_loaded", "static:1xTP8+2xTP2")
    found = filled(scenario("*xTP2", "DP*TP4", Rl(policies=policies)), bench())
    assert found.generation is not None
    assert found.training is not None
    assert found.generation.layout == "8xTP2"
    assert found.training.layout == "DP4TP4"
    step = found.steps[0]
    assert isinstance(step, Rl)
    assert step.policies == ("orchestrl", "static:4xTP4/least_loaded", "static:1xTP8+2xTP2")


def test_an_instance_never_spans_nodes_so_uneven_ones_leave_some_gpus_out() -> None:
    found = filled(scenario("*xTP4", "DP*", Generate(layouts=("*xTP1",))), bench((8, 6), (3,)))
    assert found.generation is not None
    assert found.generation.layout == "3xTP4"
    assert found.steps[0].layouts == ("14xTP1",)  # type: ignore[union-attr]
    assert found.training is not None
    assert found.training.layout == "DP3"


def test_what_has_no_star_stays_as_it_is() -> None:
    asked = scenario("4xTP2", "DP2TP2EP2", Rl())
    assert filled(asked, bench()) == asked
    assert filled(asked) == asked


def test_where_not_one_fits_it_is_said() -> None:
    fits = r"generation.layout: '\*xTP16': an instance of 16 GPUs fits on no node"
    with pytest.raises(UsageError, match=fits):
        filled(scenario("*xTP16"), bench())
    policies = Rl(policies=("orchestrl", "static:*xTP16"))
    with pytest.raises(UsageError, match=r"steps\[0\].policies\[1\]: 'static:\*xTP16': an inst"):
        filled(scenario("*xTP2", "DP2", policies), bench())
    takes = r"training.layout: 'DP\*TP32' takes 32 ranks or more; the bench has 16"
    with pytest.raises(UsageError, match=takes):
        filled(scenario(train="DP*TP32"), bench())


def test_prompts_follow_the_gpus_that_generate() -> None:
    workload = GeneratedWorkload(
        question="?", prompts=3, cap_tokens=10, prompt_tokens={"p50": 1}, response_tokens={"p50": 1}
    )
    generation = Generation(layout="1xTP1", workload="w", prompts_per_gpu=0.5)
    found = filling(workload, generation, bench((8, 4)))
    assert isinstance(found, GeneratedWorkload)
    assert found.prompts == 6
    plain = msgspec.structs.replace(generation, prompts_per_gpu=0.0)
    assert filling(workload, plain, bench()) == workload
