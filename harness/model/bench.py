"""The bench file: what exists. Pods, nodes, ToRs, switches, cables and the electrical path.

A *cable* joins one ToR uplink to one fibre pair of a switch: ``"tor0:u1" = "agg0:1"`` lands the
uplink's transmit fibre on ingress port 1 and its receive fibre on the egress port of the same
ordinal (N+1 on an N x N unit whose egress ports start at N+1); ``"agg0:1/20"`` names the egress
port outright. A *trunk* joins a fibre pair of an aggregation switch to one of a core switch,
``"agg0:5" = "core0:1"``: what leaves one enters the other.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that is read from a file: frozen, keyword-only, unknown keys refused."""


Role = Literal["train", "generate"]


class Node(Strict, frozen=True, kw_only=True):
    """A server with one agent. `address` is its address on the data network.

    Emulated benches need `tor` only (addresses and interfaces are made); a live one states `host`
    (where to start or expect the agent), `interface` and `address`.
    """

    tor: str = ""
    rails: tuple[str, ...] = ()
    """The ToR of each of its NICs, in the order of the GPUs beside them, where there are several,
    which only a simulated bench has; the same ToR may be named again. GPU g of n uses NIC
    g * NICs // n. Empty: one NIC, on `tor`."""
    pod: Role = "train"
    host: str = ""
    interface: str = ""
    address: str = ""
    gpus: int = 0
    emulated_gpus: int = 0
    """For generation on a node without GPUs: how many ranks stand for one each."""
    speed: float = 1.0
    """Of a simulated bench: computing takes 1 / `speed` of the time that figures say."""

    @property
    def tors(self) -> tuple[str, ...]:
        """The ToR of each NIC."""
        return self.rails or (self.tor,)


class Port(Strict, frozen=True, kw_only=True):
    """An uplink of a live ToR: its `interface` there, and its IPv4 `address` on the link.

    Any uplink may come to face any other: addresses are not those of fixed pairs.
    """

    interface: str = ""
    address: str = ""


class EmulatedTor(Strict, frozen=True, kw_only=True):
    """What is broken about the SSH server of an emulated ToR; ignored in a live world.

    For tests of what ends well: it refuses routes over `deny_devices` (uplinks), and answers
    `answer_ms` late. It obeys the n-th change of routes without an answer, or half-way through it
    cuts the session, or dies. 0: never.
    """

    deny_devices: tuple[str, ...] = ()
    answer_ms: float = 0.0
    lose_reply: int = 0
    cut_apply: int = 0
    die_on_apply: int = 0


class Tor(Strict, frozen=True, kw_only=True):
    """A top-of-rack switch; uplinks are ``u1`` .. ``u<uplinks>``.

    `driver` says how routes are steered on it. ``"none"``: the fabric steers by itself (a circuit
    that is lit is used; none is on an emulated bench), and the stages *steered away* and *steered
    back* are not stamped.
    ``"netlink"``: it is a network namespace here; ``"linux-ssh"`` and ``"frr-ssh"``: routes are
    written by ``ip`` or ``vtysh`` over SSH. Only routes with our own mark are ever touched.

    An emulated bench makes all that its ToRs need. A live one says where each is (`url`:
    ``ssh://`` or ``netns://``; secrets as for a switch) and, once one of its ToRs is steered, what
    is written into routes: `prefix`, the network of a ToR's servers, and the `ports` that uplinks
    are there.
    """

    uplinks: int = 2
    driver: Literal["netlink", "linux-ssh", "frr-ssh", "none"] = "none"
    pod: str = ""
    """Which ToRs are one pod; "" is one, too."""
    url: str = ""
    known_hosts: str = ""
    password_env: str = ""
    password_file: str = ""
    key_file: str = ""
    exchange_timeout_s: float = 5.0
    prefix: str = ""
    ports: dict[str, Port] = {}
    """By uplink."""
    emulate: EmulatedTor = EmulatedTor()


class EmulatedUnit(Strict, frozen=True, kw_only=True):
    """How the emulator of a switch behaves, and what is broken; ignored in a live world.

    For tests of what ends well: light does not pass `failed_ports`, which the unit reports as
    such, nor `stuck_ports`, of which it knows nothing; it refuses to connect `deny_ports`; the
    cables of the two egress ports of each of `swapped_ports` are plugged the wrong way round. At
    the n-th command that changes the map it dies, loses power (dark, and back `reboot_ms` later,
    empty), or does not answer; it cuts the n-th reply to a query. 0: never.
    """

    ports: int = 16
    switch_ms: float = 25.0
    switch_sd_ms: float = 0.0
    answer_ms: float = 0.0
    insertion_loss_db: float = 1.2
    failed_ports: tuple[int, ...] = ()
    stuck_ports: tuple[int, ...] = ()
    deny_ports: tuple[int, ...] = ()
    swapped_ports: tuple[tuple[int, ...], ...] = ()
    die_on_command: int = 0
    reboot_on_command: int = 0
    reboot_ms: float = 2000.0
    cut_reply: int = 0
    lose_reply: int = 0


