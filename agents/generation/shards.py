"""The bytes that a rank of the paced engine copies out of a file of weights, and verifies.

A rank holds so many bytes of the model as its layout gives it, whatever the file's size (the two
are rounded apart): its shard begins where the shards of the ranks before it end, and goes round at
the end of the file. Every tensor that it touches is verified whole.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from agents import weights_file
from harness.errors import BadFile


class Tensors:
    """A file of weights, opened to be copied from. Raises `BadFile`."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._checksums = weights_file.read_header(path).checksums
            self._tensors = [found for found in weights_file.tensors(path) if found[1].nbytes]
        except OSError as error:
            raise BadFile(path, [str(error.strerror)]) from error
        self.size_bytes = sum(data.nbytes for _, data in self._tensors)
        if not self.size_bytes:
            raise BadFile(path, ["there are no weights in it"])

    def fill(self, into: NDArray[np.uint8], first: int) -> None:
        """Fill `into` with the file's bytes from `first` on. Raises `weights_file.Corrupt`."""
        begins, filled, sound = -(first % self.size_bytes), 0, set[str]()
        while filled < into.nbytes:
            for name, data in self._tensors:
                # of this tensor's bytes, [begins, begins + n) of what is wanted
                low, high = max(filled, begins), min(into.nbytes, begins + data.nbytes)
                if low < high:
                    self._copy(into[low:high], name, data, low - begins, sound)
                    filled = high
                begins += data.nbytes

    def _copy(
        self, into: NDArray[np.uint8], name: str, data: memoryview, first: int, sound: set[str]
    ) -> None:
        if name not in sound:
            weights_file.check(self._path, name, data, self._checksums)
            sound.add(name)
        part = data[first : first + into.nbytes]
        np.copyto(into, np.frombuffer(part, np.uint8))
        if crc32(into.data) != crc32(part):
            raise weights_file.Corrupt(f"{self._path}: {name} was not copied as it stands there")
