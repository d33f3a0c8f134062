"""A rank's end of its line: orders in, answers out, and where it stands, whatever it is doing.

A *control* thread reads, so that a rank that hangs can still be asked; the main thread does the
orders. The line's end is the rank's.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from agents.frames import Frame, Unpacker, pack
from agents.pipe import Doing, WhereAreYou
from harness.wire.messages import Message


class Line:
    """See the module. `put` is given every order, in the control thread."""

    def __init__(
        self,
        inherited: socket.socket,
        frames: msgspec.msgpack.Decoder[Any],
        put: Callable[[Frame[Any]], None],
    ) -> None:
        self._socket, self._frames, self._put = inherited, frames, put
        self._sending = threading.Lock()
        self.doing = ""
        """The order under way; "" none."""
        self._since_ns = 0

    def control(self) -> None:
        """Read orders until the agent is gone, then end the process, whatever it is doing."""
        try:
            self._read()
        except ConnectionError:
            pass  # the agent is gone
        except BaseException:  # without this thread, nobody would ever notice the line's end
            traceback.print_exc()
        os.killpg(0, signal.SIGKILL)  # with all that was started here

    def say(self, seq: int, message: Message) -> None:
        """Send a message, whole; from any thread."""
        with self._sending:  # a long answer may go out in pieces
            self._socket.sendall(pack(seq, 0, message))

    def begin(self, order: Message) -> None:
        """Note the order under way; `doing` is set to "" when it is answered."""
        self.doing, self._since_ns = str(order.__struct_config__.tag), time.monotonic_ns()

    def _read(self) -> None:
        unpacker = Unpacker(self._frames)
        while data := self._socket.recv(1 << 18):
            for frame in unpacker.feed(data):
                if isinstance(frame.body, WhereAreYou):
                    faulthandler.dump_traceback(sys.stderr, all_threads=True)
                    self.say(frame.seq, Doing(order=self.doing, since_ns=self._since_ns))
                else:
                    self._put(frame)
