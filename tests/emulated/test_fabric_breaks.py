"""What breaks while circuits follow the work: the run goes on over what is left, says so, restores.

Two pods, two tiers and the electrical path, as in ``scenarios/benches/two-tier.toml``, with fewer
servers. Circuits lead between the training ToRs while ranks train, and to the generating ones while
weights are on their way: twice a step all of them change.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pyroute2 import IPRoute

from drivers import netlink
from drivers.emulators.config import Faults
from drivers.tor.netlink import METRIC
from harness.bench.breaking import break_unit
from harness.bench.electrical import ElectricalPath
from harness.bench.leftovers import kept_for, read_record
from harness.fabric.topology import topology_of
from harness.model.load import load_bench
from tests.emulated.lab import Lab, lab

pytestmark = [pytest.mark.root, pytest.mark.timeout(150)]

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LIMIT_S = 60.0
LOOK_S = 0.1
STOPPED_S = 1.0  # agents give a coordinator up after three
SAMPLES = 8

Row = dict[str, Any]

BENCH = """
name = "fabric"
world = "emulated"
launcher = "namespaces"
[links]
link_mbit_per_s = 500.0
"""
NODES = {"t0": "train0", "t1": "train0", "t2": "train1", "t3": "train1", "g0": "gen0", "g1": "gen1"}
NODE = """
[nodes.{name}]
tor = "{tor}"
pod = "{pod}"
emulated_gpus = 1
"""
TORS = {"train0": "train", "train1": "train", "gen0": "generate", "gen1": "generate"}
TOR = """
[tors.{name}]
pod = "{pod}"
uplinks = 2
driver = "netlink"
"""
SWITCH = """
[switches.{name}]
driver = "{driver}"
url = "{url}"
tier = "{tier}"
ports = "1-4,17-20"
power_averaging = 1
light_timeout_s = 0.5
exchange_timeout_s = 2.0
apply_timeout_s = 5.0
emulate = {{ switch_ms = 10.0, reboot_ms = 1000.0 }}
"""
AGGREGATION = {"driver": "polatis-scpi", "url": "tcp://", "tier": "aggregation"}
CORE = {"driver": "polatis-tl1", "url": "ssh://admin@", "tier": "core"}
CABLES = {
    "train0:u1": "agg0:1", "train1:u1": "agg0:2", "train0:u2": "agg1:1", "train1:u2": "agg1:2",
    "gen0:u1": "agg2:1", "gen1:u1": "agg2:2", "gen0:u2": "agg3:1", "gen1:u2": "agg3:2",
    "agg0:3": "core0:1", "agg1:3": "core0:2", "agg2:3": "core0:3", "agg3:3": "core0:4",
    "agg0:4": "core1:1", "agg1:4": "core1:2", "agg2:4": "core1:3", "agg3:4": "core1:4",
}  # fmt: skip

WORKLOAD = """
question = "What do a few short samples need?"
kind = "generator"
seed = 1
steps = 16
prompts = 4
samples = 2
cap_tokens = 200
sibling_correlation = 0.1
[prompt_tokens]
p50 = 60
[response_tokens]
p50 = 100
p90 = 160
"""
SCENARIO = f"""
question = "Does a fabric that breaks end well?"
bench = "bench.toml"
timeout_s = 100.0
[generation]
layout = "2xTP1"
workload = "workload.toml"
profile = "{SCENARIOS / "profiles/qwen2.5-14b-h800.toml"}"
bytes_scale = 0.0003
speed = 20.0
[training]
layout = "DP4"
bytes_scale = 0.0002
[[steps]]
do = "rl"
policies = ["static:2xTP1"]
fabrics = ["rfabric"]
sync = "pairs"
"""


class Fabric:
    """A run over a fabric, and all that can be broken of it while it goes on."""

    def __init__(self, made: Lab) -> None:
        self.lab, folder = made, made.folder
        parts = [BENCH]
        parts += [NODE.format(name=n, tor=tor, pod=TORS[tor]) for n, tor in NODES.items()]
        parts += [TOR.format(name=name, pod=pod) for name, pod in TORS.items()]
        parts += [SWITCH.format(name=f"agg{k}", **AGGREGATION) for k in range(4)]
        parts += [SWITCH.format(name=f"core{k}", **CORE) for k in range(2)]
        parts += ["[cables]\n", *(f'"{a}" = "{b}"\n' for a, b in CABLES.items())]
        (folder / "bench.toml").write_text("".join(parts))
        (folder / "workload.toml").write_text(WORKLOAD)
        self.bench = load_bench(folder / "bench.toml")
        self.topology = topology_of(self.bench)

    def start(self, steps: int) -> None:
        (self.lab.folder / "scenario.toml").write_text(f"{SCENARIO}steps = {steps}\n")
        self.process = self.lab.start()

    def finish(self) -> tuple[int, str]:
        return self.lab.finish(self.process)

    # -- what is seen ------------------------------------------------------------------------------

    def rows(self, *streams: str) -> list[Row]:
        """Rows of these streams in the order in which they were written."""
        try:
            lines = (self.lab.run_folder / "journal.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        wanted = [line for line in lines if any(f'"{name}"' in line for name in streams)]
        read = (json.loads(line) for line in wanted if line.endswith("}"))
        return [
            one["data"] | {"stream": one["stream"]}
            for one in read
            if one["doc"] == "event" and one["stream"] in streams
        ]

    def wait(self, stream: str, wanted: Callable[[Row], bool]) -> Row:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if found := [row for row in self.rows(stream) if wanted(row)]:
                return found[-1]
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(LOOK_S)
        raise AssertionError(f"no such row of {stream}: {self.rows(stream)[-3:]}")

    def wait_for_step(self, index: int) -> None:
        self.wait("rl_step", lambda row: row["index"] == index)

    def wait_for_part(self, state: str, *names: str) -> str:
        """Wait until one of these is told to be in this state; return its name."""
        row = self.wait("fabric_part", lambda row: row["part"] in names and row["state"] == state)
        return str(row["part"])

    def all_steps_were_made(self, steps: int) -> None:
        made = self.rows("rl_step")
        assert [row["index"] for row in made] == list(range(steps))
        assert [row["samples"] for row in made] == [SAMPLES] * steps
        synced = [row["version"] for row in self.rows("sync") if row["outcome"] == "synced"]
        assert synced == list(range(1, steps + 1))

    def nothing_broken_is_planned_with(self) -> set[str]:
        """Look at every decision after its break; return the names of all that broke."""
        broken: set[str] = set()
        ever: set[str] = set()
        for row in self.rows("fabric", "fabric_part"):
            if row["stream"] == "fabric_part" and row["state"] != "unsteered":
                name = {row["part"]}
                broken = broken | name if row["state"] == "broken" else broken - name
                ever |= name
            elif row["stream"] == "fabric":
                used = {part for circuit in row["circuits"] for part in parts_of(circuit)}
                assert not used & broken, row
        return ever

    def restored(self) -> dict[str, str]:
        return {row["switch"]: row["outcome"] for row in self.rows("restore")}

    # -- what breaks -------------------------------------------------------------------------------

    @property
    def record(self) -> Path:
        (found,) = kept_for(self.lab.run_folder)
        return found

    def breaks(self, unit: str, **faults: Any) -> None:
        break_unit(self.record, unit, Faults(**faults))

    def plug(self, tor: str, *, plugged: bool) -> None:
        prefix = read_record(self.record).prefix
        ElectricalPath(self.topology, self.bench.links, prefix).plug(tor, plugged=plugged)

    def foreign_route(self, verb: Literal["add", "del"], tor: str, to: str) -> None:
        """Put somebody else's route, equal to the electrical one, where ours would go."""
        tors = self.topology.tors
        way = {"gateway": tors[tor].electrical_gateway, "priority": METRIC, "proto": "static"}

        def act() -> None:
            with IPRoute() as ip:
                ip.route(verb, dst=tors[to].prefix, **way)

        netlink.run_in(f"{read_record(self.record).prefix}-{tor}", act)


