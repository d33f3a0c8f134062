"""An emulated unit as its users meet it: a process, a tty, a TCP port, an SSH server."""

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import paramiko
import pytest
import serial

from drivers.emulators.config import EmulatedSwitch, Face, Faults, Ready, Timing
from drivers.emulators.process import serve
from drivers.errors import Misuse

LIMIT_S = 10.0
TCP_SCPI = Face(protocol="scpi", server="tcp")
TCP_TL1 = Face(protocol="tl1", server="tcp")


class Started:
    """A unit in its own process."""

    def __init__(self, config: EmulatedSwitch, folder: Path) -> None:
        path = folder / f"{config.name}.json"
        path.write_bytes(msgspec.json.encode(config))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drivers.emulators", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate(timeout=LIMIT_S)[1].decode())
        self.ready = msgspec.json.decode(line, type=Ready)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start units from their faces and settings; all are gone afterwards."""
    started: list[Started] = []

    def one(*faces: Face, name: str = "agg0", **settings: object) -> Started:
        config = EmulatedSwitch(name=name, ports=4, faces=faces, **settings)
        started.append(Started(config, tmp_path))
        return started[-1]

    yield one
    for unit in started:
        unit.close()


class Wire:
    """A TCP client that reads until what it waits for is there."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("tcp://").rpartition("@")[2].split(":")
        self.socket = socket.create_connection((host, int(port)), LIMIT_S)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, command: str, until: str = "\r\n") -> str:
        self.socket.sendall(command.encode())
        return self.read(until)

    def read(self, until: str) -> str:
        got = b""
        while until.encode() not in got:
            more = self.socket.recv(4096)
            if not more:
                raise EOFError(got.decode())
            got += more
        return got.decode()


def test_serves_from_a_session_of_its_own_until_it_is_told_to_stop(start, tmp_path):
    link = tmp_path / "tty"
    unit = start(TCP_SCPI, Face(protocol="scpi", server="serial", link=str(link)))
    assert unit.ready.pid == unit.process.pid == os.getsid(unit.process.pid)
    assert unit.ready.light == "none"
    assert unit.ready.urls[1] == f"serial://{link}?baud=38400"
    with Wire(unit.ready.urls[0]) as client:
        assert "N-VST-4x4" in client.ask("*IDN?\n")
        assert unit.stop() == 0
    assert not os.path.lexists(link)
    with pytest.raises(ConnectionRefusedError):
        Wire(unit.ready.urls[0])


def test_all_ways_in_lead_to_one_map(start, tmp_path):
    tty = Face(protocol="scpi", server="serial", link=str(tmp_path / "tty"))
    unit = start(TCP_SCPI, TCP_TL1, tty)
    with Wire(unit.ready.urls[0]) as scpi, Wire(unit.ready.urls[1]) as tl1:
        tl1.ask("ENT-PATCH::1&2,6&7:c1:;", "COMPLD")
        assert scpi.ask(":OXC:SWIT:CONN:STAT?\n") == "(@1,2),(@6,7)\r\n"
        with serial.Serial(tty.link, 38400, timeout=LIMIT_S) as line:
            line.write(b":OXC:SWIT:CONN:ADD (@1),(@5);STAT?\r\n")
            assert line.readline() == b"(@1,2),(@5,7)\r\n"


def test_a_report_lands_between_a_command_and_its_answer(start):
    unit = start(TCP_TL1, TCP_TL1)
    with Wire(unit.ready.urls[0]) as one, Wire(unit.ready.urls[1]) as other:
        assert other.ask("RTRV-HDR:::w:;", "COMPLD").startswith(">\r\n\n   agg0 ")
        said = one.ask("ENT-PATCH::1,6:c1:;", "M  c1 COMPLD")
        assert 0 < said.index("REPT EVT PATCH") < said.index("M  c1 COMPLD")
        assert '"1,6:CONNECTED"' in other.read("1,6:CONNECTED")


def test_each_connection_has_its_own_errors(start):
    unit = start(TCP_SCPI)
    with Wire(unit.ready.urls[0]) as one, Wire(unit.ready.urls[0]) as other:
        assert one.ask("BAD\nSYST:ERR?\n").startswith("-113")
        assert other.ask("SYST:ERR?\n").startswith("0,")


