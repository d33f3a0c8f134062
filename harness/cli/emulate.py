"""``harness emulate``: one emulated switch to play with, and a bench file that reaches it.

The unit answers like hardware, so the bench file says ``world = "live"``: `harness ocs` cannot tell
the difference. It moves no packets; `harness run` on an emulated bench does.
"""

from __future__ import annotations

import asyncio
import secrets
import selectors
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from drivers.emulators.config import EmulatedSwitch, Face, Faults, Ready, Timing
from drivers.emulators.process import serve
from drivers.emulators.servers.keyfiles import write_secret
from harness.cli.output import json_option
from harness.errors import UsageError

FACES: dict[str, Face] = {
    "scpi-serial": Face(protocol="scpi", server="serial"),
    "scpi-tcp": Face(protocol="scpi", server="tcp"),
    "tl1-ssh": Face(protocol="tl1", server="ssh"),
    "tl1-tcp": Face(protocol="tl1", server="tcp"),
}
USER = "admin"


@click.group()
def emulate() -> None:
    """Start an emulated switch to play with.

    \b
    harness emulate polatis --ports 16 --face scpi-serial --face tl1-ssh
    """


@emulate.command()
@click.option("--ports", type=click.IntRange(1, 576), default=16, show_default=True, metavar="N")
@click.option(
    "--face",
    "names",
    type=click.Choice(list(FACES)),
    multiple=True,
    default=("scpi-serial", "tl1-ssh"),
    show_default=True,
    help="A way in: protocol and line. May be given several times.",
)
@click.option("--switch-ms", type=click.FloatRange(min=0), default=25.0, show_default=True)
@click.option("--switch-sd-ms", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--answer-ms", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--failed-port", type=int, multiple=True, help="Its mirror does not lock: no light.")
@click.option("--deny-port", type=int, multiple=True, help="Connecting it is refused.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep password, host key and bench file here, to be used again.",
)
@json_option
def polatis(
    *,
    ports: int,
    names: tuple[str, ...],
    switch_ms: float,
    switch_sd_ms: float,
    answer_ms: float,
    failed_port: tuple[int, ...],
    deny_port: tuple[int, ...],
    seed: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Emulate a Polatis N x N unit until Ctrl-C: ingress ports 1..N, egress ports N+1..2N.

    Prints the address of every face, and commands to paste into another terminal.

    \b
    harness emulate polatis --ports 16 --face scpi-serial --face tl1-ssh
    harness emulate polatis --switch-ms 10 --face scpi-tcp --deny-port 3
    """
    timing = Timing(
        switch_ms=switch_ms,
        switch_sd_ms=switch_sd_ms,
        distribution="normal" if switch_sd_ms else "fixed",
        answer_ms=answer_ms,
    )
    with _kept(folder) as home:
        config = EmulatedSwitch(
            name="emulated-polatis",
            model=f"N-VST-{ports}x{ports}-LU1-DMHNV",
            ports=ports,
            seed=seed,
            timing=timing,
            faces=tuple(_face(name, home) for name in dict.fromkeys(names)),
            faults=Faults(failed_ports=failed_port, deny_ports=deny_port),
        )
        # select() waits with microseconds, epoll with milliseconds: serial pacing needs the former.
        loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_until_stopped(config, tuple(dict.fromkeys(names)), home, as_json=as_json))


async def _until_stopped(
    config: EmulatedSwitch, names: Sequence[str], home: Path, *, as_json: bool
) -> None:
    """Serve until Ctrl-C or SIGTERM; both are the ordinary end."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve(config) as ready:
        bench = home / "bench.toml"
        bench.write_text(_bench_file(config.ports, names, ready))
        (home / "known_hosts").write_text("".join(f"{key}\n" for key in ready.host_keys if key))
        if as_json:
            faces = dict(zip(names, ready.urls, strict=True))
            value = {"pid": ready.pid, "faces": faces, "bench": str(bench), "folder": str(home)}
            click.echo(msgspec.json.encode(value).decode())
        else:
            click.echo(_welcome(config, names, ready, home))
        await stopped.wait()


@contextmanager
def _kept(folder: Path | None) -> Iterator[Path]:
    """Yield the folder for password, keys and bench file: the one asked for, or one that goes."""
    if folder is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--dir {folder}: {error.strerror}") from error
        yield folder.resolve()
        return
    made = Path(tempfile.mkdtemp(prefix="harness-emulate-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def _face(name: str, home: Path) -> Face:
    """Return the face with the secrets that it needs, made where they are not there yet."""
    face = FACES[name]
    if face.protocol != "tl1":
        return face
    password = home / "password"
    if not password.exists():
        write_secret(str(password), f"{secrets.token_urlsafe(12)}\n".encode())
    return msgspec.structs.replace(
        face,
        user=USER,
        password_file=str(password),
        host_key_file=str(home / "host_key") if face.server == "ssh" else None,
    )


def _bench_file(ports: int, names: Sequence[str], ready: Ready) -> str:
    """Write a live bench whose switches are the unit's faces."""
    lines = [
        'name = "emulated-unit"',
        'world = "live"  # the unit answers like hardware',
        'launcher = "local"',
        "",
        "[tors.tor0]",
        "",
        "[nodes.n0]",
        'tor = "tor0"',
        'host = "127.0.0.1"',
        'interface = "lo"',
        'address = "127.0.0.1"',
    ]
    for name, url in zip(names, ready.urls, strict=True):
        face = FACES[name]
        lines += ["", f"[switches.{name}]", f'driver = "polatis-{face.protocol}"', f'url = "{url}"']
        lines += [f'ports = "1-{2 * ports}"']
        lines += ['password_file = "password"'] if face.protocol == "tl1" else []
        lines += ['known_hosts = "known_hosts"'] if face.server == "ssh" else []
    return "\n".join(lines) + "\n"


def _welcome(config: EmulatedSwitch, names: Sequence[str], ready: Ready, home: Path) -> str:
    n, bench = config.ports, home / "bench.toml"
    size = f"ingress 1-{n}, egress {n + 1}-{2 * n}"
    dark = f"dark for {config.timing.switch_ms:g} ms at each change"
    lines = [f"emulated Polatis {config.model}: {size}, {dark}; Ctrl-C ends it", ""]
    for name, url, key in zip(names, ready.urls, ready.host_keys, strict=True):
        lines.append(f"  {name:<12} {url}")
        if FACES[name].protocol == "tl1":
            lines.append(f"  {'':<12} user {USER}, password in {home / 'password'}")
        if key:
            lines.append(f"  {'':<12} known_hosts: {key}")
    first, last = names[0], names[-1]
    lines += [
        "",
        "in another terminal:",
        f"  harness ocs show {first} --bench {bench}",
        f"  harness ocs connect {last} 1:{n + 1} --bench {bench}",
        f"  harness ocs show {first} --bench {bench} --map > map.toml",
        f"  harness ocs verify {last} map.toml --bench {bench}",
        f"  harness ocs disconnect {first} 1:{n + 1} --bench {bench}",
    ]
    return "\n".join(lines)
