"""What must hold of how a device is reached: its URL, and where its secrets are. Pure.

URLs are never quoted: they are where a password ends up by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlsplit

from harness.model.bench import Switch, Tor

PATH_KEYS = ("known_hosts", "password_file", "key_file")
BAUD_MAX = 4_000_000

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PASSWORD = re.compile(r"//[^@]*:[^@]*@")


def url_problems(
    where: str, spec: Switch | Tor, examples: Mapping[str, str], *, live: bool
) -> Iterator[str]:
    """Yield what is wrong with the URL of the device at `where`, and with whom it trusts.

    `examples` has a good URL for each scheme that its driver speaks.
    """
    for problem in _url(spec, examples, live=live):
        yield f"{where}.url: {problem}"
    if live and spec.url.startswith("ssh://") and not spec.known_hosts:
        yield (
            f"{where}.known_hosts: missing; name the file that holds the device's host key "
            "(an unknown key is never accepted)"
        )


def secret_problems(where: str, spec: Switch | Tor) -> Iterator[str]:
    """Yield what is wrong with where the secrets of the device at `where` are."""
    if spec.password_env and not _VARIABLE.fullmatch(spec.password_env):
        yield f"{where}.password_env: expected the name of an environment variable"
    if spec.password_env and spec.password_file:
        yield f"{where}.password_file: password_env is set too; keep one of them"
    for key in PATH_KEYS:
        path = getattr(spec, key)
        if path.startswith("~") and not path.startswith("~/"):
            yield f"{where}.{key}: only your own home folder can be written with ~, as in ~/.ssh/id"


def is_address(text: str) -> bool:
    """Return whether `text` is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def bounded_int(digits: str) -> int:
    """Read digits; what is too long for a port or a rate reads as too large."""
    return int(digits) if len(digits) < 10 else 10**10


def _url(spec: Switch | Tor, examples: Mapping[str, str], *, live: bool) -> Iterator[str]:
    scheme, separator, rest = spec.url.partition("://")
    if not separator or scheme not in examples:
        right = " or ".join(f"{line}://" for line in examples)
        yield f"expected {right}, which {spec.driver} speaks"
        return
    if scheme != "serial" and _PASSWORD.search(spec.url):
        yield (
            "holds a password; take it out and name an environment variable in password_env, "
            "or a file with mode 0600 in password_file"
        )
        return
    example = examples[scheme]
    try:
        parts = urlsplit(spec.url)
        port = parts.port if scheme != "serial" else None
    except ValueError:  # the message would quote the URL
        yield f"malformed; expected {example}"
        return
    yield from _query(scheme, parts.query)
    if parts.fragment or (scheme != "serial" and parts.path.strip("/")):
        yield f"more than a host and a port; expected {example}"
    if not live:
        return
    if scheme == "serial" and (parts.netloc or not parts.path.strip("/")):
        yield f"expected the path of a device, such as {example}"
    if scheme != "serial" and not parts.hostname:
        yield f"names no host; expected {example}"
    if scheme == "tcp" and rest and port is None:
        yield f"names no port; expected {example}"
    if scheme == "ssh" and not parts.username:
        yield f"names no user; expected {example}"


def _query(scheme: str, query: str) -> Iterator[str]:
    for key, value in parse_qsl(query, keep_blank_values=True):
        if scheme != "serial" or key != "baud":
            yield "only ?baud= of a serial:// line can follow the address"
        elif not value.isascii() or not value.isdigit() or not 1 <= bounded_int(value) <= BAUD_MAX:
            yield "baud: expected a whole number, such as ?baud=38400"
