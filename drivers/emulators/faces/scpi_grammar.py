"""SCPI-99 grammar as the unit reads it: headers in two forms, compound messages, channel lists.

Pure. Errors are `ScpiError` with the standard's code and text (-1xx command, -2xx execution).
"""

from __future__ import annotations

import itertools
import re

ERRORS = {
    0: "No error",
    -100: "Command error",
    -101: "Invalid character",
    -102: "Syntax error",
    -104: "Data type error",
    -108: "Parameter not allowed",
    -109: "Missing parameter",
    -113: "Undefined header",
    -200: "Execution error",
    -222: "Data out of range",
    -223: "Too much data",
    -224: "Illegal parameter value",
    -241: "Hardware missing",
    -350: "Queue overflow",
}

CHANNELS = re.compile(r"\(@([0-9:,\s+-]*)\)\Z")


class ScpiError(Exception):
    """A refusal; `detail` follows the standard text after a semicolon, as the standard has it."""

    def __init__(self, code: int, detail: str = "") -> None:
        self.code = code
        self.text = f"{ERRORS[code]};{detail}" if detail else ERRORS[code]
        super().__init__(f'{code},"{self.text}"')


def forms(pattern: str) -> list[str]:
    """Return every spelling of a header: each keyword in its long or its short form.

    ``SYSTem:ERRor?`` may be said ``SYST:ERR?``, ``SYSTEM:ERR?`` and so on; nothing in between.
    """
    query = "?" if pattern.endswith("?") else ""
    nodes = []
    for node in pattern.removesuffix("?").split(":"):
        short = "".join(c for c in node if not c.islower())
        nodes.append(sorted({node.upper(), short}))
    return [":".join(spelled) + query for spelled in itertools.product(*nodes)]


def split_outside(text: str, separator: str) -> list[str]:
    """Split at `separator`, but not inside quotes or parentheses."""
    if separator not in text:
        return [text]
    parts, start, depth, quote = [], 0, 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def resolve(header: str, path: str) -> str:
    """Return the header from the root: without a leading colon it continues the current path."""
    if header.startswith("*"):
        return header
    if header.startswith(":"):
        return header[1:]
    return path + header


def path_of(header: str, path: str) -> str:
    """Return the path after `header`: all but its last keyword; common commands leave it alone."""
    if header.startswith("*"):
        return path
    parent, colon, _ = header.rpartition(":")
    return parent + colon


def channels(text: str) -> list[int]:
    """Read ``(@1,2,5:8)``; ``(@)`` is empty. Raise `ScpiError` -102 or -224."""
    found = CHANNELS.match(text.strip())
    if not found:
        raise ScpiError(-102, text.strip())
    ports: list[int] = []
    for item in filter(None, (part.strip() for part in found[1].split(","))):
        low, colon, high = item.partition(":")
        try:
            first, last = int(low), int(high if colon else low)
        except ValueError as error:
            raise ScpiError(-102, item) from error
        if last < first or last - first > 100_000:
            raise ScpiError(-224, item)
        ports.extend(range(first, last + 1))
    return ports


def written(values: list[int] | list[str]) -> str:
    """Write a channel list."""
    return "(@" + ",".join(map(str, values)) + ")"
