"""TL1 commands about user accounts: who may log in, and as what.

Pure acts, listed in `USERS`. Only an administrator may make, change or delete accounts, and read
others' than his own. Errors: `Denied` with the codes seen on real units: PICC and SRCN for what is
not permitted, IDNV for a user that is there or is not, IPNV for a role that does not exist.
"""

from __future__ import annotations

import re

from drivers.emulators.faces.tl1_grammar import Denied
from drivers.emulators.faces.tl1_rules import Outcome, Request, Rule
from drivers.emulators.settings import Account, Role

WORD = re.compile(r"[A-Za-z0-9]*\Z")
"""What the unit takes as a name or a password; anything else is denied as not permitted."""
NOT_ADMIN = "User not in the admin group"


def _existing(request: Request) -> Account:
    found = request.model.settings.accounts.get(request.command.aid)
    if found is None:
        raise Denied("IDNV", "User does not exist")
    return found


def _padded(request: Request, count: int) -> list[str]:
    """Return block 1 filled up to `count` parameters; only the last may be other than a word."""
    given = [*request.command.positional, *[""] * count][:count]
    if not all(WORD.match(word) for word in (request.command.aid, *given[:-1])):
        raise Denied("PICC", "Permission denied")
    return given


def _role(text: str, otherwise: Role) -> Role:
    if text and text.upper() not in list(Role):
        raise Denied("IPNV", "Invalid user access privilege")
    return Role(text.upper()) if text else otherwise


def _enter(request: Request) -> Outcome:
    """Make an account: password, (unused), role; without a role it is a user's."""
    name, accounts = request.command.aid, request.model.settings.accounts
    if not name:
        raise Denied("IIAC", "Empty parameters")
    password, _, role = _padded(request, 3)
    if name in accounts:
        raise Denied("IDNV", "User exists")
    accounts[name] = Account(name, password, _role(role, Role.USER))
    return Outcome()


def _edit(request: Request) -> Outcome:
    """Change an account: new name, new password, (unused), new role.

    A name or role left out stays; a password left out is empty from then on, as on the unit.
    """
    accounts, before = request.model.settings.accounts, _existing(request)
    name, password, _, role = _padded(request, 4)
    name = name or before.user
    if name != before.user and name in accounts:
        raise Denied("IDNV", "User exists")
    after = Account(name, password, _role(role, before.role))
    del accounts[before.user]
    accounts[name] = after
    return Outcome()


def _delete(request: Request) -> Outcome:
    del request.model.settings.accounts[_existing(request).user]
    return Outcome()


def _users(request: Request) -> Outcome:
    """Answer name, (no password), role: of everybody, or of one."""
    name, accounts = request.command.aid, request.model.settings.accounts
    if request.sender.role is not Role.ADMIN and name != request.sender.user:
        raise Denied("SRCN", NOT_ADMIN)
    asked = accounts.values() if name.upper() in {"", "ALL"} else [_existing(request)]
    return Outcome(tuple(f"{account.user},,{account.role}" for account in asked))


USERS: dict[str, Rule] = {
    "ENT-USER-SECU": Rule(_enter, most=3, admin=True),
    "ED-USER-SECU": Rule(_edit, most=4, admin=True),
    "DLT-USER-SECU": Rule(_delete, admin=True, denial=NOT_ADMIN),
    "RTRV-USER-SECU": Rule(_users),
}
