"""Every message between coordinator and agents: the envelope, the commands and their replies.

Commands are idempotent by (epoch, seq): an agent that has answered a pair answers it again from
memory. All stamps are on the monotonic clock of the node that took them; `wire.timesync` maps them.
A *rank* is one process of a collective; ranks are started, numbered and killed by their agent.
"""

from __future__ import annotations

import msgspec

from harness.model.scenario import Dtype, Op

VERSION = (1, 0)
"""(major, minor). A different major is refused by both sides, naming both."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What travels: one msgpack array. `body` is decoded by `kind`, a tag of `Body`."""

    v: tuple[int, int]
    kind: str
    run: str
    node: str
    epoch: int
    """Counts the coordinator's lives within a run; an agent drops what an older epoch sent."""
    seq: int
    re: int | None
    """The `seq` that this answers."""
    t_mono_ns: int
    deadline_ns: int
    """Nanoseconds left for the answer when sent (clocks differ, remaining times do not); 0 none."""
    body: msgspec.Raw


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all bodies."""


# -- meeting ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Agent to coordinator, first. `facts` are versions and hardware found on the node."""

    version: tuple[int, int]
    host: str
    pid: int
    gpus: int
    interfaces: tuple[str, ...]
    facts: dict[str, str]


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The agent is in. It must beat at `beat_ns`, and ends itself after `lost_ns` of silence."""

    beat_ns: int
    lost_ns: int
    pulse_port: int
    """Port of the coordinator's second socket: heartbeats and clock probes, nothing else."""


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """The agent is not in (version, unknown name, name already taken): it exits with the reason."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Stop all work, answer `Done`, exit."""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """It is done; `t_ns` on the agent's clock."""

    t_ns: int


class Failure(Message, frozen=True, kw_only=True, tag="failure"):
    """It failed. `error` is a short class name, `ranks` those at fault where they are known."""

    error: str
    text: str
    ranks: tuple[int, ...] = ()


class Note(Message, frozen=True, kw_only=True, tag="note"):
    """Unasked news from an agent, journaled by the coordinator: a rank died, a line of log."""

    level: str
    text: str
    ranks: tuple[int, ...] = ()


# -- ranks and communicators -----------------------------------------------------------------


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks meet.

    `store` is ``HOST:PORT`` of the coordinator's TCPStore, `generation` its prefix. `interface` is
    the node's data interface. `backend` "auto" is NCCL when the node has GPUs, else gloo.
    `subgroups` are lists of global ranks; the group of all ranks always exists.
    """

    generation: int
    world_size: int
    store: str
    interface: str
    backend: str = "auto"
    subgroups: tuple[tuple[int, ...], ...] = ()
    timeout_ns: int


class StartRanks(Message, frozen=True, kw_only=True, tag="start_ranks"):
    """Start one child process per rank and make its groups. Answer: `RanksReady`."""

    ranks: tuple[int, ...]
    groups: Groups
    nccl_env: dict[str, str] = {}


class RanksReady(Message, frozen=True, kw_only=True, tag="ranks_ready"):
    """`ready_ns`: when the last local rank had its groups, by (empty) barrier. pids by rank."""

    ready_ns: int
    pids: dict[int, int]
    backend: str
    effective_env: dict[str, str]
    """NCCL's (and gloo's) variables as they stand in the rank, allow-listed names only."""


class DestroyGroups(Message, frozen=True, kw_only=True, tag="destroy_groups"):
    """Resident ranks destroy their communicators. Answer: `Done` with the last one's stamp."""


class MakeGroups(Message, frozen=True, kw_only=True, tag="make_groups"):
    """Resident ranks make their groups anew under a fresh generation. Answer: `RanksReady`."""

    groups: Groups


class StopRanks(Message, frozen=True, kw_only=True, tag="stop_ranks"):
    """Kill the ranks' process groups and verify that they are gone. Answer: `Done`."""


# -- collectives -----------------------------------------------------------------------------


class RunCollective(Message, frozen=True, kw_only=True, tag="run_collective"):
    """Time one operation at one size, in every subgroup at once (or in the group of all).

    `subgroups`: an index into `Groups.subgroups` is implied by membership; empty = group of all.
    Answer: `Samples`; `Failure("CollectiveExpired")` names the ranks that did not enter.
    """

    op: Op
    size_bytes: int
    dtype: Dtype
    iterations: int
    warmup: int
    verify: bool
    use_subgroups: bool = False
    timeout_ns: int


