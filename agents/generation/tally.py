"""What a rank knows of the requests in vLLM, and vLLM's own counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from harness.model.requests import Carried


@dataclass
class Running:
    """A request here: as it came, and what has become of it since."""

    carried: Carried
    inner: Any
    """vLLM's own request, in its scheduler."""
    produced_tokens: int = 0
    version_first: int | None = None
    version_last: int | None = None
    first_token_ns: int | None = None

    @property
    def next_token(self) -> int:
        """Position of the next token in the response."""
        return self.carried.produced_tokens + self.produced_tokens

    def leaves(self) -> Carried:
        """Return it as it would leave now."""
        before = self.carried
        return msgspec.structs.replace(
            before,
            produced_tokens=self.next_token,
            kv_tokens=self.inner.num_computed_tokens,
            version_first=self.version_first
            if before.version_first is None
            else before.version_first,
            version_last=before.version_last if self.version_last is None else self.version_last,
            preemptions=before.preemptions + self.inner.num_preemptions,
            first_token_ns=before.first_token_ns or self.first_token_ns,
        )


@dataclass
class Totals:
    """vLLM's own counts since the engine was built; it is handed to vLLM as its stat logger."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def restart(self) -> None:
        """Count from nothing again: the engine has been woken."""
        vars(self).update(vars(Totals()))

    def record(self, _scheduler: Any, iteration: Any, *_rest: Any, **_others: Any) -> None:
        """Count one step (vLLM calls this)."""
        if iteration is not None:
            self.generated_tokens += iteration.num_generation_tokens
            self.prefilled_tokens += iteration.prompt_token_stats.computed
            self.cached_tokens += iteration.prompt_token_stats.cached_tokens
            self.preemptions += iteration.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Say nothing (vLLM calls this)."""

    def log(self) -> None:
        """Say nothing (vLLM calls this)."""

    def record_sleep_state(self, *_state: int) -> None:
        """Know it already (vLLM calls this)."""
