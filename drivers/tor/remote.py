"""A ToR that is reached by logging in: commands over a session that is opened when needed.

After any fault the session is given up, so that a late answer is never taken for the answer to a
later command; the next command opens another.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

from drivers.address import SshAddress
from drivers.errors import DeviceFault, LinkLost
from drivers.transports.commands import Commands, Finished

SUPERUSER = "root"


@dataclass(frozen=True)
class Access:
    """How to reach one ToR: `open` takes a deadline (monotonic ns) and opens a session."""

    name: str
    address: SshAddress
    open: Callable[[int], Commands]
    exchange_timeout_ns: int
    open_timeout_ns: int
    now_ns: Callable[[], int] = time.monotonic_ns
    sleep: Callable[[float], None] = time.sleep


class Remote:
    """The session of `access`. Whoever is not root asks for each command by ``sudo -n``."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: Commands | None = None
        self._closed = False

    def open(self) -> None:
        """Open the session, if it is not; raise what opening raises."""
        if self._closed:
            raise LinkLost(f"ToR {self.access.name}: used after it was closed")
        if self._session is None:
            self._session = self.access.open(self.access.now_ns() + self.access.open_timeout_ns)

    def run(self, argv: tuple[str, ...], stdin: str = "") -> Finished:
        """Run one command; raise what opening raises, `DeadlineExpired` or `LinkLost`."""
        self.open()
        assert self._session is not None
        words = argv if self.access.address.user == SUPERUSER else ("sudo", "-n", *argv)
        try:
            deadline_ns = self.access.now_ns() + self.access.exchange_timeout_ns
            return self._session.run(shlex.join(words), stdin, deadline_ns)
        except DeviceFault:
            self._drop()
            raise

    def close(self) -> None:
        """Close for good."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