def parts_of(circuit: str) -> set[str]:
    """Uplinks, trunks and switches of a link's name, such as ``gen0-train0@agg2+core0+agg0``."""
    pair, _, path = circuit.partition("@")
    switches = path.split("+")
    plugged = {(end.partition(":")[0], at.partition(":")[0]): end for end, at in CABLES.items()}
    ends = zip(pair.split("-"), (switches[0], switches[-1]), strict=True)
    trunks = {plugged[switch, switches[1]] for switch in switches[::2] if len(switches) > 1}
    return {*switches, *trunks, *(plugged[end] for end in ends)}


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    with lab(tmp_path) as made:
        yield Fabric(made)


def test_swapped_cables_and_cores_that_reboot_cost_their_circuits_only(
    fabric: Fabric,
) -> None:
    steps = 9
    fabric.start(steps)
    fabric.wait_for_step(0)
    fabric.breaks("agg2", swapped=((17, 18),))
    uplinks = "gen0:u1", "gen1:u1"
    fabric.wait_for_part("broken", *uplinks)
    for core in ("core0", "core1"):
        fabric.breaks(core, reboot_on_command=1)
    core = fabric.wait_for_part("broken", "core0", "core1")
    fabric.wait_for_part("back", core)
    fabric.wait_for_step(steps - 3)
    fabric.breaks(core, reboot_on_command=1)
    code, out = fabric.finish()
    assert code == 0, out
    fabric.all_steps_were_made(steps)
    named = fabric.nothing_broken_is_planned_with()
    assert core in named
    assert named & {*uplinks}  # a wrong way across pods may be any part's of it
    told = {row["part"]: row["reason"] for row in fabric.rows("fabric_part")}
    assert any("hears" in told[uplink] for uplink in named & {*uplinks})
    changes = fabric.rows("fabric_change")
    errors = "; ".join(row["error"] for row in changes if row["outcome"] == "degraded")
    assert f"{core}: " in errors
    assert {*fabric.restored().values()} <= {"restored", "unchanged"}
    assert fabric.lab.snapshots() == dict.fromkeys(fabric.bench.switches, True)


