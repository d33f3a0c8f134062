"""What a person meets at the prompt: help that works as pasted, mistakes told in one message."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from drivers.errors import BadMatching, DeviceFault, DriverError, NoLight, Unreachable
from harness.cli import cli, failures, main
from harness.errors import (
    AgentsMissing,
    BadFile,
    ExitCode,
    Interrupted,
    NothingRan,
    RestoreFailed,
    StepFailed,
)

REPOSITORY = Path(__file__).parents[2]


def commands(group: click.Group, name: str = "harness") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        yield f"{name} {word}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")


ALL = dict(commands(cli))


def examples(command: click.Command) -> list[list[str]]:
    lines = (line.strip() for line in (command.help or "").splitlines())
    shown = (line.partition(" > ")[0] for line in lines if line.startswith("harness "))
    return [shlex.split(line, comments=True) for line in shown]


@pytest.mark.parametrize("name", ALL)
def test_the_example_in_each_help_text_parses_as_pasted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split()[1:], "--help"]) == 0
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in shown if "\\b" in line]
    help_lines = (line.strip() for line in (ALL[name].help or "").splitlines())
    for example in (line for line in help_lines if line.startswith("harness ")):
        assert example in shown, "not on a line of its own"
    found = examples(ALL[name])
    assert found, f"{name} --help shows no example"
    for words in found:
        command: click.Command | None = cli
        rest = words[1:]
        while isinstance(command, click.Group):
            word = rest.pop(0)
            command = command.get_command(click.Context(command), word)
            assert command is not None, f"{name}: {' '.join(words)}: no command {word!r}"
        assert command is not None
        command.make_context(command.name, rest)


@pytest.mark.parametrize("name", [n for n, c in ALL.items() if not isinstance(c, click.Group)])
def test_every_command_can_answer_in_json(name: str) -> None:
    assert "--json" in {option for parameter in ALL[name].params for option in parameter.opts}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadFile("lab.toml", ["nodes.n0.tor: no such ToR"]), 2),
        (BadMatching("ingress ports used twice: 3"), 2),
        (Unreachable("ssh://10.0.0.5: refused"), 3),
        (NoLight({17: -60.0}), 3),
        (AgentsMissing("n2 did not report within 60 s"), 3),
        (StepFailed("all_reduce: 3 wrong elements"), 1),
        (NothingRan("no step was performed"), 7),
        (Interrupted("stopped by Ctrl-C"), 4),
        (KeyboardInterrupt(), 4),
        (click.Abort(), 4),
        (RestoreFailed("agg0: 1->17 missing"), 5),
        (click.BadParameter("no"), 2),
        (ZeroDivisionError("ours"), 70),
        (DriverError("never raised itself"), 70),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures.tell(error) == code
    said = capsys.readouterr().err
    assert ("Traceback" in said or "bug of ours" in said) == (code == 70)
    assert str(error) in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE])
def test_what_the_machine_lacks_is_no_bug_of_ours(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number), "runs/r1/logs/n0.log")
    assert failures.tell(error) == ExitCode.INFRASTRUCTURE
    assert capsys.readouterr().err == f"harness: runs/r1/logs/n0.log: {os.strerror(number)}\n"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which ``$harness`` is the command, for what only a shell can do."""
    env = os.environ | {"harness": f"{sys.executable} -m harness", "python": sys.executable}
    argv = ["sh", "-c", line]
    return subprocess.run(
        argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False, timeout=30
    )


