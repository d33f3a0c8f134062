"""Ports of many instances at once, of several agents on one machine."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from agents.generation.ports import PORTS, RANGES, NoPorts, Ports, first_port

pytestmark = pytest.mark.emulated

TAKER = """
import sys
from agents.generation.ports import Ports
ports = Ports("127.0.0.1")
taken = [ports.take() for _ in range(20)]
print(*(held.ports.start for held in taken), flush=True)
sys.stdin.read()
"""


def test_agents_of_one_machine_never_share_a_port() -> None:
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    firsts: list[int] = []
    for agent in agents:
        assert agent.stdout is not None
        firsts += map(int, agent.stdout.readline().split())
    for agent in agents:
        agent.communicate(timeout=30)
    assert len(firsts) == 80
    assert len({port for first in firsts for port in range(first, first + PORTS)}) == 80 * PORTS
    for first in firsts:
        assert first_port() <= first < first_port() + RANGES * PORTS


def test_ranges_with_a_port_in_use_are_passed_over_and_others_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agents.generation.ports.RANGES", 4)  # not all that this machine has
    allocator = Ports("127.0.0.1")
    taken = []
    with pytest.raises(NoPorts, match=f"no {PORTS} ports in a row are free on"):
        taken.extend(allocator.take() for _ in range(5))
    first = taken.pop(0)
    first.close()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", first.ports[3]))
        with pytest.raises(NoPorts):
            allocator.take()
    again = allocator.take()
    assert again.ports == first.ports
    for held in (again, *taken):
        held.close()


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(NoPorts, match=r"no port can be taken on 192\.0\.2\.1: "):
        Ports("192.0.2.1").take()
