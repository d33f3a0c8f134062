"""The journal: append-only JSON lines of documents, good after ``kill -9``.

Every line is written whole and flushed at once, and made durable (fsync) where a step ends and
where the run ends. A process that dies in the middle of a line leaves a torn one; the reader skips
it and counts it. Secrets that were registered are masked here, at the sink, whoever wrote them.
Stamps are those of the clock handed in.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from harness.clock import Clock
from harness.errors import BadFile, InfrastructureError
from harness.model.documents import (
    SCHEMA,
    Descriptor,
    Document,
    Event,
    Field,
    Start,
    Status,
    Stop,
)

Watch = Callable[[Document], None]

MASK = "***"
DURABLE_STREAM = "step"
"""Its "end" events are made durable: what is told as done is on the disk."""

TAIL_BYTES = 2**16
"""A stop document is far shorter."""

_decoder = msgspec.json.Decoder(Document)


class Journal:
    """One run's journal, open for appending by one process; safe from several threads.

    `watch` is called with every document as it is written (masked), in order. A journal that
    cannot be written raises `InfrastructureError`.
    """

    def __init__(self, file: IO[bytes], clock: Clock, watch: Watch | None = None) -> None:
        self._file = file
        self._clock = clock
        self._watch = watch
        self._secrets: list[str] = []
        self._counts: Counter[str] = Counter()
        self._fields: dict[str, frozenset[str]] = {}
        self._lock = threading.RLock()

    @classmethod
    def create(
        cls, path: Path, clock: Clock, *, secrets: Iterable[str] = (), watch: Watch | None = None
    ) -> Journal:
        """Make a new journal; one that exists is never written over."""
        try:
            journal = cls(path.open("xb"), clock, watch)
        except OSError as error:
            raise InfrastructureError(f"{path}: cannot be made: {error.strerror}") from error
        for secret in secrets:
            journal.conceal(secret)
        return journal

    @classmethod
    def reopen(cls, path: Path, clock: Clock, watch: Watch | None = None) -> Journal:
        """Go on with the journal of a process that is gone; a torn line of its stays as it is.

        Raises `BadFile` where there is no journal.
        """
        known = list(read_journal(path))
        journal = cls(path.open("ab"), clock, watch)
        for document in known:
            if isinstance(document, Event):
                journal._counts[document.stream] = document.seq
            elif isinstance(document, Descriptor):
                journal._fields[document.stream] = frozenset(document.fields)
        if _tail(path)[-1:] not in (b"", b"\n"):
            journal._file.write(b"\n")
        return journal

    def conceal(self, secret: str) -> None:
        """Mask this value from now on, wherever it turns up; an empty one is no secret."""
        if secret and secret not in self._secrets:
            self._secrets = sorted([*self._secrets, secret], key=len, reverse=True)

    def start(self, start: Start) -> None:
        """Open the run."""
        self._append(start)

    def describe(self, stream: str, fields: Mapping[str, Field]) -> None:
        """Declare a stream."""
        self._fields[stream] = frozenset(fields)
        self._append(Descriptor(stream=stream, fields=dict(fields)))

    def event(self, stream: str, data: Mapping[str, Any]) -> None:
        """Write one event, stamped now. Its fields must be declared; one left out reads as null."""
        if stream not in self._fields:
            raise ValueError(f"stream {stream!r} was not described")
        if unknown := sorted(data.keys() - self._fields[stream]):
            raise ValueError(f"stream {stream!r} has no field {', '.join(unknown)}")
        with self._lock:
            self._counts[stream] += 1
            self._append(
                Event(
                    stream=stream,
                    seq=self._counts[stream],
                    t_ns=self._clock.now_ns(),
                    data=dict(data),
                )
            )
            if stream == DURABLE_STREAM and data.get("phase") == "end":
                self.sync()

    def stop(self, status: Status, exit_code: int, reason: str) -> None:
        """Close the run, durably."""
        with self._lock:
            self._append(
                Stop(
                    t_ns=self._clock.now_ns(),
                    wall=self._clock.wall().isoformat(timespec="seconds"),
                    status=status,
                    exit_code=exit_code,
                    reason=reason,
                    counts=dict(self._counts),
                )
            )
            self.sync()

    def sync(self) -> None:
        """Make everything so far durable."""
        with self._lock:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with suppress(OSError):  # only what could not be written, which was told then
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, document: Document) -> None:
        with self._lock:
            shown: object = document
            if self._secrets:
                shown = _masked(msgspec.to_builtins(document), self._secrets)
            line = msgspec.json.encode(shown)
            try:
                self._file.write(line + b"\n")
                self._file.flush()
            except OSError as error:
                raise self._unwritable(error) from error
            if self._watch:
                self._watch(_decoder.decode(line))

    def _unwritable(self, error: OSError) -> InfrastructureError:
        return InfrastructureError(f"{self._file.name}: cannot be written: {error.strerror}")


def _masked(value: object, secrets: list[str]) -> object:
    """Mask secrets in every text of a tree of builtins; `secrets` longest first."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {_masked(key, secrets): _masked(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, secrets) for item in value]
    return value


class JournalReader:
    """The documents of a journal, in order. `torn` counts the lines that are not whole.

    Iterating raises `BadFile` on a journal that a later major version wrote.
    """

    def __init__(self, path: Path) -> None:
        self.torn = 0
        self._path = path

    def __iter__(self) -> Iterator[Document]:
        self.torn = 0
        with self._path.open("rb") as file:
            for line in file:
                try:
                    document = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.torn += 1
                    continue
                if isinstance(document, Start):
                    self._check(document.schema)
                yield document

    def _check(self, schema: str) -> None:
        ours = SCHEMA.partition(".")[0]
        if schema.partition(".")[0] != ours:
            text = f"a journal of schema {schema}; this version reads {ours}.x"
            raise BadFile(str(self._path), [text])


def read_journal(path: str | Path) -> JournalReader:
    """Return the documents of a journal. Raises `BadFile` where there is none."""
    if not Path(path).is_file():
        raise BadFile(str(path), ["no journal here"])
    return JournalReader(Path(path))


def is_closed(path: Path) -> bool:
    """Tell whether the last whole document of a journal is its stop; reads only its end."""
    for line in reversed(_tail(path).splitlines()):
        try:
            return isinstance(_decoder.decode(line), Stop)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return False


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read()
