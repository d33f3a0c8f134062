"""The table ``[generated]`` of a bench file: what it leaves out, and what must hold of it. Pure.

Proportions are those of the public design nearest to each fabric (RailOCS3: pods of 256 GPUs, ToRs
of 32 servers' NICs and as many uplinks, a plane for each; MixNet: regions of 64 GPUs, three of four
NICs on circuits). Whatever is said is taken as it is, where the fabric has it at all:

    fabric          NICs of a server            above its ToRs
    rfabric         a ToR for each (rails)      circuits, and the electrical path, oversubscribed
    fat-tree        on one ToR                  the electrical path
    rail-optimised  a ToR for each              the electrical path
    rail-only       a ToR for each              the electrical path of each rail by itself
    topoopt         the server is its own ToR   circuits alone, over which hosts forward
    mixnet          the server is its own ToR   circuits within a region, and the electrical path
    ideal           on the one switch           nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from harness.model.bench import Bench, Electrical, Fabric, Generated, Links
from harness.model.bench_rules import GPUS_MAX
from harness.model.generated import Numbers, laid_out, numbers_problems

T = TypeVar("T")

GPUS_OF_A_POD = 256
GPUS_OF_A_REGION = 64
NICS_OF_A_TOR = 32
SIMULATED_GPUS_MAX = 65_536


class _Form(NamedTuple):
    """What a fabric has beside servers, and the keys that say how much of it."""

    keys: frozenset[str]
    nics: Literal["rails", "group", "server", "all"]
    """On a ToR each, or all on one: with those of some servers, of no other, or of all."""
    circuits: bool = False
    oversubscription: float = 1.0
    electrical: Electrical = "spine"


def _keys(*texts: str) -> frozenset[str]:
    return frozenset(word for text in texts for word in text.split())


_PODS, _PATH = "servers_per_pod servers_per_tor", "oversubscription"
_CIRCUITS = "aggregation_planes switching_ms circuits"
_TIERS = "rails uplinks_per_tor core_planes trunks_per_pod"
FORMS: Mapping[Fabric, _Form] = {
    "rfabric": _Form(_keys(_PODS, _PATH, _CIRCUITS, _TIERS), "rails", True, 4.0),
    "fat-tree": _Form(_keys(_PODS, _PATH), "group"),
    "rail-optimised": _Form(_keys(_PODS, _PATH), "rails"),
    "rail-only": _Form(_keys(_PODS, _PATH), "rails", electrical="rail"),
    "topoopt": _Form(_keys(_CIRCUITS), "server", True, electrical="none"),
    "mixnet": _Form(_keys("servers_per_pod uplinks_per_tor", _CIRCUITS), "server", True),
    "ideal": _Form(_keys(), "all"),
}
ALL_KEYS = _keys(_PODS, _PATH, _CIRCUITS, _TIERS)
EMULATED: tuple[Fabric, ...] = ("rfabric", "fat-tree")


def generated_problems(bench: Bench) -> Iterator[str]:
    """Yield what is wrong with the table ``[generated]`` of a bench file, where it has one."""
    table = bench.generated
    if table is None:
        return
    if bench.world == "live":
        yield "generated: a live bench says what it has, node by node; leave the table out"
        return
    yield from _instead(bench)
    if found := [*_stated(table), *_sizes(table)]:
        yield from found
        return
    whole = _Whole(table)
    yield from _of_emulated(bench.world, whole)
    if found := list(_dealt(whole)):
        yield from found
    else:
        told = numbers_problems(whole.numbers, bench.world)
        yield from (f"generated: {problem}" for problem in told)


def expanded(bench: Bench) -> Bench:
    """Return a (validated) bench with all tables that its table ``[generated]`` stands for."""
    if bench.generated is None:
        return bench
    return laid_out(_Whole(bench.generated).numbers, bench)


# -- what follows ----------------------------------------------------------------------------------


def _or(stated: T | None, derived: T) -> T:
    return derived if stated is None else stated


@dataclass(frozen=True)
class _Whole:
    """A table with all that it leaves out."""

    table: Generated

    @property
    def form(self) -> _Form:
        return FORMS[self.table.fabric]

    @property
    def servers(self) -> int:
        return self.table.gpus // self.table.gpus_per_server

    @property
    def nics(self) -> int:
        """Of a server: one for each GPU."""
        return _or(self.table.nics_per_server, self.table.gpus_per_server)

    @property
    def servers_of_a_role(self) -> int:
        return max(1, self.servers // len(self.table.roles))

    @property
    def pod_max(self) -> int:
        """The most servers of a pod: of a region, where there are such."""
        gpus = GPUS_OF_A_REGION if self.table.fabric == "mixnet" else self.table.gpus
        return max(1, gpus // self.table.gpus_per_server)

    @property
    def servers_per_pod(self) -> int:
        """All of a role, where the fabric knows no pods."""
        if "servers_per_pod" not in self.form.keys:
            return self.servers_of_a_role
        usual = max(1, GPUS_OF_A_POD // self.table.gpus_per_server)
        return _or(self.table.servers_per_pod, min(self.servers_of_a_role, self.pod_max, usual))

    @property
    def pods(self) -> int:
        return self.servers // self.servers_per_pod

    @property
    def rails(self) -> int:
        return _or(self.table.rails, self.nics) if self.form.nics == "rails" else 1

    @property
    def servers_per_tor(self) -> int:
        if self.form.nics in ("server", "all"):
            return 1 if self.form.nics == "server" else self.servers
        usual = max(1, NICS_OF_A_TOR * self.rails // self.nics)
        return _or(self.table.servers_per_tor, min(self.servers_per_pod, usual))

    @property
    def tors_per_pod(self) -> int:
        return max(1, self.servers_per_pod // self.servers_per_tor) * self.rails

    @property
    def uplinks(self) -> int:
        """Of a ToR: as many as NICs below it; where a server shares out its own, three of four."""
        if not self.form.circuits:
            return 0
        if self.table.fabric == "mixnet":
            return _or(self.table.uplinks_per_tor, self.nics * 3 // 4)
        below = self.servers_per_tor * self.nics // self.rails
        return _or(self.table.uplinks_per_tor, below)

    @property
    def planes(self) -> int:
        """One for each uplink of a ToR; one of a region, on which all may be joined."""
        usual = 1 if self.table.fabric == "mixnet" else self.uplinks
        return _or(self.table.aggregation_planes, usual)

    @property
    def core(self) -> tuple[int, int]:
        """Trunks of a pod, one for each uplink, and planes of the core: one for each of a plane's.

        None of both, where there is but one pod, or one of them is said to be 0.
        """
        trunks, cores = self.table.trunks_per_pod, self.table.core_planes
        if self.pods < 2 or "core_planes" not in self.form.keys or 0 in (trunks, cores):
            return _or(trunks, 0), _or(cores, 0)
        trunks = _or(trunks, self.tors_per_pod * self.uplinks)
        return trunks, _or(cores, max(1, trunks // self.planes))

    @property
    def oversubscription(self) -> float:
        """MixNet's electrical path carries what the NICs that are on it do."""
        if self.table.fabric == "mixnet":
            return self.nics / (self.nics - self.uplinks)
        return _or(self.table.oversubscription, self.form.oversubscription)

    @property
    def numbers(self) -> Numbers:
        """Must only be asked of what can be dealt out."""
        table, (trunks, cores) = self.table, self.core
        of_each_role = self.pods // len(table.roles)
        return Numbers(
            roles=tuple(role for role in table.roles for _ in range(of_each_role)),
            tors_per_pod=self.tors_per_pod,
            nodes_per_tor=self.servers_per_tor,
            gpus_per_node=table.gpus_per_server,
            nics_per_node=self.nics,
            rails=self.rails,
            uplinks_per_tor=self.uplinks,
            aggregation_planes=self.planes,
            core_planes=cores,
            trunks_per_pod=trunks,
            regional=table.fabric == "mixnet",
            one_switch=self.form.nics == "all",
            link_gbit_per_s=table.link_gbit_per_s,
            oversubscription=self.oversubscription,
            electrical=self.form.electrical,
            forwarding=table.fabric == "topoopt",
            switching_ms=_or(table.switching_ms, 10.0),
            duplex=table.circuits != "simplex",
        )