def test_answers_as_late_as_told_and_in_order(start):
    unit = start(TCP_SCPI, timing=Timing(answer_ms=100))
    with Wire(unit.ready.urls[0]) as client:
        begun = time.monotonic()
        assert client.ask("*OPC?\n*STB?\n", "0\r\n") == "1\r\n0\r\n"
        assert time.monotonic() - begun >= 0.1


# -- serial ----------------------------------------------------------------------------------------


@pytest.fixture
def tty(tmp_path: Path) -> Face:
    return Face(protocol="scpi", server="serial", baud=9600, link=str(tmp_path / "tty"))


def test_a_serial_line_takes_its_time_both_ways(start, tty):
    start(tty)
    with serial.Serial(tty.link, 9600, timeout=LIMIT_S) as line:
        command = b"*IDN?" + b" " * 40 + b"\r\n"
        begun = time.monotonic()
        line.write(command)
        reply = line.readline()
        taken = time.monotonic() - begun
    assert taken >= (len(command) + len(reply)) * 10 / 9600


def test_a_serial_line_may_be_closed_and_opened_again(start, tty):
    start(tty)
    for _ in range(3):
        with serial.Serial(tty.link, 9600, timeout=LIMIT_S, exclusive=True) as line:
            line.write(b"*OPC?\r\n")
            assert line.readline() == b"1\r\n"


def test_at_another_speed_the_unit_reads_garbage(start, tty):
    start(tty)
    with serial.Serial(tty.link, 38400, timeout=0.2) as line:
        line.write(b"*OPC?\r\n" * 8)
        assert b"1\r\n" not in line.read(100)
    with serial.Serial(tty.link, 9600, timeout=LIMIT_S) as line:
        line.write(b"\r\n*CLS\r\n*OPC?\r\n")
        assert line.readline() == b"1\r\n"


def test_at_another_speed_the_client_reads_garbage(start, tmp_path):
    line_face = Face(protocol="tl1", server="serial", link=str(tmp_path / "tty"))
    unit = start(TCP_SCPI, line_face)
    with Wire(unit.ready.urls[0]) as scpi, serial.Serial(line_face.link, 9600) as line:
        line.timeout = LIMIT_S
        scpi.socket.sendall(b":OXC:SWIT:CONN:ADD (@1),(@5)\n")
        heard = line.read(8)
        assert len(heard) == 8
        assert heard not in b"\r\n\n   agg0 "
        assert b"REPT" not in heard


def test_a_killed_unit_leaves_a_link_that_the_next_one_takes_over(start, tty):
    first = start(tty)
    with serial.Serial(tty.link, 9600, timeout=LIMIT_S) as line:
        first.process.kill()
        first.process.wait(LIMIT_S)
        with pytest.raises(serial.SerialException):
            line.read(1)
    assert os.path.islink(tty.link)
    start(tty)
    with serial.Serial(tty.link, 9600, timeout=LIMIT_S) as line:
        line.write(b"*OPC?\r\n")
        assert line.readline() == b"1\r\n"


# -- SSH -------------------------------------------------------------------------------------------


@pytest.fixture
def ssh(tmp_path: Path) -> Face:
    password = tmp_path / "password"
    password.write_text("correct horse\n")
    password.chmod(0o600)
    return Face(
        protocol="tl1",
        server="ssh",
        user="admin",
        password_file=str(password),
        host_key_file=str(tmp_path / "host_key"),
    )


def log_in(ready: Ready, folder: Path, password: str) -> paramiko.SSHClient:
    known = folder / "known_hosts"
    known.write_text(ready.host_keys[0] + "\n")
    user, host, port = re.fullmatch(r"ssh://(\w+)@(.+):(\d+)", ready.urls[0]).groups()
    client = paramiko.SSHClient()
    client.load_host_keys(str(known))
    try:
        client.connect(
            host,
            int(port),
            user,
            password,
            timeout=LIMIT_S,
            allow_agent=False,
            look_for_keys=False,
        )
    except paramiko.SSHException:
        client.close()
        raise
    return client


def shell_says(client: paramiko.SSHClient, command: str, until: str) -> str:
    channel = client.invoke_shell()
    channel.settimeout(LIMIT_S)
    channel.sendall(command.encode())
    got = ""
    while until not in got:
        more = channel.recv(4096)
        assert more, f"closed after {got!r}"
        got += more.decode()
    return got