def test_a_dead_plane_needs_a_person_and_a_tor_that_refused_is_used_again(fabric: Fabric) -> None:
    steps = 7
    fabric.start(steps)
    fabric.wait_for_step(0)
    fabric.foreign_route("add", "gen0", "train0")
    fabric.wait_for_part("unsteered", "gen0")
    fabric.foreign_route("del", "gen0", "train0")
    fabric.wait_for_part("back", "gen0")
    fabric.breaks("agg1", die_on_command=1)
    fabric.wait_for_part("broken", "agg1")
    code, out = fabric.finish()
    assert code == 5, out
    assert "agg1: " in out
    assert "it should hold no circuit" in out
    fabric.all_steps_were_made(steps)
    assert "agg1" in fabric.nothing_broken_is_planned_with()
    refusal = next(row for row in fabric.rows("fabric_part") if row["state"] == "unsteered")
    assert "EEXIST" in refusal["reason"]
    alive = fabric.bench.switches.keys() - {"agg1"}
    assert fabric.restored().pop("agg1") == "failed"
    assert fabric.lab.snapshots() == dict.fromkeys(alive, True) | {"agg1": False}


def test_a_stuck_port_a_tor_without_its_electrical_link_and_a_late_controller(
    fabric: Fabric,
) -> None:
    steps = 12
    fabric.start(steps)
    fabric.wait_for_step(0)
    fabric.breaks("agg2", stuck_ports=(17,))
    fabric.wait_for_part("broken", "gen0:u1")
    fabric.plug("gen1", plugged=False)
    fabric.wait_for_part("broken", "gen1:e0")
    fabric.wait_for_step(3)
    fabric.process.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    fabric.process.send_signal(signal.SIGCONT)
    fabric.wait_for_step(4)
    fabric.plug("gen1", plugged=True)
    fabric.wait_for_part("back", "gen1:e0")
    code, out = fabric.finish()
    assert code == 0, out
    fabric.all_steps_were_made(steps)
    assert "gen0:u1" in fabric.nothing_broken_is_planned_with()
    assert "failed" not in {row["outcome"] for row in fabric.rows("sync")}, "nobody was stranded"
    reasons = "; ".join(row["reason"] for row in fabric.rows("fabric"))
    assert "-gen1 would be stranded" in reasons
    changes = fabric.rows("fabric_change")
    assert any("agg2: no light on egress ports 17" in row["error"] for row in changes)
    assert fabric.lab.snapshots() == dict.fromkeys(fabric.bench.switches, True)
