"""The common contract of all ToRs: a whole set of routes is applied, read back, or undone.

As for switches (`drivers.apply`): only the difference is sent; a change whose reply was lost is
resolved by reading, and what remains of it is sent once more; after a refusal the routes that were
there before are put back. A driver adds how to read and how to send one change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from drivers.errors import (
    AccessDenied,
    DeviceFault,
    Indeterminate,
    LinkLost,
    Refused,
    Untrusted,
)
from drivers.tor.base import Route, check, differences

READS = 2
"""Attempts at a read-back: the first may meet the fault that made it necessary."""


class Steering(ABC):
    """A ToR as `drivers.tor.base.Tor` describes it, but for how its routes are read and sent."""

    remote: ClassVar[bool]

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: frozenset[Route] | None = None
        """What was read back last."""

    @abstractmethod
    def _read(self) -> frozenset[Route]:
        """Read the routes that bear our mark."""

    @abstractmethod
    def _send(self, before: frozenset[Route], wanted: frozenset[Route]) -> frozenset[Route] | None:
        """Send what turns `before` into `wanted`, new routes before dead ones go.

        Returns the routes read back in the same exchange, None where the device cannot do that.
        `Refused` says that it took no more than a part; after any other `DeviceFault` what it took
        is not known.
        """

    def _confirm(
        self, before: frozenset[Route], found: frozenset[Route], wanted: frozenset[Route]
    ) -> None:
        """Raise `Refused` unless what was read back is what was wanted, and is in force."""
        if found != wanted:
            raise Refused("READBACK", f"ToR {self.name}: {differences(found, wanted)}")

    def read(self) -> frozenset[Route]:
        """Return the steering routes in force."""
        return self._reach()

    def apply(self, wanted: frozenset[Route]) -> None:
        """Make `wanted` the whole set of steering routes; see `drivers.tor.base.Tor.apply`.

        What was read back last is trusted to be there still, which halves the time of a change; the
        read-back at its end finds out when that was wrong.
        """
        check(self.name, wanted)
        trusted, self._seen = self._seen, None
        if trusted is not None and trusted != wanted:
            try:
                self._seen = self._put(trusted, wanted)
            except Refused:  # perhaps because somebody else has changed our routes since
                self._seen = self._put(self._reach(), wanted)
        else:
            self._seen = self._put(self._reach(), wanted)

    def _put(self, before: frozenset[Route], wanted: frozenset[Route]) -> frozenset[Route]:
        """Turn `before` into `wanted` and return it as read back."""
        try:
            found = self._change(before, wanted)
            if found != wanted:  # a reply was lost, or somebody else has changed our routes since
                found = self._change(found, wanted)
            self._confirm(before, found, wanted)
        except Refused as refusal:
            raise self._undo(refusal, before) from refusal
        return found

    def _change(self, before: frozenset[Route], wanted: frozenset[Route]) -> frozenset[Route]:
        """Send the difference and return what is there now."""
        if before == wanted:
            return before
        try:
            found = self._send(before, wanted)
        except Refused:
            raise
        except DeviceFault as lost:
            return self._read_back(lost)
        return self._read_back(None) if found is None else found

    def _reach(self) -> frozenset[Route]:
        """Read; a session that the device ended while it was idle is opened again."""
        try:
            return self._read()
        except LinkLost:
            return self._read()

    def _read_back(self, cause: DeviceFault | None) -> frozenset[Route]:
        """Read after a change, or raise `Indeterminate`."""
        for attempt in range(READS):
            try:
                return self._read()
            except DeviceFault as fault:
                lasting = isinstance(fault, AccessDenied | Untrusted)
                if lasting or attempt == READS - 1:
                    first = f"{cause}; " if cause is not None else ""
                    raise Indeterminate(
                        f"ToR {self.name}: {first}its routes could not be read back: {fault}"
                    ) from fault
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _undo(self, refusal: Refused, before: frozenset[Route]) -> DeviceFault:
        """Put the previous routes back; return the error that tells the whole story."""
        try:
            found = self._read_back(refusal)
            told = "nothing was changed"
            if found != before:
                self._send(found, before)
                found = self._read_back(refusal)
                told = "the previous routes are restored"
        except DeviceFault as fault:
            return self._not_restored(refusal, str(fault))
        if found != before:
            return self._not_restored(refusal, differences(found, before))
        return Refused(refusal.code, f"{refusal.text} ({told})", refusal.command)

    def _not_restored(self, refusal: Refused, why: str) -> Indeterminate:
        failed = Indeterminate(
            f"ToR {self.name}: {refusal}; restoring the previous routes failed: {why}"
        )
        failed.__cause__ = refusal
        return failed
