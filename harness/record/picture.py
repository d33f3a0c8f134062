"""``fabric.svg`` of a run: which circuits carried each kind of traffic, by its journal."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from harness.fabric.drawing import draw
from harness.fabric.links import Link, Trunk, Uplink
from harness.fabric.topology import Topology
from harness.model.documents import Event

Names = tuple[str, ...]
Part = Uplink | Trunk


def picture_of(topology: Topology, events: Iterable[Event]) -> str:
    """Return the circuits of each arm and phase as an SVG; "" where none was lit.

    Of what an arm did again and again, the last.
    """
    panels = {
        title: frozenset(links_named(topology, names)) for title, names in lit_by_phase(events)
    }
    return draw(topology, panels) if panels else ""


def lit_by_phase(events: Iterable[Event]) -> Iterator[tuple[str, Names]]:
    """Yield, by arm and kinds of traffic, the circuits that were lit when that traffic ended."""
    lit: dict[str, Names] = {}
    found: dict[str, dict[str, Names]] = defaultdict(dict)
    for event in events:
        data = event.data
        if event.stream == "fabric_change":
            lit[data["policy"]] = tuple(data["lit"])
        elif event.stream == "fabric_traffic":
            found[data["policy"]][data["kind"]] = lit.get(data["policy"], ())
    for policy, by_kind in found.items():
        for names in dict.fromkeys(filter(None, by_kind.values())):
            kinds = [kind for kind, there in by_kind.items() if there == names]
            yield f"{policy}, {', '.join(kinds)}", names


def links_named(topology: Topology, names: Iterable[str]) -> Iterator[Link]:
    """Yield a link for each name, such as ``gen0-train0@agg2+core0+agg0``.

    A name says which switches, but not which of uplinks and trunks that are alike: any that is
    free. What the topology cannot have is left out.
    """
    taken: set[tuple[Part, str]] = set()
    uplinks: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for uplink in topology.uplinks:
        uplinks[uplink.tor, uplink.switch].append(uplink)
    trunks_of: dict[frozenset[str], list[Trunk]] = defaultdict(list)
    for trunk in topology.trunks:
        trunks_of[frozenset((trunk.aggregation, trunk.core))].append(trunk)
    for name in sorted(names):
        joined, _, way = name.partition("@")
        both, switches = ">" not in joined, way.split("+")
        a, b = re.split("[->]", joined, maxsplit=1)
        options: list[tuple[Sequence[Part], str]] = [
            (uplinks[a, switches[0]], "there"),
            (uplinks[b, switches[-1]], "back"),
            *(_trunks(trunks_of[frozenset(pair)], pair[0]) for pair in pairwise(switches)),
        ]
        used: set[tuple[Part, str]] = set()
        match [_take(taken, used, among, side, both=both) for among, side in options]:
            case [Uplink() as near, Uplink() as far, *trunks] if None not in trunks:
                taken |= used
                yield Link(near, far, tuple(t for t in trunks if isinstance(t, Trunk)), both)


def _trunks(found: list[Trunk], near: str) -> tuple[list[Trunk], str]:
    """Return trunks of two switches, and which of their fibres light from the near one takes."""
    return found, "there" if found and found[0].aggregation == near else "back"


def _take(
    taken: set[tuple[Part, str]],
    used: set[tuple[Part, str]],
    among: Sequence[Part],
    side: str,
    *,
    both: bool,
) -> Part | None:
    """Use the first that is neither taken nor used on the sides needed; None where none is."""
    sides = ("there", "back") if both else (side,)
    for part in among:
        wanted = {(part, each) for each in sides}
        if taken.isdisjoint(wanted) and used.isdisjoint(wanted):
            used |= wanted
            return part
    return None
