"""What an emulated switch or ToR is told at its start, and what it says when it is ready.

One process per device: ``python -m drivers.emulators CONFIG.json`` prints one line of JSON
(`Ready`) on standard output when every face answers, and then serves until SIGTERM. It starts its
own session, so a coordinator's death does not take it along: like hardware, it keeps its map.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a unit takes; `switch_ms` is the median of the dark time of a moved port.

    With `distribution = "normal"` each change draws a normal time with `switch_sd_ms`, cut at zero;
    with `"fixed"` each takes exactly `switch_ms`. `answer_ms` delays every reply. `boot_ms` is how
    long a unit that lost power answers nobody.
    """

    switch_ms: float = 25.0
    switch_sd_ms: float = 0.0
    distribution: Literal["fixed", "normal"] = "fixed"
    answer_ms: float = 0.0
    boot_ms: float = 2000.0


class Optics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Light levels. `averaging` is the power meter's setting 1..8: 10 ms, doubling each step.

    Light of `launch_dbm` is always taken to enter every ingress port. So a unit behind a trunk
    measures light though the unit before it sends none: only packets prove a path of several units.
    """

    launch_dbm: float = 0.0
    insertion_loss_db: float = 1.2
    loss_sd_db: float = 0.2
    floor_dbm: float = -60.0
    averaging: int = 1


class Face(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way in: a protocol (`scpi` or `tl1`) on a server (`serial` pty, `tcp` or `ssh`).

    `port` 0 picks a free one. `baud` is for `serial`; `user`, `password_file` (mode 0600) and
    `host_key_file` (made when absent) are for `ssh` and, where set, the TL1 login.
    """

    protocol: Literal["scpi", "tl1"]
    server: Literal["serial", "tcp", "ssh"]
    host: str = "127.0.0.1"
    port: int = 0
    baud: int = 38400
    user: str | None = None
    password_file: str | None = None
    host_key_file: str | None = None
    link: str | None = None
    """Stable path at which the pty appears (a symbolic link), for `serial`."""


class Light(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who moves the packets: interfaces in network namespace `netns` stand for fibre pairs.

    `tx` maps an ingress port to the interface whose packets enter there; `rx` maps an egress port
    to the interface through which light leaves. `kind` "none" is control plane only.
    """

    kind: Literal["none", "ebpf", "mirred"] = "none"
    hold_ms: float = 0.0
    """How long a port stays down after its light is back, as a NIC's does; power shows at once."""
    netns: str = ""
    tx: dict[int, str] = {}
    rx: dict[int, str] = {}


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is broken, for tests: from the start, or from SIGHUP on. Ports in the unit's numbers."""

    failed_ports: tuple[int, ...] = ()
    """The mirror does not lock: the unit reports the port as failed, no light passes."""
    stuck_ports: tuple[int, ...] = ()
    """The mirror does not move, and the unit does not know: commands are acknowledged and read back
    as made, but light passes only between this port and the one that it stood at."""
    deny_ports: tuple[int, ...] = ()
    """Connecting these is refused by the unit."""
    swapped: tuple[tuple[int, int], ...] = ()
    """Egress pairs cabled the wrong way round: what leaves one arrives where the other's should.
    The unit's power meters, being inside, see nothing of it."""
    die_on_command: int = 0
    """Exit at once (SIGKILL) in the middle of answering the n-th change command; 0 never."""
    reboot_on_command: int = 0
    """Lose power there instead, and come back after `Timing.boot_ms`, empty; 0 never."""
    cut_reply: int = 0
    """Close the line half-way through the n-th reply to a query; 0 never."""
    lose_reply: int = 0
    """Obey the n-th change command, answer nothing; 0 never."""


class EmulatedSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One emulated unit."""

    name: str
    family: Literal["polatis"] = "polatis"
    model: str = "N-VST-16x16-LU1-DMHNV"
    serial_number: str = "000001"
    firmware: str = "6.7.3.9"
    ports: int = 16
    """N of an N x N unit: ingress 1..N, egress N+1..2N."""
    seed: int = 0
    timing: Timing = Timing()
    optics: Optics = Optics()
    faces: tuple[Face, ...]
    light: Light = Light()
    faults: Faults = Faults()
    circuits: tuple[tuple[int, int], ...] = ()
    """The map it boots with."""
    only_is_hitless: bool = False
    """Whether SCPI `CONN:ONLY` leaves unchanged circuits lit; the usual unit drops all first."""


class TorFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is broken about a ToR from the start. Applies are counted over all sessions."""

    deny_devices: tuple[str, ...] = ()
    """A route through these is refused in the kernel's words, and what comes after it not run."""
    answer_ms: float = 0.0
    """Every answer comes so much later."""
    lose_reply: int = 0
    """Obey the n-th apply, never answer it; 0 never."""
    cut_apply: int = 0
    """Close the connection half-way through the n-th apply; 0 never."""
    die_on_apply: int = 0
    """Exit at once (SIGKILL) half-way through the n-th apply; 0 never."""


class EmulatedTor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ToR: who may log in, and the namespace that it steers ("": where it was started).

    `port` 0 picks a free one. `password_file` (mode 0600) or `authorized_keys`, or both, let `user`
    in; `host_key_file` is made when absent. `frr` is the pathspace of an FRR (``vtysh -N``).
    """

    name: str
    netns: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    user: str = "admin"
    password_file: str | None = None
    authorized_keys: str | None = None
    host_key_file: str | None = None
    frr: str = ""
    faults: TorFaults = TorFaults()


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The line an emulator prints when every face answers.

    `urls` holds one device URL per face, in order (``serial:///dev/pts/5?baud=38400``,
    ``ssh://admin@127.0.0.1:40123``, ``tcp://127.0.0.1:40124``); `host_keys` the matching
    known_hosts lines (empty where not SSH); `light` what moves the packets.
    """

    pid: int
    urls: tuple[str, ...]
    host_keys: tuple[str, ...]
    light: str
