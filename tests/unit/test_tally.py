"""What is told of a request that leaves vLLM, and of an engine that wakes."""

from __future__ import annotations

from types import SimpleNamespace

from agents.generation.tally import Running, Totals
from harness.model.requests import Carried


def test_a_request_that_leaves_again_keeps_what_its_first_stay_gave_it() -> None:
    inner = SimpleNamespace(num_computed_tokens=12, num_preemptions=1)
    came = Carried(
        id="a", prompt_tokens=8, response_tokens=20, arrived_ns=1, produced_tokens=4,
        version_first=3, version_last=3, preemptions=2, first_token_ns=77,
    )  # fmt: skip
    stay = Running(came, inner)
    stay.version_first = stay.version_last = 5
    left = stay.leaves()
    assert (left.version_first, left.version_last) == (3, 5)
    assert (left.first_token_ns, left.preemptions, left.kv_tokens) == (77, 3, 12)


def test_a_woken_engine_tells_of_its_own_time_only() -> None:
    totals = Totals(generated_tokens=9, steps=4, first_token_ns=5, last_token_ns=6)
    totals.restart()
    assert totals == Totals()