def test_ssh_greets_with_a_prompt_and_is_logged_in(start, ssh, tmp_path):
    unit = start(ssh)
    with log_in(unit.ready, tmp_path, "correct horse") as client:
        said = shell_says(client, "RTRV-EQPT::SYSTEM:c1:::PARAMETER=SIZE;", ";\r\n>")
        assert said.startswith(">\r\n\n   agg0 ")
        assert 'M  c1 COMPLD\r\n   "SYSTEM:SIZE=4x4"\r\n' in said
        assert "Already logged in" in shell_says(client, "ACT-USER::admin:c2::x;", ";\r\n>")


def test_a_wrong_password_is_refused(start, ssh, tmp_path):
    unit = start(ssh)
    with pytest.raises(paramiko.AuthenticationException):
        log_in(unit.ready, tmp_path, "battery staple")


def test_the_host_key_is_private_and_stays_the_same(start, ssh):
    first = start(ssh).ready.host_keys[0]
    assert stat.S_IMODE(os.stat(ssh.host_key_file).st_mode) == 0o600
    second = start(ssh, name="again").ready.host_keys[0]
    assert re.match(r"\[127\.0\.0\.1\]:\d+ ssh-ed25519 ", first)
    assert first.split()[1:] == second.split()[1:]


def test_tl1_over_tcp_asks_for_the_same_login(start, ssh):
    face = msgspec.structs.replace(ssh, server="tcp", host_key_file=None)
    unit = start(face)
    assert unit.ready.urls[0].startswith("tcp://admin@127.0.0.1:")
    with Wire(unit.ready.urls[0]) as client:
        assert "Not logged in" in client.ask("RTRV-PATCH:::1:;", ";\r\n>")
        client.ask("ACT-USER::admin:2::correct horse;", "M  2 COMPLD")
        client.ask("RTRV-PATCH:::3:;", "M  3 COMPLD")


def test_a_user_made_over_tcp_may_log_in_over_ssh_and_only_look(start, ssh, tmp_path):
    tcp = msgspec.structs.replace(ssh, server="tcp", host_key_file=None)
    unit = start(ssh, tcp)
    with Wire(unit.ready.urls[1]) as client:
        client.ask("ACT-USER::admin:1::correct horse;", "M  1 COMPLD")
        client.ask("ENT-USER-SECU::bob:2::word,,view;", "M  2 COMPLD")
    bob = msgspec.structs.replace(
        unit.ready, urls=(unit.ready.urls[0].replace("admin@", "bob@"), unit.ready.urls[1])
    )
    with log_in(bob, tmp_path, "word") as client:
        assert "M  c1 COMPLD" in shell_says(client, "RTRV-PATCH:::c1:;", ";\r\n>")
        assert "Permission denied" in shell_says(client, "ENT-PATCH::1,5:c2:;", ";\r\n>")


def test_two_faces_with_two_passwords_for_one_user_are_refused(ssh, tmp_path):
    other = tmp_path / "other"
    other.write_text("battery staple")
    other.chmod(0o600)
    tcp = msgspec.structs.replace(ssh, server="tcp", password_file=str(other))
    with pytest.raises(AssertionError, match="another face gives admin another password"):
        Started(EmulatedSwitch(name="agg0", faces=(ssh, tcp)), tmp_path)


def test_a_pulse_shows_in_the_power_that_is_read(start):
    unit = start(TCP_TL1, circuits=((1, 5),))
    with Wire(unit.ready.urls[0]) as client:
        client.ask("ENT-PORT-FLAP::1:1::60000,1,1;", ";\r\n>")
        client.ask("OPR-PORT-FLAP::1:2:;", ";\r\n>")
        deadline = time.monotonic() + LIMIT_S
        while '"5:-60.00"' not in client.ask("RTRV-PORT-POWER::5:3:;", ";\r\n>"):
            assert time.monotonic() < deadline


# -- faults ----------------------------------------------------------------------------------------


def test_dies_in_the_middle_of_its_answer(start):
    unit = start(TCP_TL1, faults=Faults(die_on_command=2))
    with Wire(unit.ready.urls[0]) as client:
        client.ask("ENT-PATCH::1,5:c1:;", "M  c1 COMPLD")
        with pytest.raises((EOFError, ConnectionResetError)) as lost:
            client.ask("ENT-PATCH::2,6:c2:;", "M  c2 COMPLD")
    assert "c2 COMPLD" not in str(lost.value)
    assert unit.process.wait(LIMIT_S) == -signal.SIGKILL


