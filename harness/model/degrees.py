"""Degrees of parallel training, written ``"DP2TP2"``. Pure; parsing raises `ValueError`.

A model that trains is split over all ranks at once: DP x TP x PP of them. Routed experts are split
over the ranks of DP, so EP divides DP. Degrees of 1 may be left out; ``"DP1"`` is one rank.
"""

from __future__ import annotations

import re

import msgspec

_DEGREES = re.compile(r"(?:(?:DP|TP|PP|EP)[1-9]\d{0,4})+", re.ASCII)
_DEGREE = re.compile(r"(DP|TP|PP|EP)(\d+)")


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """Data, tensor, pipeline and expert parallel degrees; DP x TP x PP ranks, EP within DP."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        parts = (("DP", self.dp), ("TP", self.tp), ("PP", self.pp), ("EP", self.ep))
        return "".join(f"{word}{degree}" for word, degree in parts if degree > 1) or "DP1"


def parse_degrees(text: str) -> Degrees:
    """Read ``"DP2TP2"``, ``"DP2PP2EP2"``, ``"TP4"``. Raises `ValueError`."""
    packed = text.replace(" ", "")
    found = dict(_DEGREE.findall(packed))
    if not _DEGREES.fullmatch(packed) or len(found) != len(_DEGREE.findall(packed)):
        raise ValueError(f'{text!r} is no layout of training such as "DP2TP2" or "DP2PP2EP2"')
    degrees = Degrees(**{word.lower(): int(degree) for word, degree in found.items()})
    if degrees.dp % degrees.ep:
        raise ValueError(
            f"{text!r}: EP {degrees.ep} does not divide DP {degrees.dp}, whose ranks share experts"
        )
    return degrees
