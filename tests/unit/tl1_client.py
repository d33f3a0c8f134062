"""A client that types TL1 at a unit without a wire, for the tests of its dialogue."""

import re
from datetime import UTC, datetime
from random import Random

from drivers.emulators.config import EmulatedSwitch
from drivers.emulators.faces.tl1 import Tl1Session
from drivers.emulators.model import SwitchModel
from drivers.emulators.settings import Account

WALL = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MIN = 60 * 10**9


class Client:
    """Types commands at a unit; returns the completion word and the body's lines."""

    def __init__(
        self, account: Account | None = None, *, logged_in: bool = False, **config: object
    ) -> None:
        settings = {"name": "agg0", "ports": 4, "faces": (), **config}
        self.model = SwitchModel(EmulatedSwitch(**settings), Random(0))
        self.model.boot(0)
        if account is not None:
            self.model.settings.accounts[account.user] = account
        user = account.user if account and logged_in else ""
        self.session = Tl1Session(self.model, asks=account is not None, user=user)

    def raw(self, text: str, now_ns: int = 0) -> str:
        (line,) = self.session.lines(text.encode())
        return self.session.answer(line, now_ns, WALL).reply.decode()

    def __call__(self, text: str, now_ns: int = 0) -> tuple[str, list[str]]:
        reply = self.raw(text, now_ns)
        head = re.search(r"\r\nM  (\S+) (\w+)\r\n", reply)
        body = reply[head.end() : reply.rindex(";")]
        return head[2], [line.strip().strip('"') for line in body.split("\r\n") if line]
