"""The map file of ``harness ocs``: circuits of one switch, ``[circuits]`` with ``"1" = 17``.

Pure. What is wrong is listed with its key; `harness.model.load.load_map` adds the file.
"""

from __future__ import annotations

from drivers.base import Matching
from drivers.errors import BadMatching
from harness.model.bench import Strict


class MapFile(Strict, frozen=True):
    """Ingress port (a key, so in quotes) to egress port."""

    circuits: dict[str, int]


def map_problems(file: MapFile) -> list[str]:
    """List every key that is no port, and every port that occurs twice."""
    problems = [
        f'circuits."{key}": an ingress port is a whole number from 1 on, such as "1" = 17'
        for key in file.circuits
        if not (key.isascii() and key.isdecimal() and int(key) > 0)
    ]
    if not problems:
        try:
            matching_of(file)
        except BadMatching as error:
            problems.append(f"circuits: {error}")
    return problems


def matching_of(file: MapFile) -> Matching:
    """Return the file's circuits; raises `BadMatching` naming every port that occurs twice."""
    circuits = [(int(ingress), egress) for ingress, egress in file.circuits.items()]
    if len(set(circuits)) < len(circuits):
        raise BadMatching("one circuit is listed twice")
    return Matching.of(circuits)


def format_map(matching: Matching) -> str:
    """Write a matching as a map file."""
    return "\n".join(["[circuits]", *(f'"{a}" = {b}' for a, b in matching)])