class RankSamples(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's times. `size_bytes` is nccl-tests' size column, after its rounding."""

    rank: int
    group: tuple[int, ...]
    size_bytes: int
    times_ns: tuple[int, ...]
    wrong: int | None
    """Wrong elements after the timed iterations; None when not verified."""


class Samples(Message, frozen=True, kw_only=True, tag="samples"):
    """The local ranks' samples."""

    ranks: tuple[RankSamples, ...]


# -- traffic: one collective in a loop, that can be held at an agreed iteration ----------------


class StartTraffic(Message, frozen=True, kw_only=True, tag="start_traffic"):
    """Loop the operation until held. Answer: `Done` once each local rank ended one iteration."""

    op: Op
    size_bytes: int
    dtype: Dtype
    timeout_ns: int


class Hold(Message, frozen=True, kw_only=True, tag="hold"):
    """Let no rank begin a further iteration without leave. Answered at once: `Held`."""


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """Iterations entered so far by each local rank (exact: taken under the rank's own lock)."""

    entered: dict[int, int]


class StopAt(Message, frozen=True, kw_only=True, tag="stop_at"):
    """Go on through iteration `iteration` (the largest `entered` of all ranks), then stand still.

    Answer: `Quiesced`, when the last local rank stands. A rank found beyond it is a `Failure`.
    """

    iteration: int


class Quiesced(Message, frozen=True, kw_only=True, tag="quiesced"):
    """`last_good_ns`: end of each local rank's last iteration, on the agent's clock."""

    last_good_ns: dict[int, int]


class Resume(Message, frozen=True, kw_only=True, tag="resume"):
    """Go on. Answer: `Resumed`, once every local rank is steady again (or the deadline passes).

    Steady: the first of three consecutive iterations each within `within_pct` of `reference_ns`.
    `watch_only` sends no resume (ride-through: the traffic was never held) and only observes.
    """

    reference_ns: int
    within_pct: float
    watch_only: bool = False


class Resumed(Message, frozen=True, kw_only=True, tag="resumed"):
    """Per local rank: when it went on, end of its first iteration, when it was steady (or 0).

    `longest_ns`: the longest single iteration since the hold (or the watch): the stall felt.
    With `watch_only`, `released_ns` is when the watch began.
    """

    released_ns: dict[int, int]
    first_good_ns: dict[int, int]
    steady_ns: dict[int, int]
    longest_ns: dict[int, int]


class TrafficSoFar(Message, frozen=True, kw_only=True, tag="traffic_so_far"):
    """Ask for the durations of the last `last` iterations. Answer: `TrafficTimes`."""

    last: int = 50


class TrafficTimes(Message, frozen=True, kw_only=True, tag="traffic_times"):
    """Iteration durations per local rank, oldest first."""

    times_ns: dict[int, tuple[int, ...]]


class EndTraffic(Message, frozen=True, kw_only=True, tag="end_traffic"):
    """End the loop of ranks that stand still (after `StopAt`). Answer: `Done`."""


# -- beacons: what is lit, and with whom -------------------------------------------------------


class StartBeacons(Message, frozen=True, kw_only=True, tag="start_beacons"):
    """Send a numbered beacon out of each device every `interval_ns`, and listen on each. `Done`.

    Beacons are link-local multicast UDP: they need no route and tell whoever is at the other end.
    """

    devices: tuple[str, ...]
    interval_ns: int


class Heard(Message, frozen=True, kw_only=True, tag="heard"):
    """Ask what was heard. Answer: `Beacons`.

    With `expect` (device -> "node:device"), answered as soon as every expected far end was heard
    after `since_ns`, or after `wait_ns`.
    """

    since_ns: int
    expect: dict[str, str] = {}
    wait_ns: int = 0


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A silence on one device longer than three intervals: from the last beacon to the next."""

    device: str
    last_ns: int
    first_ns: int
    before: str
    """Far end ("node:device") before the silence."""
    after: str


class Beacons(Message, frozen=True, kw_only=True, tag="beacons"):
    """`last`: far end heard last per device; `first_ns`: first beacon from it after `since_ns`."""

    last: dict[str, str]
    first_ns: dict[str, int]
    gaps: tuple[Gap, ...]
    lost: dict[str, int]
    """Beacons missing by sequence number from a far end that did not change, per device."""
    received: dict[str, int]


class ReadCounters(Message, frozen=True, kw_only=True, tag="read_counters"):
    """How much has crossed this node's network devices, and which are down? Answer: `Counters`."""


class Counters(Message, frozen=True, kw_only=True, tag="counters"):
    """Bytes of frames by device since it exists, as the kernel counts them."""

    sent_bytes: dict[str, int]
    received_bytes: dict[str, int]
    t_ns: int
    down: tuple[str, ...] = ()
    """Devices that have no link now."""


class StopBeacons(Message, frozen=True, kw_only=True, tag="stop_beacons"):
    """Stop sending and listening. Answer: `Beacons` since the start."""


Body = (
    Hello | Welcome | Refusal | Shutdown | Done | Failure | Note
    | StartRanks | RanksReady | DestroyGroups | MakeGroups | StopRanks
    | RunCollective | Samples
    | StartTraffic | Hold | Held | StopAt | Quiesced | Resume | Resumed
    | TrafficSoFar | TrafficTimes | EndTraffic
    | StartBeacons | Heard | Beacons | StopBeacons | ReadCounters | Counters
)  # fmt: skip
