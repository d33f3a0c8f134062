"""Why links must not be made: not ours, broken, not cabled so, or ports used twice. Pure.

The last look at a plan before it is carried out, whoever made it: nothing is raised, the reason is
told. Broken things go by their names: an uplink (``tor0:u1``), a trunk by either end
(``agg0:5``, ``core0:1``), a switch, a ToR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from harness.fabric.blame import Part, parts_of, switch_ports
from harness.fabric.links import Link, Uplink
from harness.fabric.topology import Plane, Topology


def refusal(topology: Topology, links: Collection[Link], broken: Collection[str] = ()) -> str:
    """Return the first reason why these links must not be made together, or ""."""
    cabled = _cabled(topology)
    faulty = [link for link in links if any(_faults(topology, cabled, link, broken))]
    if faulty:
        return next(_faults(topology, cabled, min(faulty), broken))
    return _doubled(links)


def sound(
    topology: Topology, links: Iterable[Link], broken: Collection[str] = ()
) -> frozenset[Link]:
    """Return those of the links that can carry traffic."""
    cabled = _cabled(topology)
    return frozenset(each for each in links if not any(_faults(topology, cabled, each, broken)))


def _cabled(topology: Topology) -> frozenset[Part]:
    return frozenset((*topology.uplinks, *topology.trunks))


def _faults(
    topology: Topology, cabled: frozenset[Part], link: Link, broken: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong with one link by itself."""
    yield from _faults_of_way(topology, link)
    for part in parts_of(link):
        if part not in cabled:
            yield f"{part} is not cabled so on this bench"
        for name in _names(part):
            if name in broken:
                yield f"{name} is broken"
        for switch, port in sorted(switch_ports(part)):
            if switch in broken:
                yield f"{switch} is broken"
            if port not in topology.ours.get(switch, ()):
                yield f"port {port} of {switch} is not ours"


def _names(part: Part) -> tuple[str, str]:
    """Return what breaks it, but for its switches: an uplink goes with its ToR, a trunk has two."""
    if isinstance(part, Uplink):
        return str(part), part.tor
    return str(part), f"{part.core}:{part.ingress}"


def _faults_of_way(topology: Topology, link: Link) -> Iterator[str]:
    """Yield why its light would not get from one end to the other as it should."""
    if link.a.tor == link.b.tor:
        yield f"{link} joins {link.a.tor} with itself"
    at = link.a.switch
    for trunk in link.trunks:
        at = {trunk.aggregation: trunk.core, trunk.core: trunk.aggregation}.get(at, "")
    if at != link.b.switch:
        yield f"no light gets from {link.a} to {link.b} as {link} has it"
        return  # nor has it circuits that could be named
    for switch in link.switches if not link.both else ():
        if topology.planes.get(switch, Plane(switch)).duplex:
            yield f"{link} leads one way, but circuits of {switch} are duplex"


def _doubled(links: Iterable[Link]) -> str:
    """Return which port two links want, or ""."""
    circuits = [each for link in links for each in link.circuits]
    for side, name in enumerate(("ingress", "egress")):
        used = Counter((switch, circuit[side]) for switch, circuit in circuits)
        doubled = min((at for at, times in used.items() if times > 1), default=None)
        if doubled:
            return f"{name} port {doubled[1]} of {doubled[0]} is used twice"
    return ""
