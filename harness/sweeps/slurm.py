"""Points made by Slurm: an array job whose tasks are shards, and one that tells what came of all.

``slurm://PARTITION?tasks=32&cpus=2&time=04:00:00`` names the partition and what tasks get. Tasks
run the same command on the same shared folder, each with ``--shard I/N``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from harness.errors import InfrastructureError, UsageError
from harness.model.schema import did_you_mean

SUBMIT_LIMIT_S = 60.0
TASKS_MAX = 1000
_WHOLE = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_TIME = re.compile(r"(\d{1,3}-)?\d{1,3}(:\d{2}){0,2}", re.ASCII)
_NAME = re.compile(r"[\w.-]+", re.ASCII)
OPTIONS = {"tasks": _WHOLE, "cpus": _WHOLE, "time": _TIME, "account": _NAME, "qos": _NAME}


@dataclass(frozen=True)
class Array:
    """What is asked of Slurm. `cpus` of each task; "" leaves a choice to the cluster."""

    partition: str
    tasks: int = 8
    cpus: int = 1
    time: str = ""
    account: str = ""
    qos: str = ""

    @classmethod
    def parse(cls, url: str) -> Array:
        """Read ``slurm://PARTITION?tasks=N&cpus=N&time=T&account=A&qos=Q``.

        Raises `UsageError`.
        """
        parts = urlsplit(url)
        if not _NAME.fullmatch(parts.netloc) or parts.path or parts.fragment:
            raise UsageError(f"--on {url}: expected slurm://PARTITION, such as slurm://cpu?tasks=8")
        given: dict[str, str] = {}
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key not in OPTIONS:
                raise UsageError(f"--on {url}: no option {key!r}{did_you_mean(key, OPTIONS)}")
            if not OPTIONS[key].fullmatch(value):
                raise UsageError(f"--on {url}: {key}={value} is no value of it")
            given[key] = value
        tasks, cpus = int(given.pop("tasks", 8)), int(given.pop("cpus", 1))
        if tasks > TASKS_MAX:
            raise UsageError(f"--on {url}: tasks={tasks}: expected {TASKS_MAX} at most")
        return cls(parts.netloc, tasks, cpus, **given)


def script(array: Array, folder: Path, command: Sequence[str], memory_gb: float) -> str:
    """Return the batch script. `command` is run by each task, with its shard behind it.

    With ``finish`` as its argument it is run without a shard, and so makes what is still missing
    and tells all.
    """
    chosen = {
        "partition": array.partition,
        "cpus-per-task": str(array.cpus),
        "mem": f"{round(memory_gb * 1000 * array.cpus)}M",
        "time": array.time,
        "account": array.account,
        "qos": array.qos,
        "output": str(folder / "slurm-%j.log"),
    }
    lines = ["#!/bin/sh", "#SBATCH --job-name=harness-sweep"]
    lines += [f"#SBATCH --{key}={value}" for key, value in chosen.items() if value]
    run = shlex.join([*command, "--jobs", str(array.cpus)])
    shard = f'--shard "$SLURM_ARRAY_TASK_ID/{array.tasks}"'
    lines += [
        "",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 3",
        'if [ "$1" = finish ]; then',
        f"  exec {run}",
        "fi",
        f"exec {run} {shard}",
    ]
    return "\n".join(lines) + "\n"


def submit(array: Array, folder: Path, command: Sequence[str], memory_gb: float) -> tuple[str, str]:
    """Write the script into the folder and submit it; return the ids of the array and its finish.

    Raises `InfrastructureError` where Slurm is not here, or refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "sweep.sbatch"
        path.write_text(script(array, folder, command, memory_gb))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    job = _sbatch([f"--array=1-{array.tasks}", str(path)])
    finish = _sbatch([f"--dependency=afterany:{job}", str(path), "finish"])
    return job, finish


def _sbatch(arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            capture_output=True,
            text=True,
            timeout=SUBMIT_LIMIT_S,
            check=True,
        )
    except FileNotFoundError as error:
        raise InfrastructureError("sbatch: not on this machine; submit where Slurm is") from error
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"sbatch: no answer within {SUBMIT_LIMIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise InfrastructureError(f"sbatch: {error.stderr.strip() or 'refused'}") from error
    return done.stdout.strip().partition(";")[0]
