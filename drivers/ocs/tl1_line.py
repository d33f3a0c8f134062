"""TL1 exchanges over a line: requests out with fresh ctags, answers matched by ctag."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drivers.address import SerialAddress
from drivers.base import Transport
from drivers.dialects import tl1
from drivers.errors import AccessDenied, DeadlineExpired, Garbled, Misuse, Refused
from drivers.ocs.line import Access, Line, drain

EVENTS_KEPT = 1000
NOT_LOGGED_IN = "not logged in"
ALREADY_LOGGED_IN = "already logged in"
PING = tl1.Request("RTRV-HDR")


@dataclass(frozen=True)
class Answers:
    """The final responses, one a request in its order, and the stamps (monotonic ns)."""

    responses: tuple[tl1.Response, ...]
    sent_ns: int
    received_ns: tuple[int, ...]


class Tl1Line:
    """Speaks TL1 to one unit, logging in where we have user and password.

    Autonomous messages are kept, the last `EVENTS_KEPT` of them, until `events` takes them.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._name = access.name
        self._line = Line(access, self._sync)
        self._parser = tl1.FrameParser()
        self._ctags = itertools.count(1)
        self._events: deque[tl1.Event] = deque(maxlen=EVENTS_KEPT)
        address_user = None if isinstance(access.address, SerialAddress) else access.address.user
        self._user = address_user or access.credentials.user
        self._newline = "\n"

    @property
    def waited_ns(self) -> int:
        """Time spent so far blocked on the line."""
        return self._line.waited_ns

    def ask(self, *requests: tl1.Request, changes: bool = False) -> Answers:
        """Send the requests together and return their answers, all of them completed.

        Raises `Refused` for the first that is denied or partly done. A session that has expired
        is logged in again and the requests repeated, once: nothing of them was obeyed.
        """
        answers = self._once(requests, changes=changes)
        if all(map(_not_logged_in, answers.responses)):
            with self._line.exchange(changes=False) as (transport, deadline_ns):
                self._log_in(transport, deadline_ns)
            answers = self._once(requests, changes=changes)
        for request, response in zip(requests, answers.responses, strict=True):
            if response.code != tl1.COMPLETED:
                code = response.error or response.code
                raise Refused(code, response.text, _shown(request))
        return answers

    def rows(self, request: tl1.Request) -> tuple[str, ...]:
        """Ask one query and return its rows."""
        return self.ask(request).responses[0].rows

    def events(self) -> list[tl1.Event]:
        """Return the autonomous messages since the last call, oldest first."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def close(self) -> None:
        """Close the line."""
        self._line.close()

    def _once(self, requests: Sequence[tl1.Request], *, changes: bool) -> Answers:
        with self._line.exchange(changes=changes) as (transport, deadline_ns):
            ctags = [str(next(self._ctags)) for _ in requests]
            text = "".join(
                request.command(ctag) + self._newline
                for request, ctag in zip(requests, ctags, strict=True)
            )
            sent_ns = self._line.send(text.encode("ascii"), deadline_ns)
            answered = self._await(transport, ctags, deadline_ns)
        responses, stamps = zip(*(answered[ctag] for ctag in ctags), strict=True)
        return Answers(responses, sent_ns, stamps)

    def _await(
        self, transport: Transport, ctags: Sequence[str], deadline_ns: int
    ) -> dict[str, tuple[tl1.Response, int]]:
        """Receive until every ctag has its final response; keep the events that come between."""
        pending = _Pending(ctags)
        while not pending.complete:
            try:
                data = transport.receive(deadline_ns)
            except DeadlineExpired as expired:
                strange = pending.strange + self._parser.partial
                if not strange.isascii():
                    raise Garbled(
                        f"{self._name}: received {strange[:40]!r}: check baud rate and protocol"
                    ) from expired
                raise
            now_ns = self._access.now_ns()
            for frame in self._parser.feed(data):
                if isinstance(frame, tl1.Event):
                    self._events.append(frame)
                else:
                    pending.take(frame, now_ns)
        return pending.answered

    def _sync(self, transport: Transport, deadline_ns: int, fresh: bool) -> None:
        if not fresh:
            drain(transport, self._access.now_ns, deadline_ns)
        self._parser.clear()
        if fresh and self._user and self._access.credentials.password:
            self._log_in(transport, deadline_ns)
        else:
            self._one(transport, PING, deadline_ns)

    def _one(self, transport: Transport, request: tl1.Request, deadline_ns: int) -> tl1.Response:
        ctag = str(next(self._ctags))
        transport.send((request.command(ctag) + self._newline).encode("ascii"), deadline_ns)
        return self._await(transport, [ctag], deadline_ns)[ctag][0]

    def _log_in(self, transport: Transport, deadline_ns: int) -> None:
        password = self._access.credentials.password
        if not self._user or not password:
            raise AccessDenied(
                f"{self._name}: the unit asks for a TL1 login; name the user in the URL or the"
                " credentials, and give the password by environment variable or file"
            )
        try:
            login = tl1.Request("ACT-USER", tl1.quote(self._user), ("", tl1.quote(password)))
        except Misuse as error:
            raise AccessDenied(f"{self._name}: user or password: {error}") from error
        response = self._one(transport, login, deadline_ns)
        if response.code != tl1.COMPLETED and ALREADY_LOGGED_IN not in response.text.lower():
            raise AccessDenied(
                f"{self._name}: TL1 login of user {self._user!r} refused:"
                f" {response.error} {response.text}".rstrip()
            )


class _Pending:
    """The ctags that still wait for their final response, and what has come for them."""

    def __init__(self, ctags: Sequence[str]) -> None:
        self.answered: dict[str, tuple[tl1.Response, int]] = {}
        self.strange = ""
        """The last line outside of all frames."""
        self._rows: dict[str, tuple[str, ...]] = dict.fromkeys(ctags, ())

    @property
    def complete(self) -> bool:
        return len(self.answered) == len(self._rows)

    def take(self, frame: tl1.Response | tl1.Stray, now_ns: int) -> None:
        """Take a frame; answers to somebody else's or an earlier ctag are passed over."""
        if isinstance(frame, tl1.Stray):
            self.strange = frame.text
            if NOT_LOGGED_IN not in frame.text.lower() or self.complete:
                return
            # An expired session may say so without a frame: to the oldest question.
            oldest = next(ctag for ctag in self._rows if ctag not in self.answered)
            self.answered[oldest] = (tl1.Response(oldest, tl1.DENIED, text=frame.text), now_ns)
        elif frame.ctag in self._rows and frame.ctag not in self.answered:
            self._rows[frame.ctag] += frame.rows
            if frame.final:
                self.answered[frame.ctag] = (replace(frame, rows=self._rows[frame.ctag]), now_ns)


def _not_logged_in(response: tl1.Response) -> bool:
    return response.code == tl1.DENIED and NOT_LOGGED_IN in response.text.lower()


def _shown(request: tl1.Request) -> str:
    return f"{request.verb}::{request.aid}"
