"""Circuits for the eye: as a text matrix, and as an SVG with one panel for each phase. Pure.

Cables are grey. Lit ones, and the cross-connects inside the switches, have the phase's colour, and
are wider where circuits run in parallel. At the foot is the electrical path, which is always there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log2
from xml.etree import ElementTree as ET

from harness.fabric import plot as at
from harness.fabric.links import Link, Trunk, Uplink
from harness.fabric.plot import Box, Plot, Point, plot
from harness.fabric.topology import Topology

LIT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's colours, which all eyes tell apart."""
INK, PALE, PAPER, FILL = "#333333", "#c3c9d0", "#ffffff", "#f3f5f7"
ROLE = {"train": "#f6d9b8", "generate": "#cfe3f5"}
HEAD_HIGH = 40
NODE_BOXES_MAX = 4
"""More nodes of a ToR are told by number."""
_CONTROL = re.compile(r"[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Not allowed in XML, not even escaped."""


# -- text ------------------------------------------------------------------------------------------


def matrix_lines(topology: Topology, links: Iterable[Link]) -> list[str]:
    """Return how many circuits lead from each ToR (row) to each other one (column), a line a row.

    ``.`` is none, ``+`` marks what goes over a core. Below, per core, the trunks in use.
    """
    links, names = list(links), list(topology.tors)
    cells = _cells(links)
    numbered = len(names) > at.NAMED_TORS_MAX
    heads = [str(k) if numbered else name for k, name in enumerate(names)]
    rows = [f"{k} {name}" if numbered else name for k, name in enumerate(names)]
    wide = max(map(len, [*heads, *cells.values()]), default=1)
    first = max(map(len, rows), default=0)
    lines = [" ".join([" " * first, *(head.rjust(wide) for head in heads)])]
    for row, near in zip(rows, names, strict=True):
        told = (cells.get((near, far), "-" if near == far else ".").rjust(wide) for far in names)
        lines.append(" ".join([row.ljust(first), *told]))
    return [*lines, *_trunk_lines(topology, links)]


def _cells(links: Sequence[Link]) -> dict[tuple[str, str], str]:
    ways = [(near.tor, far.tor, bool(link.trunks)) for link in links for near, far in link.ways]
    over = {(a, b) for a, b, trunks in ways if trunks}
    circuits = Counter((a, b) for a, b, _ in ways)
    return {way: f"{count}{'+' * (way in over)}" for way, count in circuits.items()}


def _trunk_lines(topology: Topology, links: Sequence[Link]) -> Iterator[str]:
    used = Counter(trunk.core for trunk in {trunk for link in links for trunk in link.trunks})
    for core, there in Counter(trunk.core for trunk in topology.trunks).items():
        yield f"{core}: {used[core]} of {there} trunks in use"


# -- picture ---------------------------------------------------------------------------------------


def draw(topology: Topology, links_by_phase: Mapping[str, Iterable[Link]]) -> str:
    """Return an SVG document with a panel for each phase, under each other.

    It is self-contained, and its description says in words what it shows.
    """
    place = plot(topology)
    phases = {name: frozenset(links) for name, links in links_by_phase.items()}
    panel_high = HEAD_HIGH + at.FOOT_Y - place.top
    high = max(1, len(phases)) * panel_high
    svg = _node(
        None, "svg", xmlns="http://www.w3.org/2000/svg", role="img", font_family="sans-serif",
        font_size="11", width=place.wide, height=high, viewBox=f"0 0 {place.wide:g} {high:g}",
    )  # fmt: skip
    _text(svg, "title", "Circuits by phase")
    _text(svg, "desc", " ".join(_told(topology, phases)))
    _node(svg, "rect", width="100%", height="100%", fill=PAPER)
    for k, (name, links) in enumerate(phases.items() or [("no phase", frozenset[Link]())]):
        panel = _node(svg, "g", transform=f"translate(0 {k * panel_high:g})")
        _say(
            panel, (at.MARGIN, 24), f"{name}: {_count(len(links), 'link')}", size=15, anchor="start"
        )
        body = _node(panel, "g", transform=f"translate(0 {HEAD_HIGH - place.top:g})")
        _bench(body, topology, place)
        _lit(body, links, place, LIT[k % len(LIT)])
    return ET.tostring(svg, encoding="unicode")


def _told(topology: Topology, phases: Mapping[str, frozenset[Link]]) -> Iterator[str]:
    pods = ", ".join(f"{pod or 'pod'} with {len(tors)} ToRs" for pod, tors in topology.pods.items())
    yield f"{pods}; {_count(len(topology.switches), 'optical switch', 'es')}."
    for name, links in phases.items():
        over = sum(bool(link.trunks) for link in links)
        yield f"{name}: {_count(len(links), 'link')}, {over} of them over a core."


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _bench(body: ET.Element, topology: Topology, place: Plot) -> None:
    """Draw what is there, lit or not."""
    for pod, (left, wide) in place.frames.items():
        top = at.TOR_Y - 10 if place.shared else at.PLANE_Y - 10
        _rect(body, (left, top), (wide, at.PATH_Y - 16 - top), fill="none", stroke=PALE, rx=8)
        _say(body, (left + wide - 8, at.PATH_Y - 21), pod, anchor="end")
    parts: tuple[Uplink | Trunk, ...] = (*topology.uplinks, *topology.trunks)
    for near, far in sorted({_cable(part, place) for part in parts}):
        _line(body, near, far, PALE, 1.0)
    for box in place.boxes:
        _rect(body, (box.x, box.y), (box.wide, box.high), fill=FILL, stroke=INK, rx=4)
        _say(body, (box.x + 5, box.y + 13), box.name, anchor="start", wide=box.wide - 10)
    rate = f"electrical path, {topology.rates.oversubscription:g}:1, always on"
    _rect(body, (at.MARGIN, at.PATH_Y), (place.wide - 2 * at.MARGIN, 20), fill=FILL, stroke=PALE)
    _say(body, (place.wide / 2, at.PATH_Y + 14), rate)
    for tor in topology.tors:
        _tor(body, topology, tor, place)


def _tor(body: ET.Element, topology: Topology, tor: str, place: Plot) -> None:
    """Draw a ToR, its nodes, and its way to the electrical path."""
    x, wide, narrow = place.tors[tor], place.pitch - 10, place.pitch == at.NARROW
    left, foot = x - wide / 2, at.TOR_Y + at.TOR_HIGH
    _line(body, (left + 3, foot), (left + 3, at.PATH_Y), PALE, 1.0)
    box = _rect(body, (left, at.TOR_Y), (wide, at.TOR_HIGH), fill=PAPER, stroke=INK)
    _text(box, "title", tor)
    told = str(list(place.tors).index(tor)) if narrow else tor
    _say(body, (x, at.TOR_Y + 15), told, wide=wide)
    nodes = topology.nodes_of(tor)
    if len(nodes) > (1 if narrow else NODE_BOXES_MAX):
        roles = tuple(dict.fromkeys(node.pod for node in nodes))
        told = str(len(nodes)) if narrow else f"{len(nodes)} nodes"
        title = f"{len(nodes)} nodes: {', '.join(roles)}"
        _node_box(body, (left + 6, wide - 6), told, title, roles[0])
        return
    for k, node in enumerate(nodes):
        step = (wide - 6) / len(nodes)
        room = (left + 6 + step * k, step - 2)
        _node_box(body, room, node.name, f"{node.name}: {node.pod}", node.pod)


def _node_box(body: ET.Element, room: Point, name: str, title: str, role: str) -> None:
    fill = ROLE.get(role, FILL)
    box = _rect(body, (room[0], at.NODE_Y), (room[1], at.NODE_HIGH), fill=fill, stroke=PALE)
    _text(box, "title", title)
    _say(body, (room[0] + room[1] / 2, at.NODE_Y + 13), name, wide=room[1])


# -- what is lit -----------------------------------------------------------------------------------


def _lit(body: ET.Element, links: Iterable[Link], place: Plot, colour: str) -> None:
    """Draw lit cables, and what joins them in the switches; one stroke for those in parallel."""
    cables: Counter[tuple[Point, Point]] = Counter()
    joined: dict[tuple[Point, Point, float], list[str]] = {}
    for link in sorted(links):
        parts: tuple[Uplink | Trunk, ...] = (link.a, *link.trunks, link.b)
        cables.update(_cable(part, place) for part in parts)
        for box, a, b in _crosses(link, place):
            key = (box.ports[a], box.ports[b], box.y + box.high / 2)
            joined.setdefault(key, []).append(str(link))
        if not link.both:
            x, y = place.tors[link.b.tor], at.TOR_Y
            _node(body, "path", d=f"M{x - 4:g} {y - 7:g}h8l-4 7z", fill=colour)
    for (near, far), count in cables.items():
        _line(body, near, far, colour, _thick(count))
    for (near, far, middle), names in joined.items():
        bend = 2 * middle - near[1] if near[1] == far[1] else middle
        path = f"M{_at(near)}Q{_at(((near[0] + far[0]) / 2, bend))} {_at(far)}"
        thick = _thick(len(names))
        curve = _node(body, "path", d=path, fill="none", stroke=colour, stroke_width=thick)
        _text(curve, "title", ", ".join(f"{n} {name}" for name, n in Counter(names).items()))


def _crosses(link: Link, place: Plot) -> Iterator[tuple[Box, str, str]]:
    """Yield the boxes that light passes, and between which of their ports."""
    a, b = place.box_of[link.a.switch], place.box_of[link.b.switch]
    if not link.trunks:
        yield a, link.a.tor, link.b.tor
        return
    core = place.box_of[link.trunks[0].core]
    yield a, link.a.tor, core.name
    yield core, a.name, b.name
    yield b, core.name, link.b.tor


def _cable(part: Uplink | Trunk, place: Plot) -> tuple[Point, Point]:
    """Return the ends of the line that an uplink or a trunk is."""
    if isinstance(part, Uplink):
        return (place.tors[part.tor], float(at.TOR_Y)), place.box_of[part.switch].ports[part.tor]
    low, high = place.box_of[part.aggregation], place.box_of[part.core]
    return low.ports[high.name], high.ports[low.name]


def _thick(count: int) -> float:
    return round(min(5.0, 1.6 + 0.6 * log2(count)), 1)


# -- strokes ---------------------------------------------------------------------------------------


def _node(parent: ET.Element | None, tag: str, **given: object) -> ET.Element:
    """Append an element; underscores in names of attributes are hyphens."""
    attributes = {
        key.replace("_", "-"): f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in given.items()
    }
    return ET.Element(tag, attributes) if parent is None else ET.SubElement(parent, tag, attributes)


def _text(parent: ET.Element, tag: str, text: str, **given: object) -> None:
    """Append an element with text, without characters that no XML can hold."""
    _node(parent, tag, **given).text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _say(
    parent: ET.Element,
    where: Point,
    text: str,
    *,
    size: int = 11,
    anchor: str = "middle",
    wide: float = 0,
) -> None:
    """Write a line of text; smaller, then cut, where it would not fit in `wide`."""
    if wide:
        size = max(8, min(size, int(wide / (0.62 * max(1, len(text))))))
        fits = max(1, int(wide / (0.55 * size)))
        text = text if len(text) <= fits else f"{text[: fits - 1]}…"
    x, y = where
    _text(parent, "text", text, x=x, y=y, fill=INK, font_size=size, text_anchor=anchor)


def _line(parent: ET.Element, a: Point, b: Point, stroke: str, wide: float) -> None:
    _node(parent, "path", d=f"M{_at(a)}L{_at(b)}", fill="none", stroke=stroke, stroke_width=wide)


def _rect(
    parent: ET.Element, where: Point, size: Point, *, fill: str, stroke: str, rx: int = 2
) -> ET.Element:
    (x, y), (wide, high) = where, size
    return _node(parent, "rect", x=x, y=y, width=wide, height=high, fill=fill, stroke=stroke, rx=rx)


def _at(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"
