"""Where a topology stands when it is drawn: cores on top, planes, ToRs and nodes below. Pure.

Pods are frames beside each other. Many switches of a kind are one box, and ToRs get narrow where
there are many, so that 64 ToRs still fit. Lengths are in pixels, y counts downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.fabric.topology import Topology

NAMED_TORS_MAX = 16
"""Above it ToRs are narrow, and told by number."""
PLANE_BOXES_MAX, CORE_BOXES_MAX = 8, 4
"""More aggregation switches of a pod, or cores, are drawn as one; so are planes of many ToRs."""
WIDE, NARROW, MARGIN, GAP, BOX_WIDE_MIN = 84, 24, 16, 24, 52
CORE_Y, PLANE_Y, TOR_Y, NODE_Y, PATH_Y, FOOT_Y = 34, 112, 216, 254, 308, 344
CORE_HIGH, PLANE_HIGH, TOR_HIGH, NODE_HIGH = 38, 50, 22, 18
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """One switch, or several of a kind. `ports`: where the cables from a ToR or a box end."""

    name: str
    x: float
    y: float
    wide: float
    high: float
    ports: dict[str, Point] = field(default_factory=dict)

    def dock(self, names: Iterable[str], *, top: bool) -> None:
        """Spread ports for these along an edge."""
        listed = list(names)
        y = self.y if top else self.y + self.high
        for k, name in enumerate(listed):
            self.ports[name] = (self.x + self.wide * (k + 0.5) / len(listed), y)


@dataclass(frozen=True)
class Plot:
    """Where everything stands."""

    wide: float
    pitch: float
    """From ToR to ToR, at least."""
    frames: Mapping[str, Point]
    """Of each pod, left edge and width."""
    tors: Mapping[str, float]
    """Their middles."""
    box_of: Mapping[str, Box]
    """From a switch to what it is drawn as."""
    shared: bool
    """Whether planes serve several pods, and so stand outside their frames."""

    @property
    def top(self) -> float:
        """Where it begins: without cores, lower."""
        return min([PLANE_Y - 30, *(box.y for box in self.boxes)]) - 10

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Each box once."""
        return tuple({box.name: box for box in self.box_of.values()}.values())


def plot(topology: Topology) -> Plot:
    """Place pods, ToRs, switches, and the ends of all cables."""
    planes = _plane_groups(topology)
    shared = list(planes) == [""] and len(topology.pods) > 1
    pitch = WIDE if len(topology.tors) <= NAMED_TORS_MAX else NARROW
    frames: dict[str, Point] = {}
    tors: dict[str, float] = {}
    left = float(MARGIN)
    for pod, names in topology.pods.items():
        boxes = 0 if shared else len(planes.get(pod, ()))
        wide = float(GAP + max(pitch * len(names), BOX_WIDE_MIN * boxes))
        frames[pod] = (left, wide)
        step = (wide - GAP) / len(names)
        tors |= {tor: left + GAP / 2 + step * (k + 0.5) for k, tor in enumerate(names)}
        left += wide + GAP
    whole = (float(MARGIN), max(left - GAP - MARGIN, 280.0))
    cores = _together(tuple(dict.fromkeys(t.core for t in topology.trunks)), CORE_BOXES_MAX, "core")
    box_of = dict(_row(cores, whole, CORE_Y, CORE_HIGH))
    for pod, groups in planes.items():
        room = whole if shared else frames[pod]
        box_of |= dict(_row(groups, room, PLANE_Y, PLANE_HIGH))
    _dock(topology, tors, box_of)
    return Plot(whole[1] + 2 * MARGIN, pitch, frames, tors, box_of, shared)


Groups = dict[str, tuple[str, ...]]
"""Name of a box -> the switches in it."""


def _plane_groups(topology: Topology) -> dict[str, Groups]:
    """Return the boxes of each pod; all under "" where a switch serves more than one pod."""
    first = next(iter(topology.pods), "")
    pods_of: dict[str, set[str]] = {trunk.aggregation: set() for trunk in topology.trunks}
    for up in topology.uplinks:
        pods_of.setdefault(up.switch, set()).add(topology.tors[up.tor].pod)
    for trunk in topology.trunks:
        pods_of.pop(trunk.core, None)
    switches = [switch for switch in topology.switches if switch in pods_of]
    most = PLANE_BOXES_MAX if len(topology.tors) <= NAMED_TORS_MAX else 1
    if any(len(pods) > 1 for pods in pods_of.values()):
        return {"": _together(switches, most, "aggregation")}
    return {
        pod: _together([s for s in switches if pod in (pods_of[s] or {first})], most, "aggregation")
        for pod in topology.pods
    }


def _together(switches: Sequence[str], most: int, kind: str) -> Groups:
    """Return a box for each switch, or one for all where there are more than `most`."""
    if len(switches) <= most:
        return {switch: (switch,) for switch in switches}
    return {f"{len(switches)} {kind} planes, {switches[0]} to {switches[-1]}": tuple(switches)}


def _row(groups: Groups, room: Point, y: float, high: float) -> Iterator[tuple[str, Box]]:
    """Yield each switch with its box; boxes stand side by side in the room, left edge and width."""
    left, wide = room[0] + GAP / 2, (room[1] - GAP) / max(1, len(groups))
    for k, (name, switches) in enumerate(groups.items()):
        box = Box(name, left + wide * k + 4, y, wide - 8, high)
        yield from ((switch, box) for switch in switches)


def _dock(topology: Topology, tors: Mapping[str, float], box_of: Mapping[str, Box]) -> None:
    """Give each box ports for what is cabled to it: ToRs at its foot, cores at its top."""
    below: dict[str, set[str]] = {}
    for up in topology.uplinks:
        below.setdefault(box_of[up.switch].name, set()).add(up.tor)
    cabled = {(box_of[t.aggregation].name, box_of[t.core].name) for t in topology.trunks}
    names = {box.name: box for box in box_of.values()}
    for name, box in names.items():
        box.dock([tor for tor in tors if tor in below.get(name, ())], top=False)
        box.dock([core for core in names if (name, core) in cabled], top=True)
        if planes := [plane for plane in names if (plane, name) in cabled]:
            box.dock(sorted(planes, key=lambda plane: names[plane].x), top=False)
