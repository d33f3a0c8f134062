"""Keys in files: private stays private, and every refusal says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.wire import keys


def test_a_bench_folder_holds_what_both_sides_need(tmp_path: Path) -> None:
    keys.make_folder(tmp_path / "k", ["n0", "n1"])
    allowed = keys.allow_list(tmp_path / "k", ["n0", "n1"])
    assert allowed["n1"] == keys.load(tmp_path / "k", "n1").public
    own = keys.load(tmp_path / "k", keys.COORDINATOR)
    assert own.public == keys.load_public(tmp_path / "k" / "coordinator.pub")
    assert (tmp_path / "k" / "n0.key").stat().st_mode & 0o777 == 0o600


def test_the_secret_does_not_show_in_a_traceback() -> None:
    pair = keys.make_pair("n0")
    assert pair.secret not in repr(pair)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    keys.save(tmp_path, keys.make_pair("n0"))
    (tmp_path / "n0.key").chmod(mode)
    with pytest.raises(UsageError, match=rf"n0\.key can be read by others \(mode {mode:04o}\)"):
        keys.load(tmp_path, "n0")


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    first = keys.make_pair("n0")
    keys.save(tmp_path, first)
    with pytest.raises(UsageError, match=r"n0\.key exists"):
        keys.save(tmp_path, keys.make_pair("n0"))
    assert keys.load(tmp_path, "n0") == first


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"n7\.key is missing: make it with `harness keys`"):
        keys.load(tmp_path, "n7")
    (tmp_path / "n8.pub").write_text("ssh-ed25519 AAAA\n")
    with pytest.raises(UsageError, match=r"n8\.pub does not hold a key"):
        keys.load_public(tmp_path / "n8.pub")


def test_one_key_cannot_serve_two_names(tmp_path: Path) -> None:
    keys.make_folder(tmp_path, ["n0", "n1"])
    (tmp_path / "n1.pub").write_bytes((tmp_path / "n0.pub").read_bytes())
    with pytest.raises(UsageError, match=r"n0\.pub and n1\.pub hold the same key"):
        keys.allow_list(tmp_path, ["n0", "n1"])


@pytest.mark.parametrize("name", ["", "../n0", "a b", "-x", "n" * 64])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="key name"):
        keys.make_pair(name)
