"""Mixes placed in numbers are those that `harness.model.placement` places by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.model.layout import Layout, Mix, parse_mix
from harness.model.placement import place
from harness.scheduling.placing import Candidate, Ground, mix_of
from harness.scheduling.view import Instance

KINDS = tuple(Layout(1, tp=tp) for tp in (1, 2, 4, 8))
NODES = st.lists(st.sampled_from([0, 2, 4, 6, 8, 8, 8]), min_size=1, max_size=6)


def nodes(gpus: list[int]) -> dict[str, int]:
    return {f"g{number}": each for number, each in enumerate(gpus)}


def names_of(mix: Mix, gpus_of: Mapping[str, int]) -> dict[str, Layout]:
    return {each.name: each.layout for there in place(mix, gpus_of).values() for each in there}


def instances_of(mix: Mix, gpus_of: Mapping[str, int]) -> list[Instance]:
    return [
        Instance(each.name, node, each.layout, True, 8, 1000, 0, 0, 0)
        for node, there in place(mix, gpus_of).items()
        for each in there
    ]


def plainly(one: Candidate) -> dict[str, Layout]:
    layouts = [kind.layout for kind in one.kinds]
    return {name: layouts[kind] for name, kind in zip(one.names, one.kind, strict=True)}


@given(NODES, st.booleans())
def test_every_candidate_is_placed_as_by_name(gpus: list[int], three: bool) -> None:
    gpus_of = nodes(gpus)
    for one in Ground(gpus_of, KINDS).candidates((), three=three):
        assert list(plainly(one).items()) == list(names_of(one.mix, gpus_of).items())
        assert [kind.count for kind in one.kinds] == [part.instances for part in one.mix]
        assert (one.there == -1).all()
        assert not one.kept


@given(NODES)
def test_candidates_use_every_gpu_that_their_smallest_kind_can(gpus: list[int]) -> None:
    """None of them has room for one more of its smallest; and every way to divide is there once."""
    gpus_of = nodes(gpus)
    found = [one.mix for one in Ground(gpus_of, KINDS).candidates((), three=True)]
    assert len(set(found)) == len(found)
    for small, *rest in found:
        more = Mix((Layout(small.instances + 1, tp=small.tp), *rest))
        try:
            place(more, gpus_of)
        except UsageError:
            continue
        raise AssertionError(f"{more} fits too")
    if sum(gpus) <= 8:  # so few that all ways are looked at
        for several in [*combinations(KINDS, 2), *combinations(KINDS, 3)]:
            for counts in product(range(1, 9), repeat=len(several)):
                mix = Mix(Layout(n, tp=k.tp) for n, k in zip(counts, several, strict=True))
                if mix.gpus == sum(gpus) and _fits(mix, gpus_of):
                    assert mix in found


def _fits(mix: Mix, gpus_of: Mapping[str, int]) -> bool:
    try:
        return bool(place(mix, gpus_of))
    except UsageError:
        return False


@given(NODES, st.integers(0, 10_000))
def test_it_is_known_which_instances_are_there_already(gpus: list[int], seed: int) -> None:
    gpus_of, rng = nodes(gpus), np.random.default_rng(seed)
    mixes = [one.mix for one in Ground(gpus_of, KINDS).candidates((), three=True)]
    if not mixes:
        return
    here = instances_of(mixes[rng.integers(len(mixes))], gpus_of)
    here = [here[at] for at in rng.permutation(len(here))[: rng.integers(1, len(here) + 1)]]
    layout_of = {each.name: each.layout for each in here}
    found = Ground(gpus_of, KINDS).candidates(here, three=True)
    assert [one.kept for one in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].mix == mix_of(layout_of.values())
    assert found[-1].names == tuple(layout_of), "what there is keeps its order"
    for one in found:
        for (name, layout), at in zip(plainly(one).items(), one.there.tolist(), strict=True):
            assert (layout_of.get(name) == layout) == (at >= 0)
            assert at < 0 or here[at].name == name
        for kind in one.kinds:
            assert kind.there.tolist() == one.there[kind.at].tolist()


def test_an_instance_of_any_name_is_there() -> None:
    odd = [Instance("left", "g0", KINDS[2], True, 8, 1000, 0, 0, 0)]
    found = Ground({"g0": 8}, KINDS).candidates(odd, three=False)
    assert (found[-1].names, found[-1].kept) == (("left",), True)
    assert str(found[-1].mix) == "1xTP4"


def test_a_pool_of_more_kinds_than_are_looked_at_is_no_candidate() -> None:
    gpus_of = {"g0": 8}
    here = instances_of(parse_mix("1xTP4+1xTP2+2xTP1"), gpus_of)
    found = Ground(gpus_of, KINDS).candidates(here, three=False)
    assert not any(one.kept for one in found)
    assert all(len(one.mix) <= 2 for one in found)
    assert Ground(gpus_of, KINDS).candidates(here, three=True)[-1].kept
