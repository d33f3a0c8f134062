"""One file of weights on its way through a node: it fills up, is verified, and is passed on.

Three kinds of threads work on a `Passage`, each as far as the one before it has come: one receives
buckets into the file (at the source all of it is there), one verifies them in order, and one for
each child sends on what is verified. A slow or broken child holds up nobody but itself, because
what it lacks lies in the file. Whoever finds that it cannot go on ends the passage for all.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from zlib import crc32

from agents.buckets import (
    MAGIC,
    Cut,
    Offer,
    Word,
    await_word,
    receive_bucket,
    say,
    send_head,
    words_so_far,
)
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError

_LOOK_S = 0.2

Reason = Literal[
    "Late", "Superseded", "ParentLost", "Corrupt", "WrongVersion", "NoRoom", "NoFile", "Closed"
]


class Ended(InfrastructureError):
    """A passage that will not be completed, and why: `error` is a failure's name."""

    def __init__(self, error: Reason, text: str) -> None:
        super().__init__(error, text)
        self.error, self.text = error, text

    def __str__(self) -> str:
        return self.text


class Passage:
    """A file of weights, and how far it has come. Close it when its threads are done."""

    def __init__(self, offer: Offer, path: Path, *, whole: bool) -> None:
        self.offer, self.path = offer, path
        self.moment = threading.Condition()
        """Told whenever a bucket arrives or is verified, a child is done, or all is over."""
        self.verified_ns = self.received_ns = 0
        self.file = path.open("rb" if whole else "r+b", buffering=0)
        self._ended: Ended | None = None
        self._arrived = offer.buckets if whole else 0
        self._claimed: list[int] = []
        """CRCs that the sender claims; none where the file was here from the beginning."""
        self._crcs: list[int] = []
        self._lines: set[socket.socket] = set()
        self._cut = False
        access = mmap.ACCESS_READ if whole else mmap.ACCESS_WRITE
        self._map = mmap.mmap(self.file.fileno(), offer.size_bytes, access=access)
        self._view = memoryview(self._map)

    @classmethod
    def outgoing(
        cls, transfer: str, version: int, path: Path, bucket_bytes: int, stall_ns: int
    ) -> Passage:
        """Begin with a whole file. Raises `Ended` where there is none to be read."""
        try:
            size_bytes = path.stat().st_size
            if not size_bytes:
                raise Ended("NoFile", f"{path}: it is empty; a file of weights is expected")
            offer = Offer(MAGIC, transfer, version, size_bytes, bucket_bytes, stall_ns)
            return cls(offer, path, whole=True)
        except OSError as error:
            raise Ended("NoFile", f"{path}: {error.strerror}") from error

    @classmethod
    def incoming(cls, offer: Offer, path: Path) -> Passage:
        """Begin with an empty file of the size offered. Raises `Ended` where there is no room.

        All of its memory is taken here: what does not fit must not be found out by writing to it.
        """
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, offer.size_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            free_bytes = shutil.disk_usage(path.parent).free
            text = f"{offer.size_bytes} bytes of weights; {free_bytes} are free in {path.parent}"
            raise Ended("NoRoom", f"no room for {text}: {error.strerror}") from error
        return cls(offer, path, whole=False)

    @property
    def checksum(self) -> int:
        """CRC-32 of the file, once all of it is verified."""
        return self._crcs[-1]

    @property
    def verified(self) -> int:
        """How many buckets are."""
        return len(self._crcs)

    @property
    def complete(self) -> bool:
        """Whether all of it is here, and sound."""
        return self.verified == self.offer.buckets

    @property
    def ended(self) -> bool:
        """Whether it was ended before it was complete."""
        return self._ended is not None

    def check(self) -> None:
        """Raise `Ended` if it was."""
        if self._ended:
            raise Ended(*self._ended.args)

    # -- its threads ---------------------------------------------------------------------------

    def receive(self, line: socket.socket) -> None:
        """Take all buckets from a sender. Ends the passage where they do not come."""
        line.settimeout(_LOOK_S)
        try:
            for bucket in range(self.offer.buckets):
                place = self._bucket(bucket)
                crc = receive_bucket(line, bucket, place, lambda: not self.ended)
                with self.moment:
                    self._claimed.append(crc)
                    self._arrived += 1
                    self.received_ns = time.monotonic_ns()
                    self.moment.notify_all()
        except OSError as error:
            had = f"{self._arrived} of {self.offer.buckets} buckets had come"
            self.end(Ended("ParentLost", f"the sender is lost ({error}): {had}"))

    def verify(self, line: socket.socket | None = None) -> None:
        """Verify buckets in order as they arrive; say each on `line`. Ends a corrupt passage."""
        crc = 0
        for bucket in range(self.offer.buckets):
            with self.moment:
                while self._arrived <= bucket and not self.ended:
                    self.moment.wait()
                if self.ended:
                    return
            crc = crc32(self._bucket(bucket), crc)
            if self._claimed and self._claimed[bucket] != crc:
                self.end(Ended("Corrupt", f"bucket {bucket} is corrupt on arrival"))
                return
            with self.moment:
                self._crcs.append(crc)
                self.verified_ns = time.monotonic_ns()
                self.moment.notify_all()
            if line is not None:
                with suppress(OSError):  # whoever receives finds out
                    say(line, Word(bucket + 1))

    def await_verified(self, bucket: int) -> int:
        """Return the CRC up to a bucket's end, once it is verified. Raises `Ended`."""
        with self.moment:
            self.moment.wait_for(lambda: self.ended or self.verified > bucket)
            self.check()
            return self._crcs[bucket]

    def _bucket(self, bucket: int) -> memoryview:
        """Return a bucket's place in the file."""
        begins, length = self.offer.span(bucket)
        return self._view[begins : begins + length]

    # -- its end -------------------------------------------------------------------------------

    @contextmanager
    def sending(self, line: socket.socket) -> Iterator[None]:
        """Have `line` cut when the passage ends, or its time is up."""
        with self.moment:
            self.check()
            if self._cut:
                raise Cut("the time is up")
            self._lines.add(line)
        try:
            yield
        finally:
            with self.moment:
                self._lines.discard(line)

    def end(self, why: Ended) -> None:
        """End it for all of its threads; the first reason stays."""
        with self.moment:
            self._ended = self._ended or why
            self.moment.notify_all()
        self.cut()

    def cut(self) -> None:
        """Cut the lines to all children, so that no thread waits for them any longer."""
        with self.moment:
            self._cut = True
            for line in self._lines:
                with suppress(OSError):  # it may have ended by itself
                    line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the file's memory: at once, or when the last thread that hangs comes back."""
        self.file.close()
        with suppress(BufferError):
            self._view.release()
            self._map.close()