# -- what must hold --------------------------------------------------------------------------------


def _instead(bench: Bench) -> Iterator[str]:
    """Yield what the file says beside its table, and in another way."""
    for key in ("nodes", "tors", "switches", "cables"):
        if getattr(bench, key):
            yield f"{key}: the table [generated] stands for it; keep one of the two"
    for key in ("link_mbit_per_s", "oversubscription", "electrical", "forwarding"):
        if getattr(bench.links, key) != getattr(Links(), key):
            yield f"links.{key}: the table [generated] says what links are; leave it out"


def _stated(table: Generated) -> Iterator[str]:
    """Yield what is said and would change nothing."""
    form = FORMS[table.fabric]
    for key in sorted(ALL_KEYS - form.keys):
        if getattr(table, key) is not None:
            others = ", ".join(sorted(form.keys)) or "none of these numbers"
            yield (
                f'generated.{key}: it changes nothing where fabric = "{table.fabric}"; leave it '
                f"out (there is {others})"
            )


def _sizes(table: Generated) -> Iterator[str]:
    if not table.roles:
        yield 'generated.roles: none; say what pods do, as in ["train", "generate"]'
    for key, most in (
        ("gpus", SIMULATED_GPUS_MAX),
        ("gpus_per_server", GPUS_MAX),
        ("nics_per_server", GPUS_MAX),
        ("servers_per_pod", SIMULATED_GPUS_MAX),
        ("servers_per_tor", SIMULATED_GPUS_MAX),
        ("rails", GPUS_MAX),
    ):
        value = getattr(table, key)
        if value is not None and not 1 <= value <= most:
            yield f"generated.{key}: expected 1 to {most}"
    for key in ("uplinks_per_tor", "aggregation_planes"):
        value = getattr(table, key)
        if value is not None and value < 1:
            yield f"generated.{key}: expected 1 or more"
    for key in ("link_gbit_per_s", "oversubscription", "switching_ms"):
        value = getattr(table, key)
        if value is not None and not value > 0:
            yield f"generated.{key}: expected more than 0"


