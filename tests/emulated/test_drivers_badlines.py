"""What goes wrong on real lines, each ending in a named cause and a known map."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import asyncssh
import pytest
from driver_bench import EXCHANGE_NS, PASSWORD, USER, Unit, emulated, first_line, stop

from drivers.address import Credentials
from drivers.apply import apply, wait_for_light
from drivers.base import Matching, Ocs, PortState
from drivers.catalog import open_ocs
from drivers.emulators.config import Faults
from drivers.errors import (
    AccessDenied,
    DeadlineExpired,
    Garbled,
    Indeterminate,
    LinkLost,
    NoLight,
    Refused,
    Unreachable,
    Untrusted,
)

OURS = frozenset(range(1, 17))
STRAIGHT = Matching.of((a, a + 8) for a in range(1, 9))
TURNED = Matching.of((a, 9 + a % 8) for a in range(1, 9))
SHORT_NS = 1_000_000_000
LIMIT_S = 20.0


def put(ocs: Ocs, wanted: Matching) -> None:
    apply(ocs, wanted, OURS, deadline_ns=time.monotonic_ns() + 20_000_000_000)


def open_url(url: str, driver: str, credentials: Credentials, **limits: int) -> Ocs:
    limits.setdefault("exchange_timeout_ns", EXCHANGE_NS)
    return open_ocs(driver, url, name="agg0", credentials=credentials, **limits)


@pytest.fixture(scope="module")
def ssh_unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    with emulated(tmp_path_factory.mktemp("ssh"), "tl1", "ssh") as unit:
        yield unit


# -- opening --------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "driver"),
    [("ssh://admin@127.0.0.1:{}", "polatis-tl1"), ("tcp://127.0.0.1:{}", "polatis-scpi")],
)
def test_an_unreachable_host_is_named(url: str, driver: str) -> None:
    url = url.format(closed_port())
    with pytest.raises(Unreachable) as caught:
        open_url(url, driver, Credentials(password="x"))
    assert str(caught.value).startswith(f"{url}: cannot connect to 127.0.0.1 port")
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


@contextmanager
def silent_server() -> Iterator[int]:
    """Accept one connection (in the kernel) and never say a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "driver"),
    [("ssh://admin@127.0.0.1:{}", "polatis-tl1"), ("tcp://127.0.0.1:{}", "polatis-scpi")],
)
def test_a_host_that_never_answers_ends_at_our_deadline(url: str, driver: str) -> None:
    with silent_server() as port, pytest.raises((DeadlineExpired, Unreachable)):
        open_url(
            url.format(port),
            driver,
            Credentials(password="x"),
            open_timeout_ns=SHORT_NS,
            exchange_timeout_ns=SHORT_NS,
        )


def test_a_wrong_password_over_ssh_is_denied_and_not_shown(ssh_unit: Unit) -> None:
    wrong = Credentials(USER, "wr0ng", known_hosts=ssh_unit.credentials.known_hosts)
    with pytest.raises(AccessDenied, match="the password was refused") as caught:
        open_url(ssh_unit.url, "polatis-tl1", wrong)
    assert "wr0ng" not in str(caught.value)


