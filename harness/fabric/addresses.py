"""Addresses of benches that state none. Pure.

An emulated bench is all inside 198.18.0.0/15, the range reserved for benchmarking:

    198.19.<tor>.0/24     hosts of a ToR: gateway .1, nodes from .10
    198.18.128.0/18       uplinks, one address each, in the order of the bench file
    198.18.192.0/18       electrical point-to-point links, /31 each

A simulated bench, of which no packet ever bears one, takes as many as it needs: 10.0.0.0/8 for
hosts, 172.16.0.0/12 for uplinks, and 198.18.0.0/15 for the electrical path.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from ipaddress import IPv4Address

from harness.model.bench import Bench

FIRST_HOST = 10


@dataclass(frozen=True)
class AddressPlan:
    """Where each kind of address begins, as numbers; `step`: from a ToR's hosts to the next's."""

    hosts: int
    uplinks: int
    electricals: int
    step: int = 256

    def prefix(self, tor: int) -> str:
        """Return the network of a ToR's hosts."""
        return f"{self.host(tor, 0)}/{33 - self.step.bit_length()}"

    def host(self, tor: int, number: int) -> str:
        """Return an address of a ToR's network."""
        return str(IPv4Address(self.hosts + self.step * tor + number))

    def uplink(self, number: int) -> str:
        """Return that of an uplink."""
        return str(IPv4Address(self.uplinks + number))

    def electrical(self, number: int) -> str:
        """Return that of one end of a link of the electrical path."""
        return str(IPv4Address(self.electricals + number))


def address_plan(bench: Bench) -> AddressPlan:
    """Return the plan of a bench, by its world and its size."""
    if bench.world != "simulated":
        return AddressPlan(*_numbers("198.19.0.0", "198.18.128.0", "198.18.192.0"))
    nics = Counter(tor for node in bench.nodes.values() for tor in node.tors)
    most = FIRST_HOST + max(nics.values(), default=0)
    step = max(256, 1 << most.bit_length())
    return AddressPlan(*_numbers("10.0.0.0", "172.16.0.0", "198.18.0.0"), step)


def _numbers(*addresses: str) -> tuple[int, int, int]:
    hosts, uplinks, electricals = (int(IPv4Address(address)) for address in addresses)
    return hosts, uplinks, electricals
