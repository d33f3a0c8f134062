"""The unit's TL1 dialogue: framing, login, idle logout, denials and autonomous messages.

Pure: commands in, framed bytes and `Change` values out. What each command does is in
`tl1_commands`. Every reply carries the ctag of its command; a change of the map is also reported
unasked, to every logged-in session, unless reports are inhibited, and lands before the reply.
"""

from __future__ import annotations

from datetime import datetime

from drivers.emulators.faces import Answer
from drivers.emulators.faces.tl1_commands import COMMANDS
from drivers.emulators.faces.tl1_grammar import (
    Command,
    Denied,
    ctag_of,
    parse,
    parse_error,
    unquoted,
)
from drivers.emulators.faces.tl1_rules import Outcome, Request
from drivers.emulators.model import Change, SwitchModel
from drivers.emulators.settings import Account, Role

NS_PER_MIN = 60_000_000_000
LINE_MAX = 65_536
PROMPT = b">"


ANYBODY = Account("", "")
"""Who sends commands where nobody has to log in."""


class Tl1Session:
    """One client's dialogue.

    Where it `asks`, a user of the unit's accounts must log in first; `user` is who the server has
    already let in (SSH). Otherwise nothing is asked and any login is welcome.
    """

    greeting = PROMPT
    ends = b";"

    def __init__(self, model: SwitchModel, *, asks: bool = False, user: str = "") -> None:
        self._model, self._asks, self._user = model, asks, user
        self._starts = model.starts
        self._buffer = b""
        self._last_ns: int | None = None
        self._atag = 0

    def lines(self, data: bytes) -> list[bytes]:
        """Split at semicolons; line ends between commands do not matter."""
        *complete, self._buffer = (self._buffer + data).split(b";")
        if len(self._buffer) > LINE_MAX:
            self._buffer = b""
        return complete

    def answer(self, line: bytes, now_ns: int, wall: datetime) -> Answer:
        """Obey one command."""
        wall += self._model.settings.clock_ahead
        text = line.decode("ascii", "replace").strip()
        changes: tuple[Change, ...] = ()
        is_query = text.upper().startswith("RTRV-")
        try:
            if "\ufffd" in text:
                raise parse_error(text.index("\ufffd"))
            command = parse(text)
            outcome = self._obey(command, now_ns, wall)
        except Denied as denied:
            body = [denied.code, f"/* {denied.text} */"]
            return Answer(self._frame(f"M  {ctag_of(text)} DENY", body, wall), changes, is_query)
        completion = "COMPLD"
        body = [f'"{row}"' for row in outcome.rows]
        if outcome.refused:
            completion = "PRTL" if outcome.partly else "DENY"
            body = ["SROF", f"/* {outcome.refused} */"]
        reply = self._frame(f"M  {command.ctag} {completion}", body, wall)
        changes = () if outcome.change is None else (outcome.change,)
        return Answer(reply, changes, is_query)

    def report(self, change: Change, wall: datetime) -> bytes:
        """Return the autonomous message for a change of the map; empty where none is due."""
        inhibited = self._model.settings.reports_inhibited
        if inhibited or self._sender() is None or not (change.made or change.dropped):
            return b""
        wall += self._model.settings.clock_ahead
        self._atag += 1
        body = [f'"{a},{b}:DISCONNECTED"' for a, b in change.dropped]
        body += [f'"{a},{b}:CONNECTED"' for a, b in change.made]
        return self._frame(f"A  {self._atag} REPT EVT PATCH", body, wall)

    def _obey(self, command: Command, now_ns: int, wall: datetime) -> Outcome:
        sid = self._model.settings.sid
        if command.tid and command.tid != sid:
            raise Denied("IITA", "Mismatched TID")
        self._expire(now_ns)
        if command.verb == "ACT-USER":
            return self._log_in(command)
        rule = COMMANDS.get(command.verb)
        if rule is None and command.verb != "CANC-USER":
            raise parse_error(0)
        sender = self._sender()
        if sender is None:
            raise Denied("PLNA", "Not logged in")
        if rule is None:
            return self._log_out(command)
        rule.check(command, sender.role)
        return rule.act(Request(self._model, command, now_ns, wall, sender))

    def _sender(self) -> Account | None:
        """Return who is logged in, unless the account is gone or the unit has restarted."""
        if not self._asks:
            return ANYBODY
        known = self._model.settings.accounts.get(self._user)
        return known if self._starts == self._model.starts else None

    def _expire(self, now_ns: int) -> None:
        """Log an idle session out; only where somebody had to log in."""
        sender = self._sender()
        role = Role.ADMIN if sender is None or sender.role is Role.ADMIN else Role.USER
        limit_ns = self._model.settings.timeout_min[role] * NS_PER_MIN
        idle_ns = 0 if self._last_ns is None else now_ns - self._last_ns
        if limit_ns and idle_ns > limit_ns:
            self._user = ""
        self._last_ns = now_ns

    def _log_in(self, command: Command) -> Outcome:
        if not self._asks:
            return Outcome()
        if self._sender() is not None:
            raise Denied("PICC", "Already logged in")
        if not command.aid:
            raise Denied("IIAC", "Too few parameters (0/1)")
        account = self._model.settings.accounts.get(unquoted(command.aid))
        password = command.positional[0] if command.positional else ""
        if not password and (account is None or account.password):
            raise Denied("IPMS", "Too few parameters (0/1) in block 1")
        if account is None or not account.opens_with(password):
            raise Denied("PICC", "Invalid user or password")
        self._user, self._starts = account.user, self._model.starts
        return Outcome()

    def _log_out(self, command: Command) -> Outcome:
        """Log out; nobody may log out another."""
        if self._asks and unquoted(command.aid) not in {"", self._user}:
            raise Denied("PICC", "Permission denied")
        self._user = ""
        return Outcome()

    def _frame(self, head: str, body: list[str], wall: datetime) -> bytes:
        """Put a message into the unit's frame: header line, head, indented body, end, prompt."""
        sid = self._model.settings.sid or "( nil )"
        if " " in sid and sid != "( nil )":
            sid = f'"{sid}"'
        lines = [f"\r\n\n   {sid} {wall:%y-%m-%d %H:%M:%S}", head, *(f"   {row}" for row in body)]
        return ("\r\n".join(lines) + "\r\n;\r\n").encode() + PROMPT
