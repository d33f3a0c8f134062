"""The plan of an emulated network: every name, address and rate before anything is made."""

from collections import Counter
from ipaddress import ip_address, ip_network

import pytest

from drivers.interfaces import TokenBucket
from harness.bench.wiring import BURST_BYTES, Room, Wiring, mac_of, uplink_drain_ms, wire
from harness.errors import UsageError
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Links, Node, Switch, Tor

TORS = 4


def bench(tors: int = TORS, hosts: int = 2, node: str = "node") -> Bench:
    return Bench(
        name="wired",
        world="emulated",
        nodes={f"{node}{i}": Node(tor=f"tor{i % tors}") for i in range(tors * hosts)},
        tors={f"tor{i}": Tor(uplinks=2, driver="netlink") for i in range(tors)},
        switches={
            name: Switch(driver="polatis-scpi", url="tcp://", ports="1-32")
            for name in ("agg0", "agg1")
        },
        cables={f"tor{i}:u{k + 1}": f"agg{k}:{i + 1}" for i in range(tors) for k in range(2)},
    )


def two_tiers() -> Bench:
    """Two pods with an aggregation switch and two ToRs each; a core between; one pod on its own."""
    names = ("agg0", "agg1", "core", "alone")
    switches = {name: Switch(driver="polatis-scpi", url="tcp://", ports="1-32") for name in names}
    switches["core"] = Switch(driver="polatis-tl1", url="tcp://", ports="1-32", tier="core")
    cables = {f"tor{i}:u1": f"agg{i // 2}:{i + 1}" for i in range(TORS)}
    cables |= {f"tor{i}:u2": f"alone:{i + 1}" for i in range(TORS)}
    trunks = {"agg0:8": "core:1", "core:2/31": "agg1:9/20"}
    return Bench(
        name="wired",
        world="emulated",
        nodes={f"node{i}": Node(tor=f"tor{i}") for i in range(TORS)},
        tors={f"tor{i}": Tor(uplinks=2, driver="netlink") for i in range(TORS)},
        switches=switches,
        cables=cables | trunks,
    )


def wired(found: Bench | None = None, links: Links | None = None) -> Wiring:
    topology = topology_of(found or bench())
    return wire(topology, links or Links(), prefix="h0", network=7, light="ebpf")


def room(wiring: Wiring, name: str) -> Room:
    return next(room for room in wiring.rooms if room.netns == f"h0-{name}")


@pytest.mark.parametrize("found", [bench(), two_tiers()], ids=["one tier", "two tiers"])
def test_every_end_of_a_wire_lies_in_a_room_that_sets_it_up(found: Bench) -> None:
    wiring = wired(found)
    ends = Counter((end.netns, end.name) for w in wiring.wires for end in (w.a, w.b))
    ports = Counter((room.netns, port.name) for room in wiring.rooms for port in room.ports)
    assert set(ends.values()) == {1}
    assert ports == ends - Counter({("", wiring.control_link): 1})
    assert all(len(name) <= 15 for _, name in ends), "IFNAMSIZ"


def test_neighbours_are_known_by_the_address_of_the_port_that_has_it() -> None:
    wiring = wired()
    macs = {end.mac for w in wiring.wires for end in (w.a, w.b)}
    for found in wiring.rooms:
        for port in found.ports:
            for neighbour in port.neighbours:
                assert neighbour.mac == mac_of(neighbour.address)
                assert neighbour.mac in macs


def test_an_uplink_knows_every_uplink_that_a_circuit_could_join_it_to() -> None:
    port = next(p for p in room(wired(), "tor1").ports if p.name == "u2")
    known = {neighbour.address for neighbour in port.neighbours}
    on_agg1 = {up.address for up in topology_of(bench()).by_switch["agg1"]}
    assert known == on_agg1 - {port.address.removesuffix("/32")}


def test_an_uplink_knows_those_that_trunks_lead_to_and_no_others() -> None:
    uplinks = topology_of(two_tiers()).uplinks
    for name, joined in (("u1", {"agg0", "agg1"}), ("u2", {"alone"})):
        port = next(p for p in room(wired(two_tiers()), "tor0").ports if p.name == name)
        known = {neighbour.address for neighbour in port.neighbours}
        others = {up.address for up in uplinks if up.switch in joined}
        assert known == others - {port.address.removesuffix("/32")}


