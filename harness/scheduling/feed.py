"""When do a step's requests come? Once, as they arrived; then again and again, as long as asked.

Pure. In each pass a request has an id of its own, for a run knows every request by its id.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.model.replay import ReplayRequest


class Feed:
    """The requests of step `number` of a run, which began at `begin_ns`; in order of arrival."""

    def __init__(self, requests: Sequence[ReplayRequest], number: int, begin_ns: int) -> None:
        self._requests, self._number, self._begin_ns = requests, number, begin_ns
        self._handed = 0
        self.ids: list[str] = []
        """Of all that were handed out."""

    @property
    def over(self) -> bool:
        """Whether all have come once."""
        return self._handed >= len(self._requests)

    def next_ns(self, now_ns: int) -> int | None:
        """Return when the next one arrives that has not yet."""
        if self.over:
            return None
        arrives_ns = self._begin_ns + self._requests[self._handed].arrival_ns
        return arrives_ns if arrives_ns > now_ns else None

    def due(self, seats: int, now_ns: int, *, repeat: bool) -> list[ReplayRequest]:
        """Hand out as many as have come, to `seats`; after the first pass, only to `repeat`."""
        handed: list[ReplayRequest] = []
        while len(handed) < seats and (repeat if self.over else not self.next_ns(now_ns)):
            pass_, place = divmod(self._handed, len(self._requests))
            request = self._requests[place]
            id_ = f"{self._number}.{pass_}/{request.id}"
            handed.append(msgspec.structs.replace(request, id=id_))
            self._handed += 1
        self.ids += [request.id for request in handed]
        return handed
