"""A coordinator killed in the middle of writing leaves every event that it had told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.model.documents import Event
from harness.record.journal import is_closed, read_journal

pytestmark = pytest.mark.emulated

WRITER = """
import sys
from pathlib import Path
from harness.clock import RealClock
from harness.model.streams import STREAMS
from harness.record.journal import Journal

journal = Journal.create(Path(sys.argv[1]), RealClock())
journal.describe("note", STREAMS["note"])
for i in range(1_000_000):
    journal.event("note", {"level": "info", "who": "writer", "text": f"{i} " + "x" * 5000})
    print(i, flush=True)
"""


def test_what_was_told_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        for line in writer.stdout:
            if int(line) == 200:
                writer.kill()
                break
        told = int((writer.stdout.readlines() or [line])[-1])
    reader = read_journal(path)
    found = [document for document in reader if isinstance(document, Event)]
    assert len(found) >= told + 1
    assert [event.seq for event in found] == list(range(1, len(found) + 1))
    assert reader.torn <= 1
    assert not is_closed(path)
