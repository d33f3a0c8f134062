"""Device URLs: what is understood, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.address import Credentials, SerialAddress, SshAddress, TcpAddress, parse
from drivers.errors import BadAddress


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("serial:///dev/ttyUSB0?baud=9600", SerialAddress("/dev/ttyUSB0", 9600)),
        ("serial:///dev/ttyUSB0", SerialAddress("/dev/ttyUSB0", 38400)),
        (
            "serial:///dev/ttyS1?baud=19200&bytesize=7&parity=e&stopbits=2",
            SerialAddress("/dev/ttyS1", 19200, 7, "E", "2"),
        ),
        ("ssh://admin@10.0.0.5:6252", SshAddress("admin", "10.0.0.5", 6252)),
        ("ssh://admin@ocs-3.lab", SshAddress("admin", "ocs-3.lab", 22)),
        ("tcp://10.0.0.5:5025", TcpAddress("10.0.0.5", 5025)),
        ("tcp://admin@[fd00::5]:3082", TcpAddress("fd00::5", 3082, "admin")),
    ],
)
def test_a_url_is_parsed_and_printed_so_that_it_parses_again(url: str, address: object) -> None:
    assert parse(url) == address
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("10.0.0.5:5025", "use serial:///"),
        ("http://10.0.0.5:80", "scheme 'http'"),
        ("tcp://10.0.0.5", "names no port: tcp://10.0.0.5:PORT"),
        ("tcp://:5025", "names no host"),
        ("tcp://host:70000", "1 to 65535"),
        ("tcp://host:0", "1 to 65535"),
        ("tcp://host:5025/path", "must end after the port"),
        ("tcp://host:5025#x", "fragment"),
        ("ssh://10.0.0.5:6252", "names no user: ssh://USER@10.0.0.5:6252"),
        ("serial://dev/ttyUSB0", "three slashes: serial:///dev/ttyUSB0"),
        ("serial:///", "names no device file"),
        ("serial:///dev/ttyUSB0?speed=9600", "'speed', which is not one of baud"),
        ("serial:///dev/ttyUSB0?baud=fast", "positive number"),
        ("serial:///dev/ttyUSB0?baud=1&baud=2", "twice"),
        ("serial:///dev/ttyUSB0?bytesize=9", "use 5, 6, 7 or 8"),
        ("serial:///dev/ttyUSB0?parity=X", "one of N, E, O"),
        ("serial:///dev/ttyUSB0?stopbits=3", "one of 1, 1.5, 2"),
    ],
)
def test_a_wrong_url_says_what_would_be_right(url: str, says: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse(url)
    assert says in str(caught.value)


@pytest.mark.parametrize("url", ["ssh://admin:s3cret@h:22", "tcp://u:s3cret@h:3082"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse(url)
    assert "s3cret" not in str(caught.value)
    assert "environment" in str(caught.value)


def test_credentials_never_print_the_password() -> None:
    credentials = Credentials("admin", "s3cret", Path("key"), Path("hosts"))
    assert "s3cret" not in f"{credentials!r} {credentials}"
    assert credentials.secrets() == ("s3cret",)
