"""What an operator can set on the unit: names, times, and who may do what.

Pure data. It survives sessions, not the end of the process.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum


class Role(StrEnum):
    """What a user may do: everything, switch light, or only look."""

    ADMIN = "ADMIN"
    USER = "USER"
    VIEW = "VIEW"


@dataclass(frozen=True)
class Account:
    """Who may log in."""

    user: str
    password: str
    role: Role = Role.ADMIN

    def opens_with(self, password: str) -> bool:
        """Say whether this is the password, in a time that does not tell how much of it."""
        return hmac.compare_digest(password.encode(), self.password.encode())


@dataclass
class Settings:
    """What one unit is set to."""

    sid: str
    boot_mode: str = "RESTORE"
    timeout_min: dict[str, int] = field(default_factory=lambda: {"ADMIN": 0, "USER": 0})
    """TL1 idle logout by role, minutes; 0 is never. The factory setting is not documented."""
    reports_inhibited: bool = False
    labels: dict[int, str] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    """By user name. The unit's own login, where a face asks for one, is among them."""
    clock_ahead: timedelta = timedelta(0)
    """How far the unit's clock is ahead of this machine's."""
