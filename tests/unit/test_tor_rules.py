"""ToRs in a bench file: how they are reached, and what a live bench must say for its routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.tor.base import Hop, Route
from harness.errors import BadFile
from harness.fabric.circuits import plan_shape
from harness.fabric.topology import topology_of
from harness.model.load import load_bench
from harness.model.scenario import Shape

LIVE = """
name = "rack"
world = "live"
listen = "10.0.0.1:7000"
keys = "keys"
[nodes.a]
tor = "left"
host = "a"
interface = "ens1"
address = "10.1.0.10"
[nodes.b]
tor = "right"
host = "b"
interface = "ens1"
address = "10.1.1.10"
[nodes.c]
tor = "right"
host = "c"
interface = "ens1"
address = "10.1.1.11"

[tors.left]
driver = "linux-ssh"
url = "ssh://admin@10.0.0.21"
known_hosts = "known_hosts"
password_env = "TOR_PASSWORD"
prefix = "10.1.0.0/24"
[tors.left.ports]
u1 = { interface = "swp49", address = "10.9.0.1" }
u2 = { interface = "swp50", address = "10.9.0.2" }
[tors.right]
driver = "frr-ssh"
url = "ssh://root@10.0.0.22:2222"
known_hosts = "known_hosts"
key_file = "key"
exchange_timeout_s = 15.0
prefix = "10.1.1.0/24"
[tors.right.ports]
u1 = { interface = "eth1", address = "10.9.0.3" }
u2 = { interface = "eth2", address = "10.9.0.4" }

