"""Files of weights: what is written is read again, by the format's own library too."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from agents.weights_file import Tensor, read_header, tensors, write
from harness.errors import BadFile

ODD = np.arange(15, dtype=np.float32).reshape(3, 5)


def two(path: Path) -> tuple[int, int]:
    return write(
        path,
        [Tensor("b", "F32", (3, 5), ODD), Tensor("a", "BF16", (3,), b"\1\2\3\4\5\6")],
    )


def test_what_is_written_is_read_again_in_order(tmp_path: Path) -> None:
    size, crc = two(tmp_path / "w")
    whole = (tmp_path / "w").read_bytes()
    assert (len(whole), zlib.crc32(whole)) == (size, crc)
    assert [(name, bytes(data)) for name, data in tensors(tmp_path / "w")] == [
        ("b", ODD.tobytes()),
        ("a", b"\1\2\3\4\5\6"),
    ]
    assert read_header(tmp_path / "w").entries["b"].shape == (3, 5)
    assert list(tmp_path.iterdir()) == [tmp_path / "w"], "nothing unfinished stays"


def test_the_formats_own_library_reads_ours_and_we_read_its_files(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    write(tmp_path / "ours", [Tensor("b", "F32", (3, 5), ODD), Tensor("a", "U8", (2,), b"12")])
    assert np.array_equal(numpy.load_file(tmp_path / "ours")["b"], ODD)
    numpy.save_file({"x": ODD, "y": np.ones(7, np.int64)}, tmp_path / "theirs", {"format": "pt"})
    found = {name: bytes(data) for name, data in tensors(tmp_path / "theirs")}
    assert found == {"x": ODD.tobytes(), "y": np.ones(7, np.int64).tobytes()}


@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    two(tmp_path / "w")
    (tmp_path / "cut").write_bytes((tmp_path / "w").read_bytes()[:size])
    with pytest.raises(BadFile, match="cut"):
        read_header(tmp_path / "cut")


def test_tensors_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path) -> None:
    two(tmp_path / "w")
    whole = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(whole.replace(b"[60,66]", b"[59,65]"))
    with pytest.raises(BadFile, match=r"a: bytes 59 to 65 are no BF16\[3\] that begins at 60"):
        read_header(tmp_path / "w")


def test_data_that_do_not_fit_their_shape_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(BadFile, match="b: 60 bytes are no F32"):
        write(tmp_path / "w", [Tensor("b", "F32", (4, 5), ODD)])
    with pytest.raises(BadFile, match="two of that name"):
        write(tmp_path / "w", [Tensor("b", "F32", (3, 5), ODD)] * 2)
    assert list(tmp_path.iterdir()) == []