def test_a_trunk_is_a_wire_between_two_glasses_whose_ports_both_switches_know() -> None:
    wiring = wired(two_tiers())
    trunks = {
        frozenset({(w.a.netns, w.a.name), (w.b.netns, w.b.name)})
        for w in wiring.wires
        if {w.a.netns, w.b.netns} <= {"h0-agg0", "h0-agg1", "h0-core"}
    }
    assert trunks == {
        frozenset({("h0-agg0", "p8"), ("h0-core", "p1")}),
        frozenset({("h0-agg1", "p9"), ("h0-core", "p2")}),
    }
    agg0, agg1, core = (wiring.lights[name] for name in ("agg0", "agg1", "core"))
    assert (agg0.tx[8], agg0.rx[8 + 16]) == ("p8", "p8")
    assert (agg1.tx[9], agg1.rx[20]) == ("p9", "p9")
    assert core.tx == {1: "p1", 2: "p2"}
    assert core.rx == {1 + 16: "p1", 31: "p2"}


def test_the_electrical_path_carries_all_hosts_of_a_tor_divided_by_the_oversubscription() -> None:
    links = Links(link_mbit_per_s=1000, oversubscription=4)
    wiring = wired(links=links)
    both = [
        next(p.bucket for p in room(wiring, "tor0").ports if p.name == "e0"),
        next(p.bucket for p in room(wiring, "eps").ports if p.name == "t1"),
    ]
    assert [bucket and bucket.rate_bytes_per_s for bucket in both] == [62_500_000] * 2


def test_light_is_told_both_fibres_of_every_uplink() -> None:
    light = wired().lights["agg1"]
    assert (light.kind, light.netns) == ("ebpf", "h0-agg1")
    assert light.tx == {1: "p1", 2: "p2", 3: "p3", 4: "p4"}
    assert light.rx == {17: "p1", 18: "p2", 19: "p3", 20: "p4"}


def test_the_glass_queues_nothing_and_has_no_address() -> None:
    assert not room(wired(), "agg0").forwards
    assert all(not p.bucket and not p.address for p in room(wired(), "agg0").ports)


def test_from_the_start_every_other_tor_is_reached_electrically() -> None:
    far = {p.prefix for p in room(wired(), "tor2").paths if p.port == "e0" and p.metric == 100}
    assert far == {"198.19.0.0/24", "198.19.1.0/24", "198.19.3.0/24"}


def test_control_addresses_lie_in_the_chosen_network_and_differ() -> None:
    wiring = wired()
    addresses = [wiring.coordinator_address, *wiring.control_addresses.values()]
    assert len(set(addresses)) == len(addresses) == 1 + 2 * TORS + TORS
    assert all(ip_address(address) in ip_network("198.18.7.0/24") for address in addresses)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (bench(node="tor"), "names two things"),
        (bench(node="a/b"), "cannot name a network namespace"),
        (bench(tors=100, hosts=2), "at most 253"),
    ],
    ids=["one name twice", "slash", "too many"],
)
def test_a_bench_that_cannot_be_wired_is_refused(found: Bench, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wired(found)


def test_a_bucket_drains_its_full_queue_in_the_time_asked_for() -> None:
    bucket = TokenBucket.of(1000, burst_bytes=BURST_BYTES, queue_ms=20)
    assert bucket == TokenBucket(125_000_000, BURST_BYTES, 2_500_000)


def test_a_slow_port_still_queues_two_bursts() -> None:
    assert TokenBucket.of(10, burst_bytes=BURST_BYTES, queue_ms=5).limit_bytes == 2 * BURST_BYTES


@pytest.mark.parametrize(("mbit_per_s", "ms"), [(1000.0, 5.0), (500.0, 5.0), (100.0, 15.73)])
def test_what_a_full_uplink_holds_is_out_after_the_time_that_is_told(
    mbit_per_s: float, ms: float
) -> None:
    links = Links(link_mbit_per_s=mbit_per_s)
    bucket = next(p.bucket for p in room(wired(links=links), "tor0").ports if p.name == "u1")
    assert bucket
    assert uplink_drain_ms(links) == pytest.approx(ms, abs=0.01)
    drained = bucket.rate_bytes_per_s * uplink_drain_ms(links) / 1e3
    assert drained == pytest.approx(bucket.limit_bytes)


@pytest.mark.parametrize("mbit_per_s", [0.0, -1.0, 40_000.0])
def test_a_rate_that_no_bucket_can_hold_is_refused(mbit_per_s: float) -> None:
    with pytest.raises(ValueError, match="Mbit/s"):
        TokenBucket.of(mbit_per_s, burst_bytes=BURST_BYTES, queue_ms=20)
