"""``python -m drivers.emulators.tor_server CONFIG.json``: a Linux ToR's SSH server, emulated.

It runs the real ``ip`` in the network namespace of one ToR (and, where told so, a real FRR's
``vtysh``): only the commands that steering needs, the rest is refused as a restricted shell does.
It listens in the namespace where it was started, as on a management port of its own. Prints one
line of JSON (`drivers.emulators.config.Ready`) when it answers, and serves until SIGTERM. Exit
status 2 and one line on standard error where it cannot start.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh
import msgspec

from drivers.emulators.config import EmulatedTor, Ready
from drivers.emulators.entry import main, until_stopped
from drivers.emulators.servers.keyfiles import host_key, read_secret
from drivers.errors import Misuse

LOGIN_S = 30
SUDO = ["sudo", "-n"]
FORBIDDEN = 126
CHANGES = ("add", "replace", "del")
_SHOW = ["route", "show", "table", "main", "proto"]
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@-]+")
_NOT_ROOT = "RTNETLINK answers: Operation not permitted\n"


class TorShell:
    """What the commands of all sessions do."""

    def __init__(self, config: EmulatedTor) -> None:
        self._config = config
        self._applies = 0

    async def serve(self, process: asyncssh.SSHServerProcess[str]) -> None:
        """Run one command of a client, as the faults allow, and answer."""
        try:
            words = shlex.split(process.command or "")
        except ValueError:
            words = []
        as_root = words[:2] == SUDO or self._config.user == "root"
        argv = words[2:] if words[:2] == SUDO else words
        if not (argv[:1] == ["vtysh"] and self._config.frr) and argv[:2] != ["ip", "-json"]:
            shown = argv[0] if argv else "shell"
            process.stderr.write(f"-rbash: {shown}: restricted\n")
            process.exit(FORBIDDEN)
        elif argv[0] == "vtysh":
            await self._vtysh(process, argv)
        elif argv[2:-1] == _SHOW and argv[-1].isdigit():
            await self._answer(process, *await self._ip(argv[1:]))
        elif argv[2:] == ["-batch", "-"]:
            await self._batch(process, (await process.stdin.read()).splitlines(), as_root=as_root)
        else:
            process.stderr.write("-rbash: ip: restricted\n")
            process.exit(FORBIDDEN)

    async def _batch(
        self, process: asyncssh.SSHServerProcess[str], lines: list[str], *, as_root: bool
    ) -> None:
        for number, line in enumerate(lines, 1):
            if not _is_route_command(line.split()):
                await self._answer(process, 1, "", f"restricted\nCommand failed -:{number}\n")
                return
        changes = [line for line in lines if line.split()[1] in CHANGES]
        if changes and not as_root:
            await self._answer(process, 2, "", f"{_NOT_ROOT}Command failed -:1\n")
            return
        if changes and await self._fails(process, lines):
            return
        denied = self._denied(lines)
        status, out, err = await self._ip(["-json", "-batch", "-"], lines[:denied])
        if denied is not None and status == 0:
            status, out, err = 1, "", f"{_NOT_ROOT}Command failed -:{denied + 1}\n"
        await self._answer(process, status, out, err, lost=self._is_lost(changes))

    async def _vtysh(self, process: asyncssh.SSHServerProcess[str], argv: list[str]) -> None:
        """Hand everything to the real one; half of an apply is half of its commands."""
        changes = "configure terminal" in argv
        if changes and await self._fails(process, argv):
            return
        done = await _run(["vtysh", "-N", self._config.frr, *argv[1:]], self._config.netns)
        await self._answer(process, *done, lost=self._is_lost(["x"] if changes else []))

    async def _fails(
        self, process: asyncssh.SSHServerProcess[str], commands: Sequence[str]
    ) -> bool:
        """Count an apply; half obey it where its end is the connection's, or ours."""
        self._applies += 1
        faults = self._config.faults
        if self._applies not in (faults.cut_apply, faults.die_on_apply):
            return False
        if commands[0] == "vtysh":
            half = list(commands[1 : 1 + len(commands) // 4 * 2])
            await _run(["vtysh", "-N", self._config.frr, *half], self._config.netns)
        else:
            await self._ip(["-batch", "-"], commands[: len(commands) // 2])
        if self._applies == faults.die_on_apply:
            os.kill(os.getpid(), signal.SIGKILL)
        process.channel.get_connection().abort()
        return True

    def _is_lost(self, changes: Sequence[str]) -> bool:
        return bool(changes) and self._applies == self._config.faults.lose_reply

    def _denied(self, lines: list[str]) -> int | None:
        denied = set(self._config.faults.deny_devices)
        found = (i for i, line in enumerate(lines) if denied & set(line.split()))
        return next(found, None)

    async def _ip(self, options: list[str], lines: Sequence[str] = ()) -> tuple[int, str, str]:
        return await _run(["ip", *options], self._config.netns, "".join(f"{x}\n" for x in lines))

    async def _answer(
        self,
        process: asyncssh.SSHServerProcess[str],
        status: int,
        out: str,
        err: str,
        *,
        lost: bool = False,
    ) -> None:
        await asyncio.sleep(self._config.faults.answer_ms / 1e3)
        if lost:
            await process.wait_closed()
            return
        process.stdout.write(out)
        process.stderr.write(err)
        process.exit(status)


async def _run(argv: list[str], netns: str, text: str = "") -> tuple[int, str, str]:
    """Run a program in `netns`; return its status and what it wrote."""
    command = ["ip", "-n", netns, *argv[1:]] if argv[0] == "ip" and netns else argv
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await child.communicate(text.encode())
    return child.returncode or 0, out.decode(), err.decode()


def _is_route_command(words: list[str]) -> bool:
    """Whether a line of a batch shows routes, or changes one, and does nothing else."""
    if words[:5] == _SHOW:
        return len(words) == 6 and words[5].isdigit()
    known = words[:1] == ["route"] and len(words) > 2 and words[1] in CHANGES
    return known and all(_PLAIN.fullmatch(word) for word in words)


class _Login(asyncssh.SSHServer):
    """One client's connection."""

    def __init__(
        self, config: EmulatedTor, password: str | None, clients: set[asyncssh.SSHServerConnection]
    ) -> None:
        self._config, self._password, self._clients = config, password, clients
        self._connection: asyncssh.SSHServerConnection

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._clients.add(conn)

    def begin_auth(self, username: str) -> bool:
        if self._config.authorized_keys and username == self._config.user:
            self._connection.set_authorized_keys(self._config.authorized_keys)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.discard(self._connection)

    def password_auth_supported(self) -> bool:
        return self._password is not None

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (self._config.user, self._password)


@asynccontextmanager
async def serve(config: EmulatedTor) -> AsyncIterator[Ready]:
    """Serve `config` on the running loop until the context is left."""
    password = read_secret(config.password_file) if config.password_file else None
    if password is None and config.authorized_keys is None:
        raise Misuse(f"{config.name}: nobody may log in: give password_file or authorized_keys")
    key = host_key(config.host_key_file)
    clients: set[asyncssh.SSHServerConnection] = set()
    acceptor = await asyncssh.listen(
        config.host,
        config.port,
        reuse_address=True,
        server_factory=lambda: _Login(config, password, clients),
        server_host_keys=[key],
        process_factory=TorShell(config).serve,
        allow_pty=False,
        login_timeout=LOGIN_S,
    )
    try:
        port = acceptor.get_port()
        public = " ".join(key.export_public_key().decode().split()[:2])
        yield Ready(
            pid=os.getpid(),
            urls=(f"ssh://{config.user}@{config.host}:{port}",),
            host_keys=(f"[{config.host}]:{port} {public}",),
            light="none",
        )
    finally:
        acceptor.close()
        for client in tuple(clients):
            client.abort()
        await acceptor.wait_closed()


def _work(path: Path) -> None:
    config = msgspec.json.decode(path.read_bytes(), type=EmulatedTor)
    asyncio.run(until_stopped(serve(config)))


if __name__ == "__main__":
    sys.exit(main("drivers.emulators.tor_server", _work))