[switches.ocs]
driver = "polatis-scpi"
url = "tcp://10.0.0.5:5025"
ports = "1-4,17-20"
[cables]
"left:u1" = "ocs:1/17"
"left:u2" = "ocs:2/18"
"right:u1" = "ocs:3/19"
"right:u2" = "ocs:4/20"
"""
EMULATED = """
name = "lab"
world = "emulated"
launcher = "namespaces"
[nodes.a]
tor = "left"
[tors.left]
driver = "linux-ssh"
exchange_timeout_s = 1.0
[tors.left.emulate]
deny_devices = ["u1"]
answer_ms = 2.0
lose_reply = 1
"""


def problems(folder: Path, text: str) -> list[str]:
    path = folder / "bench.toml"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_bench(path)
    return caught.value.problems


def changed(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new, 1)


def test_live_tors_are_found_and_their_files_lie_beside_the_bench_file(tmp_path: Path) -> None:
    (tmp_path / "bench.toml").write_text(LIVE)
    left, right = load_bench(tmp_path / "bench.toml").tors.values()
    assert left.known_hosts == str(tmp_path / "known_hosts")
    assert (right.key_file, right.password_file) == (str(tmp_path / "key"), "")


def test_routes_of_a_live_bench_have_its_own_interfaces_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "bench.toml").write_text(LIVE)
    topology = topology_of(load_bench(tmp_path / "bench.toml"))
    shape = Shape(circuits=("left:u1-right:u1@ocs", "left:u2-right:u2@ocs"))
    routes = topology.routes(plan_shape(topology, "both", shape).links)
    one, two = Hop("10.9.0.3", "swp49"), Hop("10.9.0.4", "swp50")
    assert routes["left"] == {
        Route("10.1.1.0/24", (one, two)),
        Route("10.1.1.10/32", (one,)),
        Route("10.1.1.11/32", (two,)),
    }
    assert {hop for route in routes["right"] for hop in route.hops} == {
        Hop("10.9.0.1", "eth1"),
        Hop("10.9.0.2", "eth2"),
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('url = "ssh://admin@10.0.0.21"\n', "", "left.url: missing; linux-ssh steers over SSH"),
        ("ssh://admin@10.0.0.21", "ssh://10.0.0.21", "left.url: names no user; expected ssh://"),
        ("ssh://admin@10.0.0.21", "tcp://10.0.0.21:22", "expected ssh://, which linux-ssh speaks"),
        ("ssh://root@10.0.0.22:2222", "ssh://admin@10.0.0.21", "tors.left has the same device"),
        ('known_hosts = "known_hosts"\n', "", "tors.left.known_hosts: missing; name the file"),
        ('"TOR_PASSWORD"', '"hunter two"', "left.password_env: expected the name of an env"),
        ('key_file = "key"', 'key_file = "~root/k"', "tors.right.key_file: only your own home"),
        ("= 15.0", "= 5.0", "tors.right.exchange_timeout_s: frr-ssh needs 10 or more"),
        ("= 15.0", "= 0.0", "tors.right.exchange_timeout_s: expected more than 0"),
        ('driver = "linux-ssh"', 'driver = "netlink"', "tors.left.url: expected netns:// where"),
        ('driver = "linux-ssh"', 'driver = "none"', 'left.url: driver = "none" steers nothing'),
        ('prefix = "10.1.0.0/24"\n', "", "tors.left.prefix: missing; a live bench with steered"),
        ('"10.1.0.0/24"', '"10.1.0.0"', 'tors.left.prefix: write "10.1.0.0/32"'),
        ('"10.1.0.0/24"', '"10.1.0.7/24"', "tors.left.prefix: expected an IPv4 network"),
        ('"10.1.1.0/24"', '"10.1.0.0/16"', "tors.right.prefix: it overlaps tors.left.prefix"),
        ('"10.1.1.10"', '"10.1.2.10"', "nodes.b.address: 10.1.2.10 is not in tors.right.prefix"),
        ('"10.1.1.10"', '"fe80::1"', "nodes.b.address: fe80::1 is not in tors.right.prefix"),
        ('u1 = { interface = "eth1", address = "10.9.0.3" }\n', "", "right.ports.u1: missing"),
        ('interface = "eth1", ', "", "tors.right.ports.u1.interface: missing; what the ToR calls"),
        ('"eth1"', '"eth1; reboot"', "ports.u1.interface: 'eth1; reboot' is no name"),
        ('"eth2"', '"eth1"', "ports.u2.interface: tors.right.ports.u1 is the same interface"),
        (', address = "10.9.0.3"', "", "tors.right.ports.u1.address: missing; the ToR's address"),
        ('"10.9.0.3"', '"10.9.0.3/24"', "tors.right.ports.u1.address: expected an IPv4 address"),
        ('"10.9.0.3"', '"10.9.0.1"', "right.ports.u1.address: tors.left.ports.u1 has the same"),
        ('"10.9.0.3"', '"10.1.0.10"', "right.ports.u1.address: nodes.a has the same"),
        (
            "[tors.left.ports]\n",
            "[tors.left.ports]\nu3 = {}\n",
            "no such uplink; there are u1 to u2",
        ),
        ('swp49", address', 'swp49", adress', "ports.u1.adress: unknown key; did you mean 'addr"),
    ],
)
def test_a_live_bench_with_steered_tors_says_all_that_routes_need(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in "\n".join(problems(tmp_path, changed(LIVE, old, new)))


def test_every_missing_key_is_told_once(tmp_path: Path) -> None:
    text = changed(LIVE, 'prefix = "10.1.0.0/24"\n', "")
    text = changed(text, 'u1 = { interface = "swp49", address = "10.9.0.1" }\n', "")
    found = problems(tmp_path, changed(text, ', address = "10.9.0.2"', ""))
    assert [line.partition(": ")[0] for line in found] == [
        "tors.left.prefix",
        "tors.left.ports.u1",
        "tors.left.ports.u2.address",
    ]


def test_a_tor_that_steers_by_itself_still_says_where_routes_lead(tmp_path: Path) -> None:
    left, right = LIVE.index("[tors.left]"), LIVE.index("[tors.right]")
    found = problems(tmp_path, LIVE[:left] + "[tors.left]\n" + LIVE[right:])
    assert [line.partition(": ")[0] for line in found] == [
        "tors.left.prefix",
        "tors.left.ports.u1",
        "tors.left.ports.u2",
    ]


def test_where_no_tor_is_steered_nothing_needs_to_be_said(tmp_path: Path) -> None:
    left, switches = LIVE.index("[tors.left]"), LIVE.index("[switches.ocs]")
    text = LIVE[:left] + "[tors.left]\n[tors.right]\n" + LIVE[switches:]
    (tmp_path / "bench.toml").write_text(text)
    assert not any(
        p.steered for p in topology_of(load_bench(tmp_path / "bench.toml")).tors.values()
    )


@pytest.mark.parametrize(
    ("url", "good"),
    [("netns://", True), ("netns://fabric", True), ("netns://a/b", False), ("ssh://a@b", False)],
)
def test_a_coordinator_that_is_the_tor_names_a_namespace(
    tmp_path: Path, url: str, *, good: bool
) -> None:
    text = changed(LIVE, '"linux-ssh"\nurl = "ssh://admin@10.0.0.21"', f'"netlink"\nurl = "{url}"')
    if good:
        (tmp_path / "bench.toml").write_text(text)
        assert load_bench(tmp_path / "bench.toml").tors["left"].url == url
    else:
        assert "tors.left.url: expected netns://" in problems(tmp_path, text)[0]


def test_a_password_in_a_tors_url_is_refused_and_never_told(tmp_path: Path) -> None:
    text = changed(LIVE, "ssh://admin@10.0.0.21", "ssh://admin:hunter2@10.0.0.21")
    found = problems(tmp_path, text)
    assert found[0].startswith("tors.left.url: holds a password")
    assert "hunter2" not in "".join(found)


def test_an_emulated_tor_may_have_faults(tmp_path: Path) -> None:
    (tmp_path / "bench.toml").write_text(EMULATED)
    assert load_bench(tmp_path / "bench.toml").tors["left"].emulate.lose_reply == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('driver = "linux-ssh"', 'driver = "frr-ssh"', "left.driver: frr-ssh steers real ToRs"),
        ('driver = "linux-ssh"', 'driver = "netlink"', "left.emulate: it is about a ToR's SSH"),
        ("exchange_", 'url = "ssh://admin@"\nexchange_', "left.url: only a live bench states it"),
        ("exchange_", 'prefix = "10.1.0.0/24"\nexchange_', "left.prefix: only a live bench"),
        ("exchange_", 'ports.u1.address = "10.9.0.1"\nexchange_', "left.ports: only a live bench"),
        ('["u1"]', '["swp1"]', "deny_devices: no uplink 'swp1'; there are u1 to u2"),
        ("lose_reply = 1", "lose_reply = -1", "left.emulate.lose_reply: expected 0 (never) or"),
    ],
)
def test_an_emulated_bench_makes_its_own_addresses(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in "\n".join(problems(tmp_path, changed(EMULATED, old, new)))
