"""Decides which reply is cut, lost or the last one. Pure: it counts, others act."""

from __future__ import annotations

from enum import Enum, auto

from drivers.emulators.config import Faults
from drivers.emulators.faces import Answer


class Fate(Enum):
    """What becomes of one reply."""

    SEND = auto()
    LOSE = auto()
    """It is never sent."""
    CUT = auto()
    """Half of it is sent, then the line closes."""
    DIE = auto()
    """Half of it is sent, then the unit is dead."""
    REBOOT = auto()
    """Half of it is sent, then the unit starts afresh."""


class Fates:
    """Counts change commands and query replies over all lines of one unit.

    A change that has no reply of its own (a silent set) loses the next one on the same line: that
    is the caller's business, told by `Fate.LOSE` for an empty reply.
    """

    def __init__(self, faults: Faults) -> None:
        self.replace(faults)

    def replace(self, faults: Faults) -> None:
        """Judge by these faults from now on, counting from here."""
        self._faults = faults
        self._changes = 0
        self._replies = 0

    def of(self, answer: Answer) -> Fate:
        """Return the fate of this reply."""
        before = self._changes
        self._changes += len(answer.changes)
        self._replies += answer.is_query
        faults = self._faults
        if before < faults.die_on_command <= self._changes:
            return Fate.DIE
        if before < faults.reboot_on_command <= self._changes:
            return Fate.REBOOT
        if before < faults.lose_reply <= self._changes:
            return Fate.LOSE
        if answer.is_query and self._replies == faults.cut_reply:
            return Fate.CUT
        return Fate.SEND
