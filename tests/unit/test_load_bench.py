"""A bench file is read whole, or refused with everything that is wrong with it."""

from __future__ import annotations

import contextlib
import copy
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BadFile, ExitCode
from harness.fabric.topology import topology_of
from harness.model.bench import Bench
from harness.model.bench_rules import bench_problems
from harness.model.load import load_bench
from harness.model.schema import examine

SHIPPED = Path(__file__).parents[2] / "scenarios/benches/emulated-4.toml"
TEXT = SHIPPED.read_text()

LIVE = """
name = "lab"
world = "live"
listen = "10.0.0.1:7000"
keys = "keys"
[nodes.n0]
tor = "leaf0"
host = "gpu0"
interface = "ens1"
address = "10.1.0.10"
[nodes.n1]
tor = "leaf1"
host = "gpu1"
interface = "ens1"
address = "10.1.1.10"
[tors.leaf0]
[tors.leaf1]
[switches.ocs]
driver = "polatis-tl1"
url = "ssh://admin@10.0.0.5:6252"
known_hosts = "known_hosts"
password_env = "OCS_PASSWORD"
ports = "1-4,17-20"
[cables]
"leaf0:u1" = "ocs:1/17"
"leaf1:u1" = "ocs:2/18"
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_bench(path)
    assert caught.value.exit_code is ExitCode.USAGE
    assert str(path) in str(caught.value)
    return caught.value.problems


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def test_the_shipped_bench_is_good() -> None:
    bench = load_bench(SHIPPED)
    assert list(bench.nodes) == ["n0", "n1", "n2", "n3"]
    assert [switch.driver for switch in bench.switches.values()] == ["polatis-scpi", "polatis-tl1"]
    assert len(topology_of(bench).uplinks) == 8


def test_a_live_bench_finds_its_files_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(LIVE)
    bench = load_bench(tmp_path / "lab.toml")
    assert bench.switches["ocs"].known_hosts == str(tmp_path / "known_hosts")
    assert bench.switches["ocs"].key_file == ""
    assert bench.keys == str(tmp_path / "keys")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = changed(TEXT, 'tor = "tor1"', 'tor = "tor9"')
    text = changed(text, "uplinks = 2", "uplinkz = 2")
    text = changed(text, "link_mbit_per_s = 1000.0", "link_mbit_per_s = -1.0")
    found = problems(tmp_path, changed(text, '"agg1:3"', '"agg1:5"'))
    assert [line.partition(":")[0] for line in found] == [
        "tors.tor0.uplinkz",
        "nodes.n1.tor",
        'cables."tor2',
        'cables."tor2',
        "links.link_mbit_per_s",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("uplinks = 2", "uplinkz = 2", "tors.tor0.uplinkz: unknown key; did you mean 'uplinks'?"),
        ("uplinks = 2", 'uplinks = "2"', "tors.tor0.uplinks: expected a whole number, found text"),
        (
            "uplinks = 2",
            "uplinks = 2.0",
            "tors.tor0.uplinks: expected a whole number, found a number with",
        ),
        ("uplinks = 2", "uplinks = true", "uplinks: expected a whole number, found true or false"),
        ("uplinks = 2", "uplinks = 9" * 30, "not TOML"),
        ("uplinks = 2", "uplinks = 1" + 30 * "0", "uplinks: the number does not fit 64 bits"),
        ("[nodes.n1]", "[nodes.n1]\nemulated_gpus = -1", "nodes.n1.emulated_gpus: expected 0 to"),
        ("[nodes.n1]", "[nodes.n1]\ngpus = 2\nemulated_gpus = 2", "n1.emulated_gpus: the node has"),
        ("[nodes.n1]", "[nodes.n1]\nspeed = 0.0", "nodes.n1.speed: expected more than 0"),
        ("[nodes.n1]", "[nodes.n1]\nspeed = 0.5", "an emulated one computes on is as fast as it"),
        ('world = "emulated"', 'world = "emulate"', "world: 'emulate' is not one of"),
        ('world = "emulated"', 'world = "emulate"', "did you mean 'emulated'?"),
        ('name = "emulated-4"', "", "name: missing; expected text in quotes"),
        ('name = "emulated-4"', "name = 2026-01-01", "name: expected text in quotes, found a date"),
        ('name = "emulated-4"', 'name = "a\\u0000b"', "name: holds a control character"),
        ('driver = "polatis-scpi"', 'driver = "polatis"', "is not one of"),
        ('driver = "polatis-scpi"', 'driver = "polatis-tl1"', "agg0.url: expected ssh:// or tcp:"),
        ("switch_ms = 25.0", "switch_ms = nan", "emulate.switch_ms: expected a finite number"),
        ("switch_ms = 25.0", "switch_ms = 1e13", "emulate.switch_ms: expected 1e+12 at most"),
        ("switch_ms = 25.0", "switch_ms = -1.0", "emulate.switch_ms: expected 0 or more"),
        (
            "switch_ms = 25.0",
            "stuck_ports = [33]",
            "emulate.stuck_ports: port 33 is not one of 1-32",
        ),
        ("switch_ms = 25.0", "swapped_ports = [[1, 17]]", "expected pairs of egress ports, 17-32"),
        ("switch_ms = 25.0", "swapped_ports = [[17]]", "expected pairs of egress ports, 17-32"),
        ("switch_ms = 25.0", "swapped_ports = [[17, 17]]", "swapped_ports: names a port twice"),
        ("switch_ms = 25.0", "reboot_on_command = -1", "reboot_on_command: expected 0 (never) or"),
        ('"agg0:2"', '"agg0:1"', "port 1 of agg0 is taken by the cable of 'tor0:u1'"),
        ('"agg0:2"', '"agg0:2/17"', "port 17 of agg0 is taken by the cable of 'tor0:u1'"),
        ('"agg0:2"', '"agg0:20/17"', "agg0 has ingress ports 1-16, not 20"),
        ('"agg0:2"', '"agg0:2/2"', "ingress and egress are the same port 2"),
        ('"agg0:2"', '"agg0:9"', "port 9 of agg0 is not ours; move the cable, or add the port"),
        ('"agg0:2"', '"agg9:2"', "no switch 'agg9'; did you mean 'agg"),
        ('"agg0:2"', '"agg0-2"', "the right side is a switch and its ingress port"),
        ('"tor1:u1"', '"tor9:u1"', "no ToR 'tor9'; did you mean 'tor"),
        ('"tor1:u1"', '"tor1:u3"', "tor1 has no uplink u3 (tors.tor1.uplinks = 2)"),
        ('"tor1:u1"', '"tor1:1"', "the left side is a ToR and its uplink"),
        ('"tor1:u1"', '"tor0:u01"', "the same uplink as 'tor0:u1'; an uplink takes one cable"),
        ('ports = "1-4,17-20"', 'ports = "1-4,17-60"', "port 60 is beyond the emulated unit"),
        ('ports = "1-4,17-20"', 'ports = "4-1"', "ports count from 1 to 65535 and ranges go"),
        ('ports = "1-4,17-20"', 'ports = "1-4,3-20"', "port 3 is listed twice"),
        ('ports = "1-4,17-20"', 'ports = "1..4"', "'1..4' is not a port or a range"),
        ('ports = "1-4,17-20"', 'ports = "1-4000000000"', "is not a port or a range"),
        ("[nodes.n1]", "[nodes.n0]", "line 13, column 10: not TOML: Cannot declare"),
        ("[nodes.n1]", "[nodes.tor2]", "nodes.tor2: tors.tor2 has the same name"),
        ("[nodes.n1]", '[nodes."n 1"]', 'nodes."n 1": a name is up to 32 letters'),
        ("[tors.tor1]", "[tors.tor-1]", "tors.tor-1: a ToR's name is up to 32 letters"),
        ('launcher = "namespaces"', 'launcher = "manual"', "does not go with world"),
        ('world = "emulated"', 'world = "live"', 'launcher: "namespaces" does not go with'),
        ("baud=38400", "baud=fast", "agg0.url: baud: expected a whole number"),
        ("baud=38400", "bauds=38400", "agg0.url: only ?baud= of a serial:// line"),
        ('tor = "tor1"', 'tor = "tor1"\naddress = "1.2.3.4"', "makes its addresses; leave it out"),
    ],
)
def test_a_problem_is_named_with_its_key_and_what_would_be_right(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in "\n".join(problems(tmp_path, changed(TEXT, old, new)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('host = "gpu0"\n', "", "nodes.n0.host: missing"),
        ('interface = "ens1"\n', "", "nodes.n0.interface: missing"),
        ('address = "10.1.0.10"\n', "", "nodes.n0.address: missing"),
        ('"10.1.0.10"', '"10.1.0"', "nodes.n0.address: expected an IP address"),
        ('"10.1.1.10"', '"10.1.0.10"', "nodes.n1.address: nodes.n0 has the same address"),
        ('listen = "10.0.0.1:7000"\n', "", "listen: missing"),
        ('"10.0.0.1:7000"', '"10.0.0.1"', "listen: expected HOST:PORT"),
        ('"10.0.0.1:7000"', '"0.0.0.0:7000"', "listen: name the address"),
        ('keys = "keys"\n', "", "keys: missing"),
        ('known_hosts = "known_hosts"\n', "", "switches.ocs.known_hosts: missing"),
        ('known_hosts = "known', 'known_hosts = "~root/known', "only your own home folder"),
        ('"OCS_PASSWORD"', '"hunter two"', "password_env: expected the name of an environment"),
        ('"ocs:1/17"', '"ocs:1"', "a live bench names both ports, ingress and egress"),
        ("ssh://admin@10.0.0.5:6252", "ssh://10.0.0.5", "url: names no user"),
        ("ssh://admin@10.0.0.5:6252", "ssh://admin@", "url: names no host"),
        ("ssh://admin@10.0.0.5:6252", "tcp://10.0.0.5", "url: names no port"),
        ("ssh://admin@10.0.0.5:6252", "ssh://admin@[::1", "url: malformed"),
        ("ssh://admin@10.0.0.5:6252", "ssh://admin@10.0.0.5/tl1", "more than a host and a port"),
        ("ssh://admin@10.0.0.5:6252", "10.0.0.5", "url: expected ssh:// or tcp://"),
    ],
)
def test_a_live_bench_says_where_things_are(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in "\n".join(problems(tmp_path, changed(LIVE, old, new)))


@pytest.mark.parametrize(
    "url",
    [
        "ssh://admin:hunter2@10.0.0.5:6252",
        "ssh://admin:hun/hunter2@10.0.0.5",
        "ssh://admin:hunter2@[10.0.0.5",
        "ssh://admin@10.0.0.5:hunter2",
        "hunter2://admin@10.0.0.5",
        "ssh://admin@10.0.0.5?password=hunter2",
        "ssh://admin@10.0.0.5#hunter2",
    ],
)
def test_a_password_in_a_url_is_refused_and_never_told(tmp_path: Path, url: str) -> None:
    found = problems(tmp_path, changed(LIVE, "ssh://admin@10.0.0.5:6252", url))
    assert "hunter2" not in "\n".join(found)


def test_a_password_in_the_file_is_refused_and_never_told(tmp_path: Path) -> None:
    text = changed(LIVE, "password_env = ", 'password = "hunter2"\npassword_env = ')
    found = problems(tmp_path, text)
    assert "hunter2" not in "".join(found)
    assert found[0].startswith("switches.ocs.password: a secret does not belong in this file")


def test_a_misspelt_key_that_is_needed_is_told_once(tmp_path: Path) -> None:
    found = problems(tmp_path, changed(LIVE, "listen =", "listten ="))
    assert found == ["listten: unknown key; did you mean 'listen'?"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "x"\n# caf\xe9\n')
    for path, said in (
        (tmp_path / "none.toml", "no such file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "latin.toml", "line 2: not UTF-8 text"),
    ):
        with pytest.raises(BadFile, match=said):
            load_bench(path)


def test_syntax_errors_have_line_and_column(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, 'name = "x"\nworld = emulated\n')
    assert found == "line 2, column 9: not TOML: Invalid value"
    (found,) = problems(tmp_path, "a = " + "[" * 5000)
    assert found.startswith("not TOML")


# -- whatever the file, a bench or a BadFile -------------------------------------------------------

SCRAPS = st.one_of(
    st.sampled_from(["[", "]", '"', "=", "\n", ".", "-", "9", "nan", "[[", "#", "''", "{}"]),
    st.text(alphabet=string.printable, max_size=4),
)
EDITS = st.lists(
    st.tuples(st.integers(0, len(TEXT)), st.integers(0, 12), SCRAPS), min_size=1, max_size=6
)


def good_or_bad(path: Path) -> None:
    """Either refused as a whole, or good enough for everything built on it."""
    with contextlib.suppress(BadFile):
        topology_of(load_bench(path))


@settings(max_examples=150)
@given(edits=EDITS)
def test_no_edit_of_the_text_gives_a_traceback(tmp_path: Path, edits: list[Any]) -> None:
    text = TEXT
    for place, cut, scrap in edits:
        text = text[:place] + scrap + text[place + cut :]
    path = tmp_path / "edited.toml"
    path.write_text(text)
    good_or_bad(path)


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.dates(),
    st.text(max_size=20),
    st.sampled_from(
        [
            "live",
            "simulated",
            "local",
            "ssh://a:b@c",
            "tcp://h:1",
            "1-16,17-32",
            "tor0",
            "agg0:7/23",
        ]
    ),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=2),
)


def tables(value: Any) -> list[dict[str, Any]]:
    """All tables of a file, the outermost first."""
    found = [value]
    for item in value.values():
        if isinstance(item, dict):
            found += tables(item)
    return found


@settings(max_examples=200)
@given(data=st.data())
def test_no_wrong_value_gives_a_traceback(data: st.DataObject) -> None:
    whole = copy.deepcopy(tomllib.loads(TEXT))
    for _ in range(data.draw(st.integers(1, 4))):
        table = data.draw(st.sampled_from(tables(whole)))
        key = data.draw(st.sampled_from(sorted(table)) if table else st.text(max_size=8))
        value = table.pop(key, 0)
        match data.draw(st.sampled_from(["drop", "rename", "replace"])):
            case "rename":
                table[data.draw(st.sampled_from([key + "s", key[1:], "x:u1", "password"]))] = value
            case "replace":
                table[key] = data.draw(VALUES)
    bench, told = examine(whole, Bench)
    if bench is None:
        assert told
    elif not [*told, *bench_problems(bench)]:
        topology_of(bench)
