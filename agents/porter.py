"""The porter: one process a node that carries files of weights, as `harness.wire.weights` says.

``python -m agents.porter`` is started by the labour of weights with an inherited socket
(`agents.frames`). Threads and blocking sockets: bulk bytes never wait for an event loop, nor it
for them. Files lie in a folder that the labour owns, until whoever asked for them says that no
engine needs them any more (`ForgetWeights`).
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from agents.buckets import Offer, Word, dismiss, hear_offer, say
from agents.frames import Frame, Unpacker, pack
from agents.passage import Delivery, Ended, Passage
from agents.process import die_with
from harness.clock import NS_PER_S
from harness.errors import ExitCode
from harness.wire.generation import Span
from harness.wire.messages import Done, Failure, Message
from harness.wire.weights import (
    ClosePorter,
    ExpectWeights,
    ForgetWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)

_OFFER_S = 10.0
_EARLY_S = 5.0
"""A sender may be faster than the order to expect it; so long it waits for that."""
_CUT_S = 0.5
_NO_DEADLINE_NS = 600 * NS_PER_S

Body = (
    OpenPorter | PorterOpen | ExpectWeights | WeightsArrived | SendWeights | WeightsSent
    | ForgetWeights | ClosePorter | Done | Failure
)  # fmt: skip
FRAMES = msgspec.msgpack.Decoder(Frame[Body])


class Expected:
    """A transfer that this node waits for, or has under way."""

    def __init__(self, order: ExpectWeights, due_ns: int) -> None:
        self.order, self.due_ns = order, due_ns
        self._passage: Passage | None = None
        self._why: Ended | None = None
        self._offered: queue.SimpleQueue[tuple[socket.socket, Offer] | None] = queue.SimpleQueue()

    def offer(self, line: socket.socket, offer: Offer) -> None:
        """Give it a sender's line."""
        self._offered.put((line, offer))

    def end(self, why: Ended) -> None:
        """End it, wherever it is."""
        self._why = why
        self._offered.put(None)
        if self._passage is not None:
            self._passage.end(why)

    def offered(self) -> tuple[socket.socket, Offer]:
        """Return the sender's line and offer. Raises `Ended`."""
        try:
            found = self._offered.get(timeout=max(0.0, _left_s(self.due_ns)))
        except queue.Empty:
            raise Ended("Late", "nobody sent anything by the deadline") from None
        if found is None:
            assert self._why is not None
            raise self._why
        return found

    def begin(self, passage: Passage) -> None:
        """Take a passage as this one's; end it if this was ended meanwhile."""
        self._passage = passage
        if self._why is not None:
            passage.end(self._why)