def test_no_secret_at_all_over_ssh_says_so(ssh_unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    nothing = Credentials(known_hosts=ssh_unit.credentials.known_hosts)
    with pytest.raises(AccessDenied, match="no password and no key file given"):
        open_url(ssh_unit.url, "polatis-tl1", nothing)


def test_a_key_file_that_is_not_there_is_named(ssh_unit: Unit, tmp_path: Path) -> None:
    missing = Credentials(
        key_file=tmp_path / "id_none", known_hosts=ssh_unit.credentials.known_hosts
    )
    with pytest.raises(AccessDenied, match=r"no key file .*id_none"):
        open_url(ssh_unit.url, "polatis-tl1", missing)


@pytest.mark.parametrize("known", ["empty", "missing", "none"])
def test_an_unknown_host_key_is_refused_with_the_line_that_would_trust_it(
    ssh_unit: Unit, tmp_path: Path, known: str
) -> None:
    file = tmp_path / "known_hosts"
    if known == "empty":
        file.write_text("")
    credentials = Credentials(USER, PASSWORD, known_hosts=None if known == "none" else file)
    with pytest.raises(Untrusted) as caught:
        open_url(ssh_unit.url, "polatis-tl1", credentials)
    message = str(caught.value)
    assert "SHA256:" in message
    assert known == "none" or str(file) in message
    assert not file.exists() or file.read_text() == "", "a key was added to the file"
    line = message.rpartition("add this line: ")[2]
    file.write_text(line + "\n")
    trusting = Credentials(USER, PASSWORD, known_hosts=file)
    with closing(open_url(ssh_unit.url, "polatis-tl1", trusting)) as ocs:
        assert ocs.identify().vendor == "Polatis"


def test_a_changed_host_key_is_refused_with_both_fingerprints(
    ssh_unit: Unit, tmp_path: Path
) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519")
    host = re.sub(r"ssh://admin@(.*):(\d+)", r"[\1]:\2", ssh_unit.url)
    file = tmp_path / "known_hosts"
    file.write_text(f"{host} {other.export_public_key().decode()}")
    before = file.read_text()
    with pytest.raises(Untrusted, match="host key has CHANGED") as caught:
        open_url(ssh_unit.url, "polatis-tl1", Credentials(USER, PASSWORD, known_hosts=file))
    assert other.get_fingerprint() in str(caught.value)
    assert str(caught.value).count("SHA256:") == 2
    assert str(file) in str(caught.value)
    assert file.read_text() == before


def test_a_wrong_tl1_login_over_tcp_is_denied(tmp_path: Path) -> None:
    with emulated(tmp_path, "tl1", "tcp") as unit:
        with pytest.raises(AccessDenied, match="TL1 login of user 'admin' refused: PICC"):
            open_url(unit.url, "polatis-tl1", Credentials(USER, "wr0ng"))
        with pytest.raises(AccessDenied, match="asks for a TL1 login"):
            open_url(unit.url, "polatis-tl1", Credentials())


def test_a_missing_serial_device_is_named(tmp_path: Path) -> None:
    url = f"serial://{tmp_path}/ttyUSB7?baud=38400"
    with pytest.raises(Unreachable, match=r"no serial device .*ttyUSB7: is the adapter plugged"):
        open_url(url, "polatis-scpi", Credentials())


HOLDER = """
import sys, serial
port = serial.serial_for_url(sys.argv[1], exclusive=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_serial_device_held_by_another_process_is_named_and_left_alone(tmp_path: Path) -> None:
    with emulated(tmp_path, "scpi", "serial") as unit:
        path = unit.url.removeprefix("serial://").partition("?")[0]
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert first_line(holder) == b"held\n"
            with pytest.raises(Unreachable, match="held by another process"):
                unit.open()
        finally:
            assert holder.stdin is not None
            holder.stdin.close()
            assert holder.wait(LIMIT_S) == 0
            stop(holder)
        with closing(unit.open()) as ocs:
            assert len(ocs.read()) == 0


def test_a_wrong_baud_rate_is_suspected(tmp_path: Path) -> None:
    with (
        emulated(tmp_path, "scpi", "serial") as unit,
        pytest.raises((Garbled, DeadlineExpired), match="check baud rate"),
    ):
        open_url(
            unit.url.replace("38400", "9600"),
            "polatis-scpi",
            Credentials(),
            exchange_timeout_ns=SHORT_NS,
        )


def test_stale_bytes_on_a_serial_line_answer_nothing() -> None:
    """A unit that still owes an earlier program an answer, and says half of it while we open."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    answers = {
        b"*IDN?": b"Polatis,N-VST-8x8-LU1-DMHNV,1,6.7\r\n",
        b":OXC:SWIT:CONN:STAT?": b"(@1),(@9)\r\n",
    }

    def device() -> None:
        os.write(master, b"(@5),(@13)\r\n0,")
        buffer = b""
        while b"STAT?" not in buffer:
            buffer += os.read(master, 100)
            while b"\r\n" in buffer:
                line, _, buffer = buffer.partition(b"\r\n")
                if line in answers:
                    os.write(master, answers[line])
                if b"STAT?" in line:
                    return

    thread = threading.Thread(target=device)
    try:
        thread.start()
        url = f"serial://{os.ttyname(slave)}"
        with closing(open_url(url, "polatis-scpi", Credentials())) as ocs:
            assert ocs.read() == Matching.of([(1, 9)])
        thread.join(LIMIT_S)
    finally:
        os.close(slave)
        os.close(master)