def test_a_full_output_is_the_machines_fault_and_a_closed_one_nobodys() -> None:
    full = shell("$harness check scenarios/quickstart.toml > /dev/full")
    assert full.returncode == ExitCode.INFRASTRUCTURE
    assert full.stderr == "harness: No space left on device\n"
    closed = shell("$harness check scenarios/quickstart.toml <&- >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    assert shell("$harness check nowhere.toml >&- 2>&-").returncode == ExitCode.USAGE


@pytest.mark.parametrize("output", ["> /dev/full", "| true"])
def test_what_is_kept_elsewhere_may_be_told_to_nobody(output: str, tmp_path: Path) -> None:
    program = tmp_path / "tell.py"
    program.write_text(
        "from harness.cli.output import best_effort\nwith best_effort():\n    print('x' * 2**17)\n"
    )
    rc = tmp_path / "rc"
    told = shell(f"{{ PYTHONPATH=. $python {program}; echo $? > {rc}; }} {output}")
    assert (rc.read_text(), told.stderr) == ("0\n", "")


def test_of_several_failures_each_is_told_and_the_worst_decides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = ExceptionGroup(
        "two switches",
        [Unreachable("agg0: refused"), ExceptionGroup("", [RestoreFailed("agg1: 1->17 missing")])],
    )
    assert failures.tell(group) == ExitCode.RESTORE_FAILED
    assert capsys.readouterr().err == "harness: agg0: refused\nharness: agg1: 1->17 missing\n"


def test_every_exit_code_has_its_place_in_the_order_of_severity() -> None:
    assert set(failures.WORST_FIRST) == set(ExitCode)


def test_a_device_s_own_words_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    failures.tell(DeviceFault("said [bold]M 1 DENY[/] {x} %s"))
    assert capsys.readouterr().err == "harness: said [bold]M 1 DENY[/] {x} %s\n"


@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_missing_scenario_is_named_and_ends_with_2(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(tmp_path / "nowhere.toml")]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "nowhere.toml" in said
    assert "Traceback" not in said


def test_a_typo_in_a_key_is_named_with_its_path_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "typo.toml"
    path.write_text('question = "?"\n[[steps]]\ndo = "reconfigure"\nshapes = ["a"]\ncuont = 3\n')
    assert main(["check", str(path)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "typo.toml" in said
    assert "cuont" in said
    assert "Traceback" not in said


def test_an_unknown_command_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == ExitCode.USAGE
    assert "fly" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_told_with_the_ones_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / "journal.jsonl").touch()
    assert main(["report", "r2", "--runs", str(tmp_path)]) == ExitCode.USAGE
    assert "the latest are r1" in capsys.readouterr().err


def test_keys_are_secret_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", "make", str(folder), "--agents", "n0,n1"]) == 0
    secret = (folder / "n0.key").read_text()
    assert (folder / "n0.key").stat().st_mode & 0o777 == 0o600
    assert main(["keys", "make", str(folder), "--agents", "n0"]) == ExitCode.USAGE
    assert (folder / "n0.key").read_text() == secret
    printed = capsys.readouterr()
    assert secret.strip() not in printed.out + printed.err


@pytest.mark.parametrize("agents", ["", ",", "n0,n0", "coordinator"])
def test_agents_that_cannot_be_told_apart_get_no_keys(agents: str, tmp_path: Path) -> None:
    assert main(["keys", "make", str(tmp_path / "k"), "--agents", agents]) == ExitCode.USAGE
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize("agents", ["../n0", "n0,a/b", "n 0"])
def test_a_name_that_is_no_file_name_leaves_no_keys_of_the_others(
    agents: str, tmp_path: Path
) -> None:
    assert main(["keys", "make", str(tmp_path / "k"), "--agents", agents]) == ExitCode.USAGE
    assert not (tmp_path / "k").exists()


def test_a_folder_for_keys_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "keys"
    assert main(["keys", "make", str(folder), "--agents", "n0"]) == ExitCode.USAGE
    assert f"{folder}/coordinator.key cannot be written: Not a directory" in capsys.readouterr().err


def test_another_engine_needs_a_scenario_that_generates(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(REPOSITORY / "scenarios/quickstart.toml")
    assert main(["check", quickstart, "--engine", "vllm"]) == ExitCode.USAGE
    assert "quickstart.toml has no table [generation]" in capsys.readouterr().err
    assert main(["check", quickstart, "--engine", "sglang"]) == ExitCode.USAGE
    switch = str(REPOSITORY / "scenarios/parallelism-switch.toml")
    assert main(["check", switch, "--engine", "vllm"]) == ExitCode.PASSED
    assert "generate  by vLLM" in capsys.readouterr().out
