"""Brings one emulated unit up: every face on one model, and the light it moves.

`serve` is a context: on leaving it the sockets, the ptys with their links and the light are given
back, on every way out. It raises `drivers.errors.Misuse` for a configuration that cannot be, and
`OSError` where a port or an interface is not to be had.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from drivers.base import NS_PER_MS
from drivers.emulators.config import EmulatedSwitch, Face, Faults, Ready
from drivers.emulators.faces import Session
from drivers.emulators.faces.scpi import ScpiSession
from drivers.emulators.faces.tl1 import Tl1Session
from drivers.emulators.faults import Fates
from drivers.emulators.light import open_light
from drivers.emulators.model import SwitchModel
from drivers.emulators.mover import Mover
from drivers.emulators.servers import Server, SessionMaker
from drivers.emulators.servers.keyfiles import read_secret
from drivers.emulators.settings import Account
from drivers.emulators.unit import Unit
from drivers.errors import Misuse


@asynccontextmanager
async def serve(
    config: EmulatedSwitch, *, reread: Callable[[], Faults] | None = None
) -> AsyncIterator[Ready]:
    """Serve `config` on the running loop until the context is left.

    `reread` says that this process is the unit and nothing else: only then may a fault kill it.
    SIGHUP has it break as `reread` then tells; what cannot be is logged, and changes nothing.
    """
    if config.faults.die_on_command and reread is None:
        raise Misuse(f"{config.name}: faults.die_on_command needs a process of its own")
    model = SwitchModel(config, Random(config.seed))  # noqa: S311 - switching times, no secret
    async with AsyncExitStack() as stack:
        light = open_light(config.light)
        stack.callback(light.close)
        # It has been up for long: no port waits for its link. So the mover and its hold come after.
        boot = model.boot(time.monotonic_ns(), light.lit())
        light.set({x.ingress: x.egress for x in boot.light})
        mover = Mover(light, hold_ns=round(config.light.hold_ms * NS_PER_MS))
        stack.callback(mover.close)
        fates, answer_ms = Fates(config.faults), config.timing.answer_ms
        unit = Unit(
            model, mover, fates, answer_ms=answer_ms, boot_ms=config.timing.boot_ms, die=_die
        )
        stack.callback(unit.close)
        if reread is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: unit.break_down(reread()))
            stack.callback(loop.remove_signal_handler, signal.SIGHUP)
        servers = []
        for face in config.faces:
            servers.append(await _serve_face(face, unit))
            stack.push_async_callback(servers[-1].close)
        yield Ready(
            pid=os.getpid(),
            urls=tuple(server.address.url for server in servers),
            host_keys=tuple(server.address.host_key for server in servers),
            light=light.kind,
        )


async def _serve_face(face: Face, unit: Unit) -> Server:
    """Start one face. Servers are imported when a face needs them: SSH alone takes 0.1 s."""
    _admit(face, unit.model.settings.accounts)
    session = _session_maker(face, unit.model)
    match face.server:
        case "serial":
            from drivers.emulators.servers.serial_pty import SerialServer  # noqa: PLC0415

            return SerialServer(face, unit, session)
        case "tcp":
            from drivers.emulators.servers.tcp import serve_tcp  # noqa: PLC0415

            return await serve_tcp(face, unit, session)
        case "ssh":
            from drivers.emulators.servers.ssh import serve_ssh  # noqa: PLC0415

            return await serve_ssh(face, unit, session)


def _session_maker(face: Face, model: SwitchModel) -> SessionMaker:
    if face.protocol == "scpi":
        return lambda user="": ScpiSession(model)
    asks = face.user is not None

    def session(user: str = "") -> Session:
        return Tl1Session(model, asks=asks, user=user)

    return session


def _admit(face: Face, accounts: dict[str, Account]) -> None:
    """Let the face's user in, as an administrator."""
    if face.user is None:
        return
    if face.password_file is None:
        raise Misuse(f"face {face.protocol} on {face.server}: user needs password_file")
    account = Account(face.user, read_secret(face.password_file))
    if accounts.setdefault(face.user, account) != account:
        raise Misuse(
            f"face {face.protocol} on {face.server}: another face gives {face.user}"
            " another password"
        )


def _die() -> None:
    """Die as a unit does whose power is cut."""
    os.kill(os.getpid(), signal.SIGKILL)