def _dealt(whole: _Whole) -> Iterator[str]:
    """Yield what cannot be dealt out evenly, naming what can; the first of what depends on it."""
    table, roles = whole.table, len(whole.table.roles)
    least = roles * table.gpus_per_server
    if table.gpus % least:
        near = max(1, round(table.gpus / least)) * least
        yield (
            f"generated.gpus: {table.gpus} cannot be dealt evenly to {roles} roles in servers of "
            f"{table.gpus_per_server} GPUs; {near} can"
        )
        return
    yield from _shared("rails", "NICs of a server", whole.nics, "ToRs", whole.rails)
    if whole.servers_per_pod > whole.pod_max:
        yield f"generated.servers_per_pod: {whole.servers_per_pod}; {whole.pod_max} are the most"
        return
    each, per_pod = whole.servers_of_a_role, whole.servers_per_pod
    if told := list(_shared("servers_per_pod", "servers of a role", each, "pods of", per_pod)):
        yield from told
        return
    if whole.form.nics in ("rails", "group"):
        per_tor = whole.servers_per_tor
        yield from _shared("servers_per_tor", "servers of a pod", per_pod, "ToRs of", per_tor)
    if table.fabric == "mixnet" and not 1 <= whole.uplinks < whole.nics:
        yield (
            f"generated.uplinks_per_tor: {whole.uplinks} of the {whole.nics} NICs of a server; "
            "expected one on circuits and one on the electrical path at least"
        )


def _shared(key: str, what: str, number: int, to: str, parts: int) -> Iterator[str]:
    """Yield that a number is no multiple of a share, and the nearest share of which it is."""
    if number % parts:
        fits = (k for k in range(1, number + 1) if not number % k)
        near = min(fits, key=lambda k: abs(k - parts))
        yield (
            f"generated.{key}: the {number} {what} cannot be dealt evenly to {to} {parts}; "
            f"{key} = {near} can"
        )


def _of_emulated(world: str, whole: _Whole) -> Iterator[str]:
    if world != "emulated":
        return
    if whole.table.fabric not in EMULATED:
        yield (
            f'generated.fabric: "{whole.table.fabric}" can only be simulated; an emulated bench is '
            + " or ".join(f'"{fabric}"' for fabric in EMULATED)
        )
    elif whole.nics > 1:
        yield "generated.nics_per_server: an emulated server has one; write nics_per_server = 1"
