"""What changes of circuits across pods cost the packets: on circuits that stay, and on those moved.

On the shipped two-tier bench the product's own change (`harness.run.change`) moves a link between
two pods to and fro, over other aggregation and core switches each time, while TCP fills it and the
two links that stay. Every unit that changes carries one of those, too.

- Loss is counted on the path itself, by the kernel's counters of both ends of a link: what one ToR
  sent and the other did not get. Mark: 0 of all packets, in 1,000 changes.
- Goodput over the moved link, in interleaved arms: *ideal*, no change; *drained*, the sender pauses
  for the change, and the time of the pause does not count; *steered*, the flow goes on over the
  electrical path meanwhile, against what both paths could have carried for as long as each was in
  use; *neither*, it stays on the circuit, dark or not. Marks: drained and steered within 2 % of
  ideal; neither is the test of the test, and must show the collapse. Steered, a flow that comes
  back overtakes what it left in the deep electrical queue, and TCP sends that again.
- Settling: packets lost on the link that goes dark, by the time from steering away to the command,
  with its uplink's queue full. What a full queue needs is what `settle_ms` must be.

Needs root; takes about six minutes.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivers.netlink import run_in
from harness.bench.emulated import Means, open_emulated
from harness.bench.leftovers import kept_for
from harness.bench.running import Places, RunningBench
from harness.bench.wiring import room_name, uplink_drain_ms
from harness.clock import NS_PER_MS, NS_PER_S, RealClock
from harness.fabric.circuits import plan_shape
from harness.fabric.links import Link, Plan
from harness.fabric.topology import Topology, topology_of
from harness.model.load import load_bench
from harness.model.scenario import Scenario, Shape, Shift
from harness.run.change import Change, listen, moving, prepare, switch_over
from harness.run.hearing import beacons_off, beacons_on, lost_on, uplinks_of
from harness.run.session import Session
from harness.tasks import beside

ROOT = Path(__file__).parents[2]
STAY = ("train1:u1-gen1:u1@core0", "train1:u2-gen1:u2@core1")
MOVED = ("train0:u1-gen0:u1@core1",), ("train0:u2-gen0:u2@core0",)
CHANGES = 1_000
REPETITIONS = 5
CHANGES_PER_ARM = 20
ARMS = ("ideal", "drained", "steered", "neither")
REST_S, LOSS_REST_S, WARM_S, LIMIT_S = 0.2, 0.02, 1.0, 30.0
LIT_S = 0.1
"""A power meter shows light a moment before packets cross; without beacons, time must do."""
SETTLE_MS = 10.0
SETTLED_MS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0)
SETTLES = 40
"""Changes per settling time."""


class Nowhere:
    """A record that is not kept."""

    def event(self, stream: str, data: Mapping[str, object]) -> None:
        """Forget it."""


@dataclass
class Spell:
    """What one arm's spell of time carried. `electrical_ns` is in `span_ns`, pauses are not."""

    received_bytes: int
    span_ns: int
    electrical_ns: int = 0
    sent_again: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def mbit_per_s(self) -> float:
        return self.received_bytes * 8e3 / self.span_ns


