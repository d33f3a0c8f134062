"""Which part of the fabric is at fault for links that did not come up. Pure.

A link is two uplinks and the trunks between; of a dark port it is known which of them it joins. A
part that carries another link is sound. What is left under suspicion is not planned with again:
rather an uplink too many stays dark than a run that tries the same broken port for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.fabric.links import Link, Trunk, Uplink

Part = Uplink | Trunk
"""Its name is `str(part)`: ``tor0:u1``, ``agg0:5``."""


def parts_of(link: Link) -> tuple[Part, ...]:
    """Return all that a link takes for itself, in the order of a's light."""
    return (link.a, *link.trunks, link.b)


def switch_ports(part: Part) -> frozenset[tuple[str, int]]:
    """Return the switches' ports that a part is plugged into."""
    if isinstance(part, Uplink):
        return frozenset({(part.switch, part.ingress), (part.switch, part.egress)})
    return frozenset(
        {
            (part.aggregation, part.from_core),
            (part.aggregation, part.to_core),
            (part.core, part.ingress),
            (part.core, part.egress),
        }
    )


def blamed(
    unlit: Mapping[Link, str], lit: Collection[Link], dark: Mapping[str, Collection[int]]
) -> dict[str, str]:
    """Return the names of parts that must be at fault, each with the reason of its link.

    `unlit`: links that did not come up, and why; `lit`: those that carry traffic; `dark`: by switch
    the egress ports that it says have no light.
    """
    sound = {part for link in lit for part in parts_of(link)}
    found: dict[str, str] = {}
    for link, reason in sorted(unlit.items()):
        near_dark = {
            (switch, port)
            for switch, circuit in link.circuits
            if circuit[1] in dark.get(switch, ())
            for port in circuit
        }
        parts = [p for p in parts_of(link) if not near_dark or near_dark & switch_ports(p)]
        suspects = [part for part in parts if part not in sound] or parts
        found |= {str(part): reason for part in suspects if str(part) not in found}
    return found
