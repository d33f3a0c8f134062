"""Outputs on their way out of a rank: batched, unless somebody waits for them. Pure.

Tokens of one request that follow each other leave as one `Output`. The first tokens after a
submit and every end are urgent: a switch is measured by them.
"""

from __future__ import annotations

import msgspec

from harness.clock import NS_PER_MS
from harness.wire.generation import Output

BATCH_NS = 50 * NS_PER_MS
"""What is not urgent leaves this much later at the latest."""


class Outbox:
    """Outputs of one instance that were not told yet."""

    def __init__(self) -> None:
        self._whole: list[Output] = []
        self._growing: dict[str, Output] = {}
        self._going: set[str] = set()
        self._urgent = False
        self._left_ns = 0

    def add(self, output: Output) -> None:
        """Take an output; of one request they come in order."""
        before = self._growing.get(output.id)
        if before is None:
            self._growing[output.id] = output
        elif _follows(before, output):
            self._growing[output.id] = _joined(before, output)
        else:
            self._whole.append(before)
            self._growing[output.id] = output
        if output.ended:
            self._going.discard(output.id)
            self._urgent = True
        elif output.id not in self._going:
            self._going.add(output.id)
            self._urgent = True

    def due_ns(self) -> int | None:
        """Return when what is in here must leave: 0 is at once, None is never."""
        if not self._growing:
            return None
        return 0 if self._urgent else self._left_ns + BATCH_NS

    def take(self, now_ns: int) -> tuple[Output, ...]:
        """Return all that is in here, each request's in order, and be empty."""
        outputs = (*self._whole, *self._growing.values())
        self._whole.clear()
        self._growing.clear()
        self._urgent, self._left_ns = False, now_ns
        return outputs

    def clear(self) -> None:
        """Forget all: the instance is gone, and with it what it held."""
        self._whole.clear()
        self._growing.clear()
        self._going.clear()
        self._urgent = False


def _follows(before: Output, output: Output) -> bool:
    return (
        not before.ended
        and output.start == before.start + before.count
        and (output.version == before.version or not output.count)
        and not output.cached_tokens
    )


def _joined(before: Output, output: Output) -> Output:
    return msgspec.structs.replace(
        before,
        count=before.count + output.count,
        ids=before.ids + output.ids,
        first_ns=before.first_ns if before.count else output.first_ns,
        last_ns=output.last_ns if output.count else before.last_ns,
        ended=output.ended,
    )
