"""TL1 grammar as the unit reads it: the blocks of a command, port lists, and its denials.

Pure. ``VERB-MOD-MOD:TID:AID:CTAG:general:block 1:block 2;`` where block 1 holds parameters by
position and block 2 by name. Errors are `Denied` with the unit's code and text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CTAG = re.compile(r"[A-Za-z0-9_.-]+\Z")
FIELDS_MAX = 7


class Denied(Exception):
    """The unit says no: a four-letter code and its words."""

    def __init__(self, code: str, text: str) -> None:
        self.code, self.text = code, text
        super().__init__(f"{code} {text}")


@dataclass(frozen=True)
class Command:
    """One command line, split. `positional` is block 1, `named` block 2; names in capitals."""

    verb: str
    tid: str
    aid: str
    ctag: str
    positional: tuple[str, ...]
    named: dict[str, str]


def fields(text: str, separator: str) -> list[str]:
    """Split at `separator` outside double quotes."""
    if '"' not in text:
        return text.split(separator)
    parts, start, quoted = [], 0, False
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif c == separator and not quoted:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def unquoted(text: str) -> str:
    """Take the double quotes off."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def ctag_of(text: str) -> str:
    """Return the ctag, for a reply to a command that cannot be read; "0" where there is none."""
    parts = fields(text, ":")
    return parts[3] if len(parts) > 3 and CTAG.match(parts[3]) else "0"


def parse(text: str) -> Command:
    """Split a command (without its semicolon); raise `Denied` IICT or IPNV."""
    parts = fields(text, ":")
    if len(parts) < 4:
        raise parse_error(len(text))
    if not CTAG.match(parts[3]):
        raise parse_error(len(":".join(parts[:3])) + 1)
    if len(parts) > FIELDS_MAX:
        raise parse_error(len(":".join(parts[:FIELDS_MAX])))
    verb, tid, aid, ctag, general, block1, block2 = parts + [""] * (FIELDS_MAX - len(parts))
    if general:
        raise parse_error(len(":".join(parts[:4])) + 1)
    named = {}
    for item in fields(block2, ",") if block2 else []:
        name, equals, value = item.partition("=")
        if not equals:
            raise Denied("IPNV", f"Unexpected parameter {item} in block 2")
        named[name.strip().upper()] = unquoted(value.strip())
    positional = tuple(unquoted(p.strip()) for p in fields(block1, ",")) if block1 else ()
    return Command(verb.strip().upper(), unquoted(tid), aid.strip(), ctag, positional, named)


def parse_error(offset: int) -> Denied:
    """Return the unit's word for a command it cannot read."""
    return Denied("IICT", f"Parse error at offset {offset} in command")


def ports(text: str, allowed: range) -> list[int]:
    """Read ``5``, ``1&2&3``, ``1&&640`` and mixtures; raise `Denied` IDNV or IIAC."""
    found: list[int] = []
    pending_range = False
    for item in text.split("&"):
        if not item:
            if pending_range or not found:
                raise Denied("IIAC", f"Bad port list: {text}")
            pending_range = True
            continue
        port = _port(item, allowed)
        if not pending_range:
            found.append(port)
        elif port <= found[-1]:
            raise Denied("IIAC", f"Bad port range: {found[-1]}&&{port}")
        else:
            found.extend(range(found[-1] + 1, port + 1))
        pending_range = False
    if pending_range:
        raise Denied("IIAC", f"Bad port list: {text}")
    if len(set(found)) != len(found):
        raise Denied("IIAC", "Port repeated")
    return found


def _port(item: str, allowed: range) -> int:
    if not item.isdecimal() or int(item) not in allowed:
        raise Denied("IDNV", f"Invalid OXC port: {item}")
    return int(item)
