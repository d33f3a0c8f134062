"""Simulated nodes that generate, in a world of their own, and what a coordinator says to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.bench.simulated.generation import Generation
from harness.bench.simulated.world import Flow, World
from harness.clock import NS_PER_S
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Node, Tor
from harness.model.layout import parse_layout
from harness.model.load import load_profile
from harness.model.placement import Instance, place
from harness.model.requests import Carried
from harness.model.simulation import (
    Calibration,
    Collectives,
    Control,
    Figure,
    Network,
    Sync,
    Training,
)  # fmt: skip
from harness.model.simulation import Generation as Figures
from harness.virtual import VirtualClock, run_virtually
from harness.wire.generation import (
    Build,
    Built,
    EngineSpec,
    GenerationOpen,
    Happened,
    OpenGeneration,
    Output,
    Strategy,
    Submit,
    Submitted,
    TearDown,
    Torn,
    Watch,
    Work,
)  # fmt: skip
from harness.wire.messages import Failure, Message

PROFILE = load_profile(Path(__file__).parents[2] / "scenarios/profiles/qwen2.5-14b-h800.toml")
SPEC = EngineSpec(engine="paced", profile=PROFILE, bytes_scale=1e-4)
RATE = 1e9
"""Of the network, bytes/s."""
M = TypeVar("M", bound=Message)


def figures(step_share: float = 1.0) -> Calibration:
    def of(value: float) -> Figure:
        return Figure(value=value)

    one = of(1.0)
    return Calibration(
        name="stated for tests",
        date="2000-01-01",
        network=Network(link_share=one, electrical_share=one, latency_us=one),
        control=Control(message_us=one, steer_us=one, read_ms=one, switch_ms=one, light_ms=one),
        collectives=Collectives(backend="gloo", step_us=one, copy_ns_per_kb=one),
        generation=Figures(
            processes_s=of(8.0),
            teardown_s=of(0.25),
            groups_s=of(0.5),
            weights_fixed_s=of(0.125),
            weights_gb_per_s=of(0.002),
            kv_cache_s=of(0.0625),
            kv_gb_per_s=of(2.0),
            step_share=of(step_share),
        ),
        training=Training(compute_share=one, phase_us=one, step_fixed_s=one),
        sync=Sync(
            gather_fixed_s=one,
            gather_gb_per_s=one,
            carry_fixed_s=one,
            carry_gb_per_s=one,
            bucket_us=one,
            load_fixed_s=of(0.5),
            load_gb_per_s=of(0.004),
        ),
    )


@dataclass
class Carrier:
    """A network of `RATE`; what it carried."""

    clock: VirtualClock
    carried: list[Flow] = field(default_factory=list)

    async def stands_still(self, source: str, target: str, for_ns: int) -> None:
        await asyncio.Event().wait()

    async def carry(self, flows: Sequence[Flow]) -> None:
        self.carried += flows
        await self.clock.sleep_ns(round(max(flow.bytes for flow in flows) / RATE * NS_PER_S))


def world_of(nodes: int = 1, step_share: float = 1.0) -> World:
    names = [f"n{i}" for i in range(nodes)]
    bench = Bench(
        name="small", world="simulated", tors={"t0": Tor()},
        nodes={name: Node(tor="t0", pod="generate") for name in names},
    )  # fmt: skip
    clock = VirtualClock()
    return World(bench, topology_of(bench), clock, figures(step_share), Carrier(clock))


class Told:
    """A node of a world, with everything that it told so far."""

    def __init__(self, world: World, name: str = "n0") -> None:
        self.world, self.name, self.clock = world, name, world.clock
        self.labour = Generation(world, name)
        self.verbs = self.labour.verbs()
        self.outputs: list[Output] = []
        self.upto = 0
        self.last: Happened | None = None

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns()

    async def say(self, body: Message) -> Message:
        return await self.verbs[type(body)](body)

    async def ask(self, body: Message, reply: type[M]) -> M:
        answer = await self.say(body)
        assert isinstance(answer, reply), f"{answer} is no {reply}"
        return answer

    async def fails(self, body: Message) -> Failure:
        return await self.ask(body, Failure)

    async def open(
        self, spec: EngineSpec = SPEC, gpus: int = 2, prebuild: Any = ()
    ) -> GenerationOpen:
        address = self.world.topology.nodes[self.name].address
        asked = OpenGeneration(spec=spec, gpus=gpus, address=address, prebuild=tuple(prebuild))
        return await self.ask(asked, GenerationOpen)

    def layout(self, text: str, gpus: int = 2) -> tuple[Instance, ...]:
        return place(parse_layout(text), {self.name: gpus})[self.name]

    async def build(
        self, instances: Sequence[Instance], strategy: Strategy = "rebuild", version: int = 0
    ) -> Built:
        asked = Build(instances=tuple(instances), strategy=strategy, version=version)
        return await self.ask(asked, Built)

    async def tear_down(
        self, instances: Sequence[Instance], strategy: Strategy = "rebuild"
    ) -> Torn:
        names = tuple(instance.name for instance in instances)
        return await self.ask(TearDown(instances=names, strategy=strategy), Torn)

    async def submit(
        self, instance: Instance, *names: str, prompt: int = 10, tokens: int = 20
    ) -> Submitted:
        works = tuple(Work(carried=Carried(name, prompt, tokens, 0)) for name in names)
        return await self.ask(Submit(instance=instance.name, works=works), Submitted)

    async def watch(self, wait_ns: int = NS_PER_S) -> Happened:
        found = await self.ask(Watch(after=self.upto, wait_ns=wait_ns), Happened)
        self.outputs += found.outputs
        self.upto, self.last = found.upto, found
        return found

    async def finished(self, *names: str) -> None:
        while not set(names) <= {o.id for o in self.outputs if o.ended == "finished"}:
            await self.watch()

    def positions(self, name: str) -> list[int]:
        told = [output for output in self.outputs if output.id == name]
        return [p for output in told for p in range(output.start, output.start + output.count)]


def run(test: Callable[..., Awaitable[None]], nodes: int = 1, step_share: float = 1.0) -> None:
    async def main() -> None:
        world = world_of(nodes, step_share)
        await test(*(Told(world, f"n{i}") for i in range(nodes)))

    run_virtually(main())


def lasted_s(spans: Any) -> dict[str, float]:
    return {span.stage: (span.end_ns - span.begin_ns) / NS_PER_S for span in spans}