class Switch(Strict, frozen=True, kw_only=True):
    """An optical circuit switch: how to reach it, and which of its ports are ours.

    `url` is the device's in a live world. In an emulated one it says which line to emulate
    (``serial://``, ``tcp://`` or ``ssh://``, with ``?baud=`` for serial); host and port are made.
    `ports` lists ingress and egress numbers, ranges allowed: ``"1-8,17-24"``.
    Secrets: `password_env` names an environment variable, `password_file` a file with mode 0600;
    with neither, SSH keys (`key_file`, or the agent) are used.
    """

    driver: Literal["polatis-scpi", "polatis-tl1"]
    url: str
    ports: str
    tier: Literal["aggregation", "core"] = "aggregation"
    circuits: Literal["duplex", "simplex"] = "duplex"
    """Planned both ways over the same two ports, or each way by itself: then a ring takes one
    uplink of a ToR, where it takes two else, and answers go back on the electrical path."""
    known_hosts: str = ""
    password_env: str = ""
    password_file: str = ""
    key_file: str = ""
    exchange_timeout_s: float = 5.0
    apply_timeout_s: float = 30.0
    light_floor_dbm: float = -25.0
    light_timeout_s: float = 2.0
    power_averaging: int = 4
    """As set on the unit, 1..8: its power meter averages over 10 ms, doubling each step."""
    switch_ms: float = 25.0
    """How long a circuit that moves stays dark, as plans expect it; an emulated unit says it."""
    emulate: EmulatedUnit = EmulatedUnit()


Electrical = Literal["spine", "rail", "none"]


class Links(Strict, frozen=True, kw_only=True):
    """Rates of the network: every host port and every circuit carries `link_mbit_per_s`.

    The electrical path between ToRs carries the sum of a ToR's host links divided by
    `oversubscription`. A live bench states what it has, an emulated one gets it. `nic_hold_ms` is
    how long a port stays down after its light returns. `light` says who moves the packets: "auto"
    takes the best that this machine allows; "none" is control plane only.

    A simulated bench may have another `electrical` path than the "spine" that joins all ToRs: one
    that joins those of a "rail" (the ToRs of all nodes' NICs of one number), or "none".
    """

    link_mbit_per_s: float = 1000.0
    oversubscription: float = 4.0
    electrical: Electrical = "spine"
    forwarding: bool = False
    """Whether what has no circuit of its own goes over those of others, from ToR to ToR."""
    nic_hold_ms: float = 0.0
    light: Literal["auto", "ebpf", "mirred", "none"] = "auto"


World = Literal["live", "emulated", "simulated"]
Fabric = Literal["rfabric", "fat-tree", "rail-optimised", "rail-only", "topoopt", "mixnet", "ideal"]


class Generated(Strict, frozen=True, kw_only=True):
    """A bench in a few numbers, instead of nodes, ToRs, switches, cables and their rates.

    What is left out follows from the rest, in the proportions of the public design that is nearest
    to each fabric: `harness.model.generated_rules`, where it is also said which fabric has what.
    """

    fabric: Fabric
    gpus: int
    gpus_per_server: int = 8
    nics_per_server: int | None = None
    roles: tuple[Role, ...] = ("train", "generate")
    """What pods do, dealt to them in equal shares: the first pods do the first."""
    servers_per_pod: int | None = None
    servers_per_tor: int | None = None
    rails: int | None = None
    """To how many ToRs the NICs of a server go: one ToR for each of them, or 1 for all."""
    uplinks_per_tor: int | None = None
    """To optical switches."""
    aggregation_planes: int | None = None
    """Optical switches of a pod, where a core joins pods; of all together, where none does."""
    core_planes: int | None = None
    trunks_per_pod: int | None = None
    """Fibre pairs between the aggregation switches of a pod and the core."""
    link_gbit_per_s: float = 400.0
    oversubscription: float | None = None
    switching_ms: float | None = None
    circuits: Literal["duplex", "simplex"] | None = None


class Simulation(Strict, frozen=True, kw_only=True):
    """What a simulated bench takes its times from: the path of a file (`Calibration`)."""

    calibration: str = ""


class Bench(Strict, frozen=True, kw_only=True):
    """A whole bench. See the module docstring for `cables`.

    A file has `generated`, or tables of its own; once loaded, a bench has all tables.
    """

    name: str
    world: World
    generated: Generated | None = None
    nodes: dict[str, Node] = {}
    tors: dict[str, Tor] = {}
    switches: dict[str, Switch] = {}
    cables: dict[str, str] = {}
    links: Links = Links()
    simulation: Simulation = Simulation()
    launcher: Literal["namespaces", "local", "manual"] = "manual"
    listen: str = ""
    """``HOST:PORT`` on which the coordinator of a live bench waits for its agents."""
    keys: str = ""
    """Folder of CURVE keys made by ``harness keys make``; emulated benches make their own."""
    max_wait_s: float = 60.0