# -- in the middle --------------------------------------------------------------------------------

FACES = [("scpi", "serial"), ("scpi", "tcp"), ("tl1", "ssh"), ("tl1", "tcp")]


@pytest.mark.parametrize(("protocol", "server"), [f for f in FACES if f[1] != "serial"])
def test_a_reply_cut_in_the_middle_is_a_lost_line_and_then_works_again(
    tmp_path: Path, protocol: str, server: str
) -> None:
    # The fourth query after opening: opening itself asks one (SCPI) or two (TL1) of them.
    faults = Faults(cut_reply=4)
    with (
        emulated(tmp_path, protocol, server, faults=faults, circuits=((1, 9),)) as unit,
        closing(unit.open(exchange_ns=SHORT_NS)) as ocs,
    ):
        faults_met = 0
        for _ in range(4):
            try:
                assert ocs.read() == Matching.of([(1, 9)])
            except LinkLost:
                faults_met += 1
        assert faults_met == 1


@pytest.mark.parametrize(("protocol", "server"), FACES)
def test_a_unit_that_dies_in_a_change_leaves_the_map_unknown_and_says_between_what(
    tmp_path: Path, protocol: str, server: str
) -> None:
    faults = Faults(die_on_command=2)
    with (
        emulated(tmp_path, protocol, server, faults=faults, circuits=tuple(STRAIGHT)) as unit,
        closing(unit.open(exchange_ns=SHORT_NS)) as ocs,
    ):
        with pytest.raises(Indeterminate, match="could not be read back") as caught:
            put(ocs, TURNED)
        assert "make 1->10" in str(caught.value)
        assert unit.process.wait(LIMIT_S) == -signal.SIGKILL
        with pytest.raises((Unreachable, LinkLost)):
            ocs.read()


@pytest.mark.parametrize(("protocol", "server"), FACES)
def test_one_pair_denied_of_many_restores_the_old_map_and_names_the_pair(
    tmp_path: Path, protocol: str, server: str
) -> None:
    before = Matching.of(c for c in STRAIGHT if c != (4, 12))
    with (
        emulated(
            tmp_path,
            protocol,
            server,
            faults=Faults(deny_ports=(12,)),
            circuits=tuple(before),
        ) as unit,
        closing(unit.open()) as ocs,
    ):
        with pytest.raises(Refused) as caught:
            put(ocs, TURNED)
        assert "3->12 missing" in str(caught.value)
        assert "the previous map is restored" in str(caught.value)
        assert caught.value.code == ("SROF" if protocol == "tl1" else "-200")
        assert ocs.read() == before


def test_autonomous_messages_are_kept_as_events(ssh_unit: Unit) -> None:
    with closing(ssh_unit.open()) as ocs, closing(ssh_unit.open(name="second")) as other:
        put(ocs, STRAIGHT)
        put(other, TURNED)
        assert ocs.read() == TURNED
        assert any("1,10" in row for event in ocs.events() for row in event.rows)


def test_a_failed_mirror_gives_no_light_and_the_others_do(tmp_path: Path) -> None:
    faults = Faults(failed_ports=(2,))
    with (
        emulated(tmp_path, "scpi", "tcp", faults=faults) as unit,
        closing(unit.open()) as ocs,
    ):
        put(ocs, STRAIGHT)
        with pytest.raises(NoLight) as caught:
            wait_for_light(ocs, range(9, 17), -50.0, time.monotonic_ns() + SHORT_NS)
        assert set(caught.value.ports) == {10}
        assert ocs.port_states([1, 2]) == {1: PortState.ENABLED, 2: PortState.FAILED}
        ocs.set_shutter([3], closed=True)
        assert ocs.port_states([3]) == {3: PortState.DISABLED}
        limit = time.monotonic_ns() + SHORT_NS
        while ocs.power_dbm([11])[11] > -50:  # the meter averages over some ms
            assert time.monotonic_ns() < limit, "light passes a closed shutter"


def test_a_transcript_of_a_login_holds_no_password(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    with emulated(tmp_path, "tl1", "tcp") as unit, closing(unit.open(transcript=path)) as ocs:
        ocs.read()
    text = path.read_text()
    assert "ACT-USER" in text
    assert PASSWORD not in text
    assert "RTRV-PATCH" in text
