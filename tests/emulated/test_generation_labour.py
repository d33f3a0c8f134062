"""Engines come, change shape and go on a node; a scripted engine in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from generation_node import layout, node, run, scripted

pytestmark = pytest.mark.emulated

FLAVOURS = pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])


@FLAVOURS
def test_requests_run_to_their_end_in_every_shape(tmp_path: Path, lockstep: bool) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            opened = await n.open(scripted(lockstep=lockstep), gpus=2)
            assert opened.facts["engine"] == "scripted"
            assert opened.warnings == ("nothing is computed",)
            for number, text in enumerate(("2xTP1", "1xTP2", "2xTP1")):
                instances = layout(text, 2)
                built = await n.build(instances)
                assert set(built.capacities) == {item.name for item in instances}
                assert {s.stage for s in built.spans} == {"groups", "weights", "kv_cache"}
                for item in instances:
                    assert len(built.kv_peers[item.name]) == len(item.gpus)
                    assert built.capacities[item.name].weights_bytes == 10 * len(item.gpus)
                    await n.submit(item, f"{item.name} {number}")
                await n.finished(*(f"{item.name} {number}" for item in instances))
                for item in instances:
                    assert n.positions(f"{item.name} {number}") == list(range(20))
                torn = await n.tear_down(instances)
                assert [span.stage for span in torn.spans] == ["teardown"]
            assert n.living() == set(n.pids.values()), "seats are resident"

    run(test())
