"""`harness doctor` tries what it tells of, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivers.emulators.light.abilities import Abilities
from harness.bench.pressure import waited_us
from harness.cli import main
from harness.cli.doctor import best_light


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["doctor", "--json"]) == 0
    return {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_machine_without_the_tools_is_told_which_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool, path=None: None if tool == "socat" else tool)
    assert findings(capsys)["tools"]["found"] == "missing: socat"


@pytest.mark.root
def test_as_root_emulated_circuits_move_packets(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys)
    assert found["namespaces"]["ok"]
    assert found["light"]["ok"]
    assert "ebpf" in str(found["light"]["found"]).lower() or not found["ebpf"]["ok"]


def test_the_serial_line_that_it_tried_was_real(capsys: pytest.CaptureFixture[str]) -> None:
    name = Path(str(findings(capsys)["pty"]["found"]))
    assert name.is_relative_to("/dev")


def test_it_says_whether_an_emulated_run_can_tell_times_of_the_machine_from_the_benchs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(capsys)["cpu waits"]["ok"] == (waited_us() is not None)
    monkeypatch.setattr("harness.cli.doctor.waited_us", lambda: None)
    unknown = findings(capsys)["cpu waits"]
    assert not unknown["ok"]
    assert "cannot say" in str(unknown["found"])


@pytest.mark.parametrize(
    ("refusals", "ok", "said"),
    [
        ({}, True, "by eBPF"),
        ({"ebpf": "old kernel"}, True, "by tc u32"),
        ({"ebpf": "no", "mirred": "no"}, True, "in a user namespace, which a run makes"),
        ({"ebpf": "no", "mirred": "no", "user_namespaces": "no"}, False, "control plane only"),
    ],
)
def test_the_light_it_tells_of_is_the_one_that_a_run_would_use(
    refusals: dict[str, str], ok: bool, said: str
) -> None:
    works = dict.fromkeys(("namespaces", "ebpf", "mirred", "user_namespaces"), "")
    light = best_light(Abilities(**works | refusals, lateness_p99_ns=0, smallest_dark_ns=0))
    assert light.ok == ok
    assert said in light.found