class Flow:
    """A connection, in its process (`tests.benchmarks.flow`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, command: str) -> list[int]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{command}\n".encode())
        async with asyncio.timeout(LIMIT_S):
            return [int(word) for word in (await self._process.stdout.readline()).split()]


@dataclass
class Lab:
    """The bench with a session on it, and what its two shapes are."""

    session: Session
    prefix: str
    plans: tuple[Plan, Plan]
    stay: frozenset[Link]

    @property
    def topology(self) -> Topology:
        return self.session.bench.topology

    def other(self) -> Plan:
        return self.plans[self.session.lit == self.plans[0].links]

    async def change(self, *, steer_first: bool = True, settle_ms: float = SETTLE_MS) -> Change:
        """Move the link as the product does; raises where it does not come up."""
        session, plan = self.session, self.other()
        names = moving(session, plan)
        async with (
            beside(listen(session, plan)) as hearing,
            beside(prepare(session, plan, names)) as preparing,
        ):
            change = await switch_over(
                session, plan, "other", hearing, preparing=preparing, steer_first=steer_first,
                settle_ns=round(settle_ms * NS_PER_MS), switches=names,
            )  # fmt: skip
        if change.failures:
            raise RuntimeError("; ".join(change.failures.values()))
        return change

    async def change_unheard(self, settle_ms: float) -> None:
        """Move the link without beacons, which would be lost in the dark and counted."""
        session, plan = self.session, self.other()
        names = moving(session, plan)
        await prepare(session, plan, names)
        await session.steer(session.lit & plan.links)
        if settle_ms:
            await asyncio.sleep(settle_ms / 1e3)
        units = session.bench.switches
        await asyncio.gather(
            *(units[name].switch(self.topology.matching(plan.links, name)) for name in names)
        )
        await asyncio.sleep(LIT_S)
        await session.steer(plan.links)

    def lost(self, links: frozenset[Link], before: dict[str, tuple[int, int]]) -> int:
        """Return how many packets went into these links since and did not come out."""
        ways = (way for link in links for way in link.ways)
        now = self.counted()
        total = 0
        for near, far in ways:
            sent = now[str(near)][0] - before[str(near)][0]
            total += sent - (now[str(far)][1] - before[str(far)][1])
        return total

    def counted(self) -> dict[str, tuple[int, int]]:
        """Return packets (sent, received) by uplink, as the kernel counts them."""
        found = {}
        for tor in self.topology.tors:
            for name, counts in run_in(room_name(self.prefix, tor), _device_packets).items():
                found[f"{tor}:{name}"] = counts
        return found

    @asynccontextmanager
    async def flow(self, sender: str, receiver: str) -> AsyncIterator[Flow]:
        rooms = (room_name(self.prefix, name) for name in (sender, receiver))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks.flow", *rooms,
            self.topology.nodes[receiver].address,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        try:
            assert process.stdout
            async with asyncio.timeout(LIMIT_S):
                await process.stdout.readline()
            yield Flow(process)
        finally:
            process.kill()
            await process.wait()


def _device_packets() -> dict[str, tuple[int, int]]:
    rows = (line.split() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:])
    return {row[0].rstrip(":"): (int(row[10]), int(row[2])) for row in rows}


# -- the bench, and who sends --------------------------------------------------------------------


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Lab]:
    """Open the shipped bench and bring the first shape up."""
    bench = load_bench(ROOT / "scenarios/benches/two-tier.toml")
    topology = topology_of(bench)
    places = Places(folder / "run", folder / "logs", folder / "transcripts")
    for path in (places.run, places.logs, places.transcripts):
        path.mkdir()
    first, second = (
        plan_shape(topology, "shape", Shape(circuits=(*STAY, *moved))) for moved in MOVED
    )
    scenario = Scenario(question="What is lost?", steps=(Shift(shape="first"),), timeout_s=60.0)
    async with open_emulated(bench, topology, places, Means("ebpf"), RealClock()) as running:
        (record,) = kept_for(places.run)
        session = Session(bench=running, scenario=scenario, record=Nowhere(), plans={})
        lab = Lab(session, record.stem, (first, second), first.links & second.links)
        await _bring_up(running, session, first)
        yield lab


async def _bring_up(running: RunningBench, session: Session, plan: Plan) -> None:
    for name, unit in running.switches.items():
        await unit.switch(running.topology.matching(plan.links, name))
    await session.steer(plan.links)


# -- what is measured ----------------------------------------------------------------------------


async def loss(lab: Lab) -> dict[str, object]:
    """Make `CHANGES` changes while TCP fills all links; count what was lost where."""
    before = lab.counted()
    watch = await beacons_on(lab.session, uplinks_of(lab.plans[0].links | lab.plans[1].links))
    async with lab.flow("t0", "g0"), lab.flow("t2", "g2"), lab.flow("g3", "t3"):
        began_ns = time.monotonic_ns()
        for _ in range(CHANGES):
            await lab.change()
            await asyncio.sleep(LOSS_REST_S)
        took_s = (time.monotonic_ns() - began_ns) / NS_PER_S
    heard = await beacons_off(lab.session, watch)
    await asyncio.sleep(REST_S)  # what is on its way when the flows are cut
    now, names = lab.counted(), {str(end) for end in uplinks_of(lab.stay)}
    beacons = lost_on(heard, lab.stay)
    lost = lab.lost(lab.stay, before)
    sent = sum(now[name][0] - before[name][0] for name in names)
    return {
        "changes": CHANGES,
        "took_s": took_s,
        "packets_on_links_that_stayed": sent,
        "lost": lost,
        "beacons_lost": beacons,
    }


async def goodput(lab: Lab) -> dict[str, object]:
    """Let every arm run `REPETITIONS` times in turn; return goodput and what could have been."""
    spells: dict[str, list[Spell]] = {arm: [] for arm in ("electrical", *ARMS)}
    watch = await beacons_on(lab.session, uplinks_of(lab.plans[0].links | lab.plans[1].links))
    async with lab.flow("t2", "g2"), lab.flow("t0", "g0") as flow:
        await asyncio.sleep(WARM_S)
        for number in range(REPETITIONS):
            for arm in (*ARMS[number % 4 :], *ARMS[: number % 4]):
                spells[arm].append(await _spell(lab, flow, arm))
                await asyncio.sleep(WARM_S)
            spells["electrical"].append(await _electrically(lab, flow))
            await asyncio.sleep(WARM_S)
    await beacons_off(lab.session, watch)
    return _judged(spells)


async def _spell(lab: Lab, flow: Flow, arm: str) -> Spell:
    paused_ns = electrical_ns = 0
    received, began_ns, again = await flow.ask("count")
    for _ in range(CHANGES_PER_ARM):
        await asyncio.sleep(REST_S)
        if arm == "drained":
            (quiet_ns,) = await flow.ask("pause")
            await lab.change(settle_ms=0)
            paused_ns += (await flow.ask("go"))[0] - quiet_ns
        elif arm != "ideal":
            change = await lab.change(steer_first=arm == "steered")
            if arm == "steered":
                away_ns, back_ns = (change.stamps[name] for name in ("steered_away", "steered"))
                assert away_ns
                assert back_ns
                electrical_ns += back_ns - away_ns
    await asyncio.sleep(REST_S)
    received_now, now_ns, again_now = await flow.ask("count")
    span_ns = now_ns - began_ns - paused_ns
    return Spell(received_now - received, span_ns, electrical_ns, again_now - again)


async def _electrically(lab: Lab, flow: Flow) -> Spell:
    """Measure what the electrical path carries of this flow."""
    lit = lab.session.lit
    await lab.session.steer(lab.stay)
    await asyncio.sleep(WARM_S)
    received, began_ns, again = await flow.ask("count")
    await asyncio.sleep(WARM_S)
    received_now, now_ns, again_now = await flow.ask("count")
    await lab.session.steer(lit)
    return Spell(received_now - received, now_ns - began_ns, 0, again_now - again)


def _judged(spells: dict[str, list[Spell]]) -> dict[str, object]:
    """Compare every spell with what its paths could carry, by the medians of both."""
    electrical = statistics.median(spell.mbit_per_s for spell in spells.pop("electrical"))
    circuit = statistics.median(spell.mbit_per_s for spell in spells["ideal"])
    rows: dict[str, object] = {"electrical_mbit_per_s": electrical}
    for arm, found in spells.items():
        rates = sorted(spell.mbit_per_s for spell in found)
        electrically = [spell.electrical_ns / spell.span_ns for spell in found]
        could = [share * electrical + (1 - share) * circuit for share in electrically]
        reached = [100 * spell.mbit_per_s / x for spell, x in zip(found, could, strict=True)]
        rows[arm] = {
            "changes": CHANGES_PER_ARM * len(found) * (arm != "ideal"),
            "mbit_per_s": [rates[0], statistics.median(rates), rates[-1]],
            "electrically_pct": 100 * statistics.mean(electrically),
            "of_ideal_pct": statistics.median(reached),
            "of_ideal_pct_min": min(reached),
            "sent_again": statistics.median(spell.sent_again for spell in found),
        }
    return rows


async def settling(lab: Lab) -> dict[str, object]:
    """Count what a link that goes dark loses, by settling time; two senders fill its uplink."""
    rows: dict[str, object] = {}
    moved = (lab.plans[0].links | lab.plans[1].links) - lab.stay
    for settle_ms in SETTLED_MS:
        before = lab.counted()
        async with lab.flow("t0", "g0"), lab.flow("t1", "g1"):
            await asyncio.sleep(WARM_S)
            for _ in range(SETTLES):
                await lab.change_unheard(settle_ms)
                await asyncio.sleep(REST_S / 2)
        await asyncio.sleep(REST_S)
        rows[f"{settle_ms:g}"] = {"changes": SETTLES, "lost_packets": lab.lost(moved, before)}
    return rows


async def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with opened(Path(folder)) as lab:
            links = load_bench(ROOT / "scenarios/benches/two-tier.toml").links
            return {
                "link_mbit_per_s": links.link_mbit_per_s,
                "full_uplink_queue_ms": uplink_drain_ms(links),
                "settling": await settling(lab),
                "goodput": await goodput(lab),
                "loss": await loss(lab),
            }


def run() -> dict[str, Any]:
    """Return all figures; rates in Mbit/s, times as named."""
    return asyncio.run(_measure())


def table(figures: dict[str, Any]) -> str:
    kept, goodput_ = figures["loss"], figures["goodput"]
    electrical = goodput_["electrical_mbit_per_s"]
    lines = [
        f"links that stayed: {kept['lost']} of {kept['packets_on_links_that_stayed']} packets lost",
        f"  in {kept['changes']} changes, {kept['took_s']:.0f} s under full load",
        f"  beacons that full queues dropped before: {kept['beacons_lost']}",
        f"moved link, {figures['link_mbit_per_s']:g} Mbit/s (electrically {electrical:.0f}):",
        "  arm      changes  Mbit/s min/median/max  electrically  of ideal (min)  sent again",
    ]
    for arm, row in ((arm, goodput_[arm]) for arm in ARMS):
        rates = "/".join(f"{rate:.0f}" for rate in row["mbit_per_s"])
        ideal = f"{row['of_ideal_pct']:7.1f} % ({row['of_ideal_pct_min']:.1f})"
        lines.append(
            f"  {arm:8} {row['changes']:7} {rates:>22} {row['electrically_pct']:11.1f} %"
            f" {ideal} {row['sent_again']:8.0f}"
        )
    lines.append(f"a full uplink queue gets out in {figures['full_uplink_queue_ms']:.1f} ms; lost:")
    lines += [
        f"  settled {settle_ms:>4} ms  {row['lost_packets']:5} packets in {row['changes']} changes"
        for settle_ms, row in figures["settling"].items()
    ]
    lines += [f"mark: {mark}: {'met' if met else 'MISSED'}" for mark, met in _marks(figures)]
    return "\n".join(lines)


def _marks(figures: dict[str, Any]) -> list[tuple[str, bool]]:
    reached = {arm: figures["goodput"][arm]["of_ideal_pct"] for arm in ARMS}
    full_ms = figures["full_uplink_queue_ms"]
    late = [row for ms, row in figures["settling"].items() if float(ms) > full_ms]
    return [
        ("nothing lost on links that stay", figures["loss"]["lost"] == 0),
        ("drained within 2 % of ideal", reached["drained"] >= 98),
        ("steered within 2 % of what its paths could carry", reached["steered"] >= 98),
        ("neither collapses below 80 %", reached["neither"] < 80),
        ("nothing lost once a full queue is out", all(not row["lost_packets"] for row in late)),
    ]
