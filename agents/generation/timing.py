"""Steps of a vLLM engine, timed one by one with requests made for it; every rank does the same.

Prompts are random and differ, so that no two sequences share KV. Before decoding is timed they are
prefilled once by themselves: with their KV in the prefix cache, all sequences come to decode within
a few steps of each other, at nearly the same context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from harness.model.intake import Refused
from harness.wire.generation import Capacity

Add = Callable[[str, Sequence[int], int], object]
"""``add(name, prompt, response_tokens)`` queues a request."""
_FIRST_ID = 3
"""Lower token ids commonly mean padding, begin and end."""


class Timer:
    """Of one engine that holds no request, and holds none after each call."""

    def __init__(self, engine: Any, capacity: Capacity, add: Add) -> None:
        self._engine, self._capacity, self._add = engine, capacity, add

    def decode(self, batch: int, context_tokens: int, steps: int) -> list[int]:
        """Return the ns of steps in which `batch` sequences decode. Raises `Refused`."""
        known_tokens, capacity = max(1, context_tokens - 1), self._capacity
        room_tokens = capacity.length_max_tokens - known_tokens
        lag_steps = batch * capacity.block_tokens // capacity.step_max_tokens + 2
        blocks = batch * -(-(known_tokens + lag_steps + steps + 1) // capacity.block_tokens)
        if batch > capacity.sequences_max:
            raise Refused(f"a batch of {batch} is more than the {capacity.sequences_max} in a step")
        if room_tokens < lag_steps + steps + 1:
            raise Refused(
                f"a context of {context_tokens} tokens and {steps} steps exceed the model's "
                f"{capacity.length_max_tokens}"
            )
        if blocks > capacity.blocks:
            raise Refused(
                f"{batch} sequences of {context_tokens} tokens take {blocks} KV blocks; "
                f"there are {capacity.blocks}"
            )
        prompts = {f"timed{i}": self._prompt(known_tokens, i) for i in range(batch)}
        for name, prompt in prompts.items():
            self._add(name, prompt, 1)
        for _ in self._steps():
            pass
        for name, prompt in prompts.items():
            self._add(name, prompt, room_tokens)
        going: set[str] = set()
        times_ns = []
        for elapsed_ns, outputs in self._steps():
            if len(going) == batch:
                times_ns.append(elapsed_ns)
            going |= {output.request_id for output in outputs}
            if len(times_ns) == steps:
                break
        self._clear(list(prompts))
        return times_ns

    def prefill(self, prefill_tokens: int, steps: int) -> list[int]:
        """Return the ns of steps that each prefill one new prompt. Raises `Refused`."""
        most = min(self._capacity.step_max_tokens, self._capacity.length_max_tokens - 1)
        if not 0 < prefill_tokens <= most:
            raise Refused(f"a step prefills 1 to {most} tokens of one prompt, not {prefill_tokens}")
        times_ns = []
        for number in range(steps):
            self._add("timed", self._prompt(prefill_tokens, number), 1)
            times_ns += [elapsed_ns for elapsed_ns, outputs in self._steps() if outputs]
        self._clear([])
        return times_ns

    def _prompt(self, tokens: int, number: int) -> list[int]:
        chance = np.random.default_rng(number)
        return list(map(int, chance.integers(_FIRST_ID, self._capacity.vocab, tokens)))

    def _steps(self) -> Iterator[tuple[int, list[Any]]]:
        """Step as long as there is work; yield how long each step took, and its outputs."""
        while self._engine.has_unfinished_requests():
            begin_ns = time.monotonic_ns()
            outputs = self._engine.step()
            yield time.monotonic_ns() - begin_ns, outputs

    def _clear(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        self._engine.step()  # takes what was aborted out of the batch
        self._engine.reset_prefix_cache()
