"""What a TL1 command is given and comes to, and the rule that says who may send it, and how.

Pure. Errors: `tl1_grammar.Denied` with the unit's code and text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from drivers.emulators.faces.tl1_grammar import Command, Denied, ports
from drivers.emulators.model import Change, SwitchModel
from drivers.emulators.settings import Account, Role


@dataclass(frozen=True)
class Request:
    """A command with who sent it and what it acts on."""

    model: SwitchModel
    command: Command
    now_ns: int
    wall: datetime
    """The time by the unit's own clock."""
    sender: Account

    def ports(self, allowed: range) -> list[int]:
        """Read the AID as ports; ``ALL`` or empty means every allowed port."""
        aid = self.command.aid
        return list(allowed) if aid.upper() in {"", "ALL"} else ports(aid, allowed)

    @property
    def ingress(self) -> range:
        """Ingress port numbers."""
        return range(1, self.model.n + 1)

    @property
    def egress(self) -> range:
        """Egress port numbers."""
        return range(self.model.n + 1, 2 * self.model.n + 1)


@dataclass(frozen=True)
class Outcome:
    """What a command came to. `refused` says why part of it (`partly`) or all was not done."""

    rows: tuple[str, ...] = ()
    change: Change | None = None
    refused: str = ""
    partly: bool = False


@dataclass(frozen=True)
class Rule:
    """A verb: its act, how many parameters block 1 takes, and the names block 2 may hold.

    A viewer may only retrieve; `admin` is for administrators, and others are told `denial`.
    """

    act: Callable[[Request], Outcome]
    least: int = 0
    most: int = 0
    names: frozenset[str] = frozenset()
    admin: bool = False
    denial: str = "Permission denied"

    def check(self, command: Command, role: Role) -> None:
        """Raise `Denied` PICC where the role, IPMS or IPNV where the parameters do not fit."""
        looks = command.verb.startswith("RTRV-")
        if (self.admin and role is not Role.ADMIN) or (role is Role.VIEW and not looks):
            raise Denied("PICC", self.denial)
        given = len(command.positional)
        if given < self.least:
            raise Denied("IPMS", f"Too few parameters ({given}/{self.least}) in block 1")
        if given > self.most:
            extra = command.positional[self.most]
            raise Denied("IPNV", f"Unexpected parameter {extra} in block 1")
        for name in command.named:
            if name not in self.names:
                raise Denied("IPNV", f"Unexpected parameter {name} in block 2")


def number(text: str, least: float, most: float) -> float:
    """Read a number, in brackets or not; raise `Denied` IPNV, or SSTP where out of range."""
    try:
        value = float(text.removeprefix("(").removesuffix(")"))
    except ValueError as error:
        raise Denied("IPNV", f"Parameter not valid: {text}") from error
    if not least <= value <= most:
        raise Denied("SSTP", f"Value out of range: {text}")
    return value


def whole(text: str, least: int, most: int) -> int:
    """Read a whole number; errors as for `number`."""
    if not text.isascii() or not text.isdecimal():
        raise Denied("IPNV", f"Parameter not valid: {text}")
    return int(number(text, least, most))