def test_cuts_the_line_in_the_middle_of_a_reply(start):
    unit = start(TCP_SCPI, faults=Faults(cut_reply=2))
    with Wire(unit.ready.urls[0]) as client:
        client.ask("*OPC?\n")
        with pytest.raises(EOFError, match="Polatis") as lost:
            client.ask("*IDN?\n")
        assert "\r\n" not in str(lost.value)
    with Wire(unit.ready.urls[0]) as client:
        assert client.ask("*IDN?\n").endswith("\r\n")


def wait_for_link(link: str) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not os.path.lexists(link):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return os.readlink(link)


def test_a_cut_serial_line_is_an_adapter_that_comes_back_under_its_link(start, tty):
    start(tty, faults=Faults(cut_reply=1))
    first = os.readlink(tty.link)
    with serial.Serial(tty.link, 9600, timeout=LIMIT_S) as line:
        line.write(b"*IDN?\r\n")
        with pytest.raises(serial.SerialException):
            line.read(100)
        # Still held by us, the old number is not given away again.
        assert wait_for_link(tty.link) != first
    with serial.Serial(tty.link, 9600, timeout=LIMIT_S) as line:
        line.write(b"*OPC?\r\n")
        assert line.readline() == b"1\r\n"


def test_obeys_and_says_nothing(start):
    unit = start(TCP_SCPI, TCP_TL1, faults=Faults(lose_reply=1))
    with Wire(unit.ready.urls[0]) as client:
        client.socket.sendall(b":OXC:SWIT:CONN:ADD (@1),(@5)\n*IDN?\n")
        assert client.ask(":OXC:SWIT:CONN:STAT?\n") == "(@1),(@5)\r\n"
    with Wire(start(TCP_TL1, name="b", faults=Faults(lose_reply=1)).ready.urls[0]) as client:
        client.socket.sendall(b"ENT-PATCH::1,5:c1:;")
        said = client.ask("RTRV-PATCH:::c2:;", '   "1,5"\r\n')
        assert "M  c2 COMPLD" in said
        assert "M  c1" not in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"name": "agg0", "faces": [], "prots": 4}, "unknown field `prots`"),
        ({"name": "agg0", "faces": [{"protocol": "scpi", "server": "udp"}]}, "$.faces[0].server"),
        ({"name": "agg0", "ports": 4, "faces": [], "circuits": [[1, 9]]}, "agg0: no such port"),
        ({"name": "a", "faces": [{"protocol": "tl1", "server": "ssh"}]}, "user and password_file"),
        (
            {"name": "a", "faces": [{"protocol": "scpi", "server": "serial", "baud": 38401}]},
            "baud 38401",
        ),
        (
            {"name": "a", "faces": [{"protocol": "scpi", "server": "serial", "link": "{folder}"}]},
            "exists and is not a link",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_one_line(config, said, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(config).replace("{folder}", str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-m", "drivers.emulators", str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_password_that_others_may_read_is_refused(ssh, tmp_path):
    Path(ssh.password_file).chmod(0o644)
    config = EmulatedSwitch(name="agg0", faces=(ssh,))
    with pytest.raises(AssertionError, match="mode is 0644, must be 0600"):
        Started(config, tmp_path)


# -- inside another process ------------------------------------------------------------------------


def test_can_be_served_inside_a_running_loop():
    async def talk() -> tuple[bytes, str]:
        async with serve(EmulatedSwitch(name="agg0", faces=(TCP_SCPI,))) as ready:
            host, port = ready.urls[0].removeprefix("tcp://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"*OPC?\n")
            reply = await asyncio.wait_for(reader.readline(), LIMIT_S)
            writer.close()
            await writer.wait_closed()
        return reply, ready.urls[0]

    reply, url = asyncio.run(talk())
    assert reply == b"1\r\n"
    with pytest.raises(ConnectionRefusedError):
        Wire(url)


def test_never_kills_the_process_it_is_a_guest_in():
    async def enter() -> None:
        config = EmulatedSwitch(name="agg0", faces=(), faults=Faults(die_on_command=1))
        async with serve(config):
            pass

    with pytest.raises(Misuse, match="process of its own"):
        asyncio.run(enter())