class Delivery(threading.Thread):
    """A thread that gives a passage's file to one child; how far it got, and what went wrong."""

    def __init__(self, passage: Passage, peer: str) -> None:
        super().__init__(name=f"to {peer}", daemon=True)
        self.peer = peer
        self.had = 0
        """Buckets that the child has said it has."""
        self.problem = ""
        self.done = False
        self.begin_ns = 0
        self._passage = passage

    def run(self) -> None:
        """Connect, offer, send each bucket as soon as it is verified here, and hear the last."""
        try:
            self._deliver()
        except TimeoutError:
            stall_s = self._passage.offer.stall_ns / NS_PER_S
            self.problem = self.problem or f"stood still for {stall_s:g} s"
        except (OSError, Ended, ValueError) as error:  # ValueError: no HOST:PORT, or a closed file
            self.problem = self.problem or str(error) or type(error).__name__
        finally:
            with self._passage.moment:
                self.done = True
                self._passage.moment.notify_all()

    def _deliver(self) -> None:
        passage, offer = self._passage, self._passage.offer
        host, _, port = self.peer.rpartition(":")
        stall_s = offer.stall_ns / NS_PER_S
        with (
            socket.create_connection((host, int(port)), stall_s) as line,
            passage.sending(line),
        ):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(stall_s)  # of one write, which is done when the kernel has some of it
            try:
                self._send(line)
            except (BrokenPipeError, ConnectionResetError):
                for word in words_so_far(line):  # it may have said why
                    self._heard(word)
                raise

    def _send(self, line: socket.socket) -> None:
        passage, offer = self._passage, self._passage.offer
        say(line, offer)
        over = False
        for bucket in range(offer.buckets):
            crc = passage.await_verified(bucket)
            self.begin_ns = self.begin_ns or time.monotonic_ns()
            begins, length = offer.span(bucket)
            send_head(line, bucket, length, crc)
            if line.sendfile(passage.file, begins, length) != length:
                raise Cut("the file became shorter")
            for word in words_so_far(line):
                over = self._heard(word)
        while not over:
            over = self._heard(await_word(line, offer.stall_ns))

    def _heard(self, word: Word) -> bool:
        """Take a word of the child; return whether it was its last. Raises `Cut` if it failed."""
        self.had = word.buckets
        if word.problem:
            raise Cut(word.problem)
        return word.ends

    def __str__(self) -> str:
        """Say which child it is, what went wrong, and how many buckets it had."""
        buckets = self._passage.offer.buckets
        return f"{self.peer}: {self.problem}; it had {self.had} of {buckets} buckets"
