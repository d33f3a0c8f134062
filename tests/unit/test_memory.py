"""Folders in memory: kept as long as their process lives, deleted by whoever comes next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.memory import LOCK, Folder, sweep

HOLDER = """
import sys
from pathlib import Path
from harness.memory import Folder
folder = Folder("kept", Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_its_owners_alone_and_is_deleted_with_all_in_it(tmp_path: Path) -> None:
    folder = Folder("made", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert folder.path == folder.path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "weights").write_bytes(b"w")
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    folder.remove()


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    own = Folder("own", tmp_path)
    names = {own.path.name, "harness-of-somebody"}
    (tmp_path / "harness-of-somebody").mkdir()
    argv = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        (left / "weights").write_bytes(b"w")
        assert sweep(tmp_path) == ()
        assert left.exists()
        holder.kill()
    assert sweep(tmp_path) == (left.name,)
    assert {path.name for path in tmp_path.iterdir()} == names
    own.remove()


def test_whoever_makes_a_folder_sweeps_first(tmp_path: Path) -> None:
    left = tmp_path / "harness-trained-left"
    left.mkdir()
    (left / LOCK).touch()  # of a process that is gone: nobody holds it
    folder = Folder("trained", tmp_path)
    kept = folder.path
    assert not left.exists()
    assert sweep(tmp_path) == ()
    assert kept.exists()
    folder.remove()


def test_without_such_memory_it_lies_on_the_disk(tmp_path: Path) -> None:
    folder = Folder("made", tmp_path / "nowhere")
    assert folder.path.is_dir()
    folder.remove()