class Porter:
    """All transfers of this node: one that is received, and one that is sent, at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._expected: Expected | None = None
        self._sending: Passage | None = None

    # -- orders --------------------------------------------------------------------------------

    def answer(self, order: Message, due_ns: int) -> Message:
        """Do an order by its deadline and return the answer."""
        doers: dict[type[Message], Callable[[Any, int], Message]] = {
            OpenPorter: self._open,
            ExpectWeights: self._expect,
            SendWeights: self._send,
            ForgetWeights: self._forget,
            ClosePorter: self._close,
        }
        try:
            return doers[type(order)](order, due_ns or time.monotonic_ns() + _NO_DEADLINE_NS)
        except Ended as ended:
            return Failure(error=ended.error, text=ended.text)
        except OSError as error:
            return Failure(error=type(error).__name__, text=str(error))

    def _open(self, order: OpenPorter, _due_ns: int) -> Message:
        listener = socket.create_server((order.address, 0), backlog=64)
        threading.Thread(target=self._listen, args=(listener,), name="doors", daemon=True).start()
        listen = f"{order.address}:{listener.getsockname()[1]}"
        return PorterOpen(listen=listen, pid=os.getpid())

    def _forget(self, order: ForgetWeights, _due_ns: int) -> Message:
        for version, path in self._files():
            if version < order.keep_from:
                path.unlink(missing_ok=True)
        return Done(t_ns=time.monotonic_ns())

    def _close(self, _order: ClosePorter, _due_ns: int) -> Message:
        closed = Ended("Closed", "the porter was closed")
        with self._changed:
            for one in (self._expected, self._sending):
                if one is not None:
                    one.end(closed)
        for _, path in self._files():
            path.unlink(missing_ok=True)
        return Done(t_ns=time.monotonic_ns())

    def _files(self) -> list[tuple[int, Path]]:
        """Return the versions whose files are here, oldest first."""
        named = ((re.fullmatch(r"weights-(\d+)", p.stem), p) for p in self._folder.iterdir())
        return sorted((int(found[1]), path) for found, path in named if found)

    # -- sending -------------------------------------------------------------------------------

    def _send(self, order: SendWeights, due_ns: int) -> Message:
        passage = Passage.outgoing(
            order.transfer, order.version, Path(order.path), order.bucket_bytes, order.stall_ns
        )
        with self._changed:
            if self._sending is not None:
                superseded = f"transfer {order.transfer} of version {order.version} takes its place"
                self._sending.end(Ended("Superseded", superseded))
            self._sending = passage
        children = [Delivery(passage, peer) for peer in order.children]
        begin_ns = time.monotonic_ns()
        verifier = threading.Thread(target=passage.verify, name="verify", daemon=True)
        _finish(passage, verifier, children, due_ns)
        passage.close()
        with self._changed:
            if self._sending is passage:
                self._sending = None
        passage.check()
        return _lost(children) or WeightsSent(
            moved_bytes=passage.offer.size_bytes * len(children),
            buckets=passage.offer.buckets,
            checksum=passage.checksum,
            spans=(_span("send", [child.begin_ns for child in children] or [begin_ns]),),
        )

    # -- receiving -----------------------------------------------------------------------------

    def _expect(self, order: ExpectWeights, due_ns: int) -> Message:
        expected = Expected(order, due_ns)
        with self._changed:
            if self._expected is not None:
                superseded = f"transfer {order.transfer} of version {order.version} takes its place"
                self._expected.end(Ended("Superseded", superseded))
            self._expected = expected
            self._changed.notify_all()
        try:
            line, offer = expected.offered()
            return self._take(expected, line, offer)
        finally:
            with self._changed:
                if self._expected is expected:
                    self._expected = None

    def _take(self, expected: Expected, line: socket.socket, offer: Offer) -> Message:
        """Receive a file from `line`, keep it, pass it on, and say how it went."""
        unfinished = self._folder / f"{threading.get_ident()}.part"
        passage: Passage | None = None
        try:
            _check_version(offer, expected.order)
            passage = Passage.incoming(offer, unfinished)
            expected.begin(passage)
            answer = self._carry(expected, line, passage)
        except Ended as ended:
            word = line, passage.verified if passage else 0, ended.text
            threading.Thread(target=dismiss, args=word, daemon=True).start()
            raise
        else:
            line.close()
            return answer
        finally:
            unfinished.unlink(missing_ok=True)

    def _carry(self, expected: Expected, line: socket.socket, passage: Passage) -> Message:
        begin_ns = time.monotonic_ns()
        children = [Delivery(passage, peer) for peer in expected.order.children]
        receiver = threading.Thread(target=passage.receive, args=(line,), daemon=True)
        receiver.start()
        keeper = threading.Thread(target=self._keep, args=(passage, line), daemon=True)
        _finish(passage, keeper, children, expected.due_ns)
        receiver.join()
        passage.close()
        passage.check()
        forward = [child.begin_ns for child in children]
        return _lost(children) or WeightsArrived(
            path=str(self._path(passage.offer.version)),
            version=passage.offer.version,
            moved_bytes=passage.offer.size_bytes,
            checksum=passage.checksum,
            spans=(
                Span(stage="receive", begin_ns=begin_ns, end_ns=passage.received_ns),
                Span(stage="verify", begin_ns=passage.received_ns, end_ns=passage.verified_ns),
                *([_span("forward", forward)] if forward else []),
            ),
        )

    def _keep(self, passage: Passage, line: socket.socket) -> None:
        """Verify all, give the file its name, and say that it is whole."""
        passage.verify(line)
        if not passage.complete:
            return
        passage.path.replace(self._path(passage.offer.version))
        with suppress(OSError):
            say(line, Word(passage.verified, ends=True))

    def _path(self, version: int) -> Path:
        return self._folder / f"weights-{version}.safetensors"

    # -- doors ---------------------------------------------------------------------------------

    def _listen(self, listener: socket.socket) -> None:
        while True:
            line, _ = listener.accept()
            threading.Thread(target=self._admit, args=(line,), daemon=True).start()

    def _admit(self, line: socket.socket) -> None:
        """Give a sender's line to the transfer that is expected; send away whoever else comes."""
        line.settimeout(_OFFER_S)
        try:
            offer = hear_offer(line)
            expected = self._await_expected(offer.transfer)
            if expected is not None:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                expected.offer(line, offer)
                return
            dismiss(line, 0, "this node does not expect that transfer")
        except OSError as error:
            sys.stderr.write(f"a line that is no transfer of weights: {error}\n")
            sys.stderr.flush()
            line.close()

    def _await_expected(self, transfer: str) -> Expected | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_expected(transfer), _EARLY_S)
            return self._expected if self._is_expected(transfer) else None

    def _is_expected(self, transfer: str) -> bool:
        return self._expected is not None and self._expected.order.transfer == transfer


