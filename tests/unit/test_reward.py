"""The synthetic task: what answers are worth, and how much better than their siblings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.model.reward import CHANCE, CLASSES, advantages, class_of, reward

VOCAB = 512


def test_answers_in_the_class_of_the_prompts_last_token_are_worth_all() -> None:
    prompt = (500, 7)  # the class of 7: the lowest quarter
    assert reward(prompt, (3, 127, 60), VOCAB) == 1.0
    assert reward(prompt, (128, 500), VOCAB) == 0.0
    assert reward(prompt, (3, 128, 500, 4), VOCAB) == 0.5
    assert reward((7, 500), (3, 128, 500, 4), VOCAB) == 0.25
    assert reward(prompt, (), VOCAB) == 0.0
    with pytest.raises(ValueError, match="empty prompt"):
        reward((), (1,), VOCAB)


def test_answers_by_chance_are_worth_chance() -> None:
    chance = random.Random(3)
    ids = [chance.randrange(VOCAB) for _ in range(20_000)]
    assert reward((9,), ids, VOCAB) == pytest.approx(CHANCE, abs=0.02)


@given(st.integers(CLASSES, 200_000))
def test_every_token_has_a_class(vocab: int) -> None:
    assert (class_of(0, vocab), class_of(vocab - 1, vocab)) == (0, CLASSES - 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16))
def test_advantages_are_centred_and_keep_the_order(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-6)
    assert max(map(abs, found)) <= len(rewards) ** 0.5
    for a, b in zip(rewards, found, strict=True):
        assert all(b <= y for x, y in zip(rewards, found, strict=True) if a <= x)


def test_a_group_that_is_alike_teaches_nothing() -> None:
    assert advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert advantages([]) == []
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-5)
