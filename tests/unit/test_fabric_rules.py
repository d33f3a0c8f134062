"""What a scenario asks of circuits is refused with its key, or fits its bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.model.bench import Bench
from harness.model.fabric_rules import fabric_problems, fabrics_on
from harness.model.load import load_bench
from harness.model.scenario import Fabric, Rl, Scenario, Shape

BENCHES = Path(__file__).parents[2] / "scenarios/benches"


def on(bench: Bench, *fabrics: Any) -> list[str]:
    return list(fabrics_on("steps[0]", Rl(fabrics=fabrics), bench))


def with_drivers(bench: Bench, **drivers: Any) -> Bench:
    tors = {
        name: msgspec.structs.replace(tor, driver=drivers.get(name, tor.driver))
        for name, tor in bench.tors.items()
    }
    return msgspec.structs.replace(bench, tors=tors)


def test_the_shipped_bench_of_two_tiers_can_have_every_fabric() -> None:
    bench = load_bench(BENCHES / "two-tier.toml")
    assert not on(bench, "electrical", "static", "rfabric", "ideal")
    assert not on(with_drivers(bench, train0="linux-ssh"), "rfabric")


@pytest.mark.parametrize("fabric", ["static", "rfabric"])
def test_circuits_that_an_emulated_tor_would_not_use_are_refused(fabric: str) -> None:
    bench = with_drivers(load_bench(BENCHES / "two-tier.toml"), train0="none", gen1="none")
    (said,) = on(bench, "electrical", fabric)
    assert said.startswith(f"steps[0].fabrics: '{fabric}' needs steered ToRs")
    assert 'give train0, gen1 driver = "netlink"' in said
    assert not on(bench, "electrical", "ideal")


def test_a_live_fabric_may_steer_by_itself_but_not_become_ideal() -> None:
    bench = load_bench(BENCHES / "lab.toml")
    assert not on(with_drivers(bench, **dict.fromkeys(bench.tors, "none")), "rfabric")
    (said,) = on(bench, "rfabric", "ideal")
    assert "a live bench cannot become" in said


def test_a_bench_without_switches_is_told_which_fabrics_it_can_have() -> None:
    (said,) = on(load_bench(BENCHES / "rl-8.toml"), "rfabric")
    assert 'keep "electrical" and "ideal"' in said


@pytest.mark.parametrize("fabric", ["electrical", "ideal"])
def test_circuits_are_all_that_a_bench_of_circuits_alone_can_have(fabric: str) -> None:
    bench = load_bench(BENCHES / "two-tier.toml")
    links = msgspec.structs.replace(bench.links, electrical="none")
    alone = msgspec.structs.replace(bench, links=links)
    (said,) = on(alone, "rfabric", fabric)
    assert said.startswith(f"steps[0].fabrics: '{fabric}' uses no circuit")
    assert not on(alone, "static", "rfabric")


@pytest.mark.parametrize(
    ("fabrics", "said"),
    [(("static",), ""), (("rfabric",), "fabric.static: no step runs over"), ((), "fabric: no st")],
)
def test_a_shape_for_the_static_fabric_needs_a_step_that_runs_over_it(
    fabrics: Any, said: str
) -> None:
    scenario = Scenario(
        question="?",
        steps=(Rl(fabrics=fabrics),),
        shapes={"mine": Shape(template="ring")},
        fabric=Fabric(static="mine"),
    )
    found = list(fabric_problems(scenario))
    assert [said in problem for problem in found] == ([True] if said else [])
