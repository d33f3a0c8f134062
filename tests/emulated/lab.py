"""A small emulated bench in a temporary folder, and `harness` run on it as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 90.0

SCENARIO = """
question = "Does it end well?"
bench = "bench.toml"
timeout_s = {timeout_s}

[shapes.straight]
circuits = ["left:u1-right:u1@ocs", "left:u2-right:u2@ocs"]
[shapes.crossed]
circuits = ["left:u1-right:u2@ocs", "left:u2-right:u1@ocs"]

[[steps]]
do = "shape"
shape = "straight"

[[steps]]
do = "reconfigure"
shapes = ["crossed", "straight"]
count = {count}
size = "64KiB"
rest_ms = {rest_ms}
timeout_s = {step_timeout_s}
"""

BENCH = """
name = "lab"
world = "emulated"
launcher = "namespaces"
max_wait_s = 30.0

[nodes.a]
tor = "left"
[nodes.b]
tor = "right"
[tors.left]
uplinks = 2
driver = "netlink"
[tors.right]
uplinks = 2
driver = "netlink"

[switches.ocs]
driver = "{driver}"
url = "{url}"
ports = "1-4,9-12"
light_timeout_s = 1.0
power_averaging = 1
exchange_timeout_s = 2.0
apply_timeout_s = 5.0
[switches.ocs.emulate]
ports = 8
switch_ms = 10.0
{emulate}

[cables]
"left:u1" = "ocs:1"
"left:u2" = "ocs:2"
"right:u1" = "ocs:3"
"right:u2" = "ocs:4"
"""


@dataclass
class Lab:
    """Files, and the runs made of them."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def run_folder(self) -> Path:
        return self.runs / "latest"

    def files(
        self,
        *,
        driver: str = "polatis-scpi",
        url: str = "tcp://",
        emulate: str = "",
        count: int = 2,
        rest_ms: float = 50.0,
        timeout_s: float = 60.0,
        step_timeout_s: float = 20.0,
    ) -> None:
        bench = BENCH.format(driver=driver, url=url, emulate=emulate)
        (self.folder / "bench.toml").write_text(bench)
        scenario = SCENARIO.format(
            count=count, rest_ms=rest_ms, timeout_s=timeout_s, step_timeout_s=step_timeout_s
        )
        (self.folder / "scenario.toml").write_text(scenario)

    def start(self, *options: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "harness", "run", "scenario.toml", "--runs", str(self.runs)]
        argv += options
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
        out, _ = process.communicate(timeout=limit_s)
        return process.returncode, out

    def run(self, *options: str, limit_s: float = LIMIT_S) -> tuple[int, str]:
        return self.finish(self.start(*options), limit_s)

    def harness(self, *arguments: str, limit_s: float = LIMIT_S) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "harness", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def events(self, stream: str) -> list[dict[str, Any]]:
        try:
            lines = (self.run_folder / "journal.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        documents = [json.loads(line) for line in lines if line.endswith(b"}")]
        return [
            document["data"]
            for document in documents
            if document["doc"] == "event" and document["stream"] == stream
        ]

    def await_event(
        self,
        process: subprocess.Popen[str],
        stream: str,
        wanted: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for event in self.events(stream):
                if wanted(event):
                    return event
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        raise AssertionError(f"no such event in {stream} within {LIMIT_S} s")

    def pid_of_rank(self, process: subprocess.Popen[str], rank: int) -> int:
        word = f"rank {rank} (pid "
        note = self.await_event(process, "note", lambda note: word in note["text"])
        return int(note["text"].split(word)[1].split(")")[0])

    def pid_of_agent(self, process: subprocess.Popen[str], agent: str) -> int:
        event = self.await_event(process, "agent", lambda event: event["agent"] == agent)
        return int(event["pid"])

    def await_traffic(self, process: subprocess.Popen[str]) -> None:
        self.await_event(process, "reconfigure")

    def snapshots(self) -> dict[str, bool]:
        found = (self.run_folder / "snapshots").glob("*.snapshot.json")
        read = (json.loads(path.read_text()) for path in found)
        return {snapshot["switch"]: snapshot["restored"] for snapshot in read}


@contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """Yield a lab; whatever it still runs is ended in order, so that nothing stays behind."""
    made = Lab(folder)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.communicate(timeout=LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
