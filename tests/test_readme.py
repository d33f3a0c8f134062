"""The README's first command really runs, on this machine, now.

In a plain clone that includes the installation. Under pytest there is an environment already, and
`HARNESS_VENV` tells `.ci/setup` to use it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def first_command() -> str:
    block = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
    assert block, "the README shows no command"
    return block[1].strip()


@pytest.mark.emulated
@pytest.mark.root
@pytest.mark.timeout(300)
def test_the_first_command_of_the_readme_times_real_reconfigurations(tmp_path: Path) -> None:
    environment = os.environ | {"HARNESS_VENV": sys.prefix, "HARNESS_RUNS": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", first_command()],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert str(tmp_path) in done.stdout, "the run folder is not named at the end"
    summary = json.loads((tmp_path / "latest" / "run.json").read_text())
    assert summary["status"] == "passed"
    assert summary["metrics"]["reconfigure.dark_ms"]["n"] > 0
    assert set(summary["restored"].values()) <= {"restored", "unchanged"}


def test_every_file_that_the_readme_names_is_there() -> None:
    named = set(re.findall(r"(?:scenarios|tests|\.ci|drivers)/[\w./-]*\w", README))
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"README.md names {', '.join(missing)}"
