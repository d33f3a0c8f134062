"""ToRs over SSH beside ToRs in a namespace: steered together, and what a bad one leads to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated import test_run_live as live
from tests.emulated.lab import Lab, lab
from tests.emulated.tor_bench import FAR, PASSWORD, kernel_routes, namespace, ours_in_kernel, served

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

UNDER_TRAFFIC = """
question = "Where does traffic go when a ToR is not steered onto new circuits?"
bench = "bench.toml"
timeout_s = 60.0
[shapes.straight]
circuits = ["left:u1-right:u1@ocs", "left:u2-right:u2@ocs"]
[[steps]]
do = "reconfigure"
shapes = ["straight"]
count = 1
size = "64KiB"
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as bench:
        bench.files()
        yield bench


def over_ssh(made: Lab, faults: str = "", exchange_timeout_s: float = 2.0) -> None:
    """Have ``left`` steered over SSH; ``right`` stays a namespace."""
    path = made.folder / "bench.toml"
    old = '[tors.left]\nuplinks = 2\ndriver = "netlink"\n'
    new = f'[tors.left]\ndriver = "linux-ssh"\nexchange_timeout_s = {exchange_timeout_s}\n'
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, f"{new}[tors.left.emulate]\n{faults}\n"))


def unsteered(made: Lab) -> dict[str, bool]:
    found = (made.run_folder / "snapshots").glob("*.steered.json")
    read = (json.loads(path.read_text()) for path in found)
    return {steered["tor"]: steered["restored"] for steered in read}


def test_a_tor_over_ssh_is_steered_with_one_in_a_namespace(made: Lab) -> None:
    over_ssh(made, "answer_ms = 20.0")
    code, out = made.run()
    assert code == 0, out
    rows = made.events("reconfigure")
    assert [(row["path_to"], row["moved"], row["error"]) for row in rows] == [
        ("crossed", 2, ""),
        ("straight", 2, ""),
    ]
    stages = [row["stages"] for row in rows]
    assert all(s["steered_away"] - s["quiesced"] > 20e6 for s in stages), "its answer is awaited"
    assert all(s["steered"] > s["path_verified"] for s in stages)
    assert unsteered(made) == {"left": True, "right": True}


def test_a_lost_answer_of_a_tor_is_resolved_by_reading(made: Lab) -> None:
    over_ssh(made, "lose_reply = 2", exchange_timeout_s=0.5)
    code, out = made.run()
    assert code == 0, out
    stages = made.events("reconfigure")[0]["stages"]
    assert stages["steered_away"] - stages["quiesced"] > 0.5e9, "no answer was lost"


def test_a_tor_that_refuses_sends_its_own_electrically_and_is_named(made: Lab) -> None:
    over_ssh(made, 'deny_devices = ["u1", "u2"]')
    (made.folder / "scenario.toml").write_text(UNDER_TRAFFIC)
    code, out = made.run()
    assert code == 3, out
    (row,) = made.events("reconfigure")
    assert "ToR left" in row["error"]
    assert "Operation not permitted" in row["error"]
    assert "right" not in row["error"]
    assert row["stages"]["first_good"], "traffic went on"
    assert unsteered(made) == {"left": True, "right": True}


def test_a_tor_that_dies_in_a_change_is_named_with_what_is_not_known(made: Lab) -> None:
    over_ssh(made, "die_on_apply = 1")
    (made.folder / "scenario.toml").write_text(UNDER_TRAFFIC)
    code, out = made.run()
    assert code == 5, out
    (row,) = made.events("reconfigure")
    assert "ToR left" in row["error"]
    assert "its routes are not known" in row["error"]
    assert row["stages"]["first_good"], "traffic went on over what the ToR has"
    assert made.snapshots() == {"ocs": True}
    assert unsteered(made) == {"left": False, "right": True}


def test_a_tor_that_does_not_answer_is_told_before_anyone_waits(made: Lab) -> None:
    over_ssh(made, "answer_ms = 60000.0", exchange_timeout_s=0.3)
    code, out = made.run()
    assert code == 3, out
    assert "left (ssh://admin@127.0.0.1:" in out
    assert not made.events("agent")


# -- live ------------------------------------------------------------------------------------------

STEERED = """
[tors.left]
uplinks = 1
driver = "linux-ssh"
url = "{url}"
known_hosts = "known_tor"
password_env = "TOR_PASSWORD"
prefix = "127.0.0.2/32"
ports = {{ u1 = {{ interface = "u2", address = "198.18.128.2" }} }}
[tors.right]
uplinks = 1
prefix = "127.0.0.3/32"
ports = {{ u1 = {{ address = "{far}" }} }}
"""
LONG = """
question = "What stays when the coordinator is killed?"
bench = "bench.toml"
[shapes.pair]
template = "pairs"
[[steps]]
do = "shape"
shape = "pair"
[[steps]]
do = "collectives"
sizes = ["64KiB"]
iterations = {iterations}
"""


def test_a_killed_live_run_leaves_routes_that_recovery_takes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOR_PASSWORD", PASSWORD)
    (tmp_path / "tor").mkdir()
    with (
        lab(tmp_path) as rack,
        live.unit(tmp_path) as ocs,
        namespace() as netns,
        served(tmp_path / "tor", netns) as tor,
    ):
        (tmp_path / "known").write_text(ocs.host_keys[0] + "\n")
        (tmp_path / "known_tor").write_text((tmp_path / "tor/known_hosts").read_text())
        live.bench_file(rack, ocs.urls[0], "known")
        path, stated = tmp_path / "bench.toml", STEERED.format(url=tor.url, far=FAR)
        text = path.read_text()
        tors = text[text.index("[tors.left]") : text.index("[switches.ocs]")]
        path.write_text(text.replace(tors, stated))
        (tmp_path / "scenario.toml").write_text(LONG.format(iterations=1_000_000))
        process = rack.start()
        rack.await_event(process, "shape")
        process.kill()
        process.communicate()
        assert ours_in_kernel(netns) == {"127.0.0.3/32"}
        assert {r["dev"] for r in kernel_routes(netns) if r.get("gateway") == FAR} == {"u2"}

        killed = os.readlink(rack.run_folder)
        (tmp_path / "scenario.toml").write_text(LONG.format(iterations=2))
        code, out = rack.run()
        assert code == 3, out
        assert f"harness recover {rack.runs / killed}" in out
        code, out = rack.harness("recover", str(rack.runs / killed))
        assert code == 0, out
        assert f"left: restored: drop 127.0.0.3/32 via {FAR} dev u2" in out
        assert not ours_in_kernel(netns)

        code, out = rack.run()
        assert code == 0, out
        assert not ours_in_kernel(netns)
        assert unsteered(rack) == {"left": True}
        files = [p for p in rack.runs.rglob("*") if p.is_file()]
        assert not any(PASSWORD.encode() in p.read_bytes() for p in files)