def _check_version(offer: Offer, order: ExpectWeights) -> None:
    if offer.version != order.version:
        text = f"version {offer.version} was sent; {order.version} is expected"
        raise Ended("WrongVersion", text)


def _finish(
    passage: Passage, verifier: threading.Thread, children: Sequence[Delivery], due_ns: int
) -> None:
    """Start the threads of a passage and see them ended, at the latest soon after the deadline."""
    for thread in (verifier, *children):
        thread.start()
    with passage.moment:
        passage.moment.wait_for(
            lambda: passage.ended or (passage.complete and all(child.done for child in children)),
            max(0.0, _left_s(due_ns)),
        )
    if not passage.complete:
        had = f"{passage.verified} of {passage.offer.buckets} buckets had come by the deadline"
        passage.end(Ended("Late", had))
    for child in children:
        if not child.done:
            child.problem = child.problem or "was not done by the deadline"
    passage.cut()
    verifier.join()
    for child in children:
        child.join(_CUT_S)  # one that still tries to connect ends by itself


def _lost(children: Sequence[Delivery]) -> Failure | None:
    """Return the failure that names the children that did not get all; None: all did."""
    lost = [str(child) for child in children if child.problem]
    return Failure(error="ChildLost", text="; ".join(lost)) if lost else None


def _span(stage: str, begins_ns: Sequence[int]) -> Span:
    return Span(stage=stage, begin_ns=min(begins_ns), end_ns=time.monotonic_ns())


def _left_s(due_ns: int) -> float:
    return (due_ns - time.monotonic_ns()) / NS_PER_S


class Line:
    """The line to the labour: every order in a thread of its own, answers as they come."""

    def __init__(self, line: socket.socket, porter: Porter) -> None:
        self._line, self._porter = line, porter
        self._sending = threading.Lock()

    def serve(self) -> NoReturn:
        """Do orders until the agent is gone."""
        unpacker = Unpacker(FRAMES)
        with suppress(ConnectionError):
            while data := self._line.recv(1 << 16):
                for frame in unpacker.feed(data):
                    threading.Thread(target=self._do, args=(frame,), daemon=True).start()
        os.killpg(0, signal.SIGKILL)
        raise SystemExit(ExitCode.INFRASTRUCTURE)

    def _do(self, frame: Frame[Body]) -> None:
        try:
            answer = self._porter.answer(frame.body, frame.deadline_ns)
        except Exception:
            answer = Failure(error="Bug", text=traceback.format_exc())
        with self._sending:
            self._line.sendall(pack(frame.seq, 0, answer))


def main() -> None:
    """Run the porter; see `agents.weights` for who starts it."""
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("parent", "fd"):
        options.add_argument(f"--{name}", type=int, required=True)
    options.add_argument("--folder", type=Path, required=True)
    found = options.parse_args()
    die_with(found.parent)
    Line(socket.socket(fileno=found.fd), Porter(found.folder)).serve()


if __name__ == "__main__":
    main()
