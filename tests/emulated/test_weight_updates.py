"""New weights in the paced engine: copied from a file, verified, and served with while it runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from agents.generation.shards import Tensors
from agents.weights_file import Corrupt, Tensor, read_header, write
from harness.clock import NS_PER_MS
from harness.errors import BadFile
from harness.model.placement import Instance
from harness.wire.generation import (
    Admission,
    Build,
    Built,
    EngineSpec,
    UpdateWeights,
    WeightsUpdated,
)
from harness.wire.messages import Done, Failure
from tests.emulated.generation_node import PROFILE, SCRIPTED, layout, node, run, scripted

pytestmark = pytest.mark.emulated

PACED = (sys.executable, "-m", "agents.generation.rank")
SPEC = EngineSpec(engine="paced", profile=PROFILE, bytes_scale=1e-5, block_tokens=16)


def file_of(folder: Path, seed: int = 1, sizes: tuple[int, ...] = (70_000, 1, 30_000)) -> Path:
    chance, path = np.random.default_rng(seed), folder / f"weights-{seed}.safetensors"
    tensors = [
        Tensor(f"layer.{number}", "U8", (size,), chance.bytes(size))
        for number, size in enumerate(sizes)
    ]
    write(path, tensors)
    return path


def update(path: Path | str, version: int, *instances: Instance, drop_kv: bool) -> UpdateWeights:
    names = tuple(instance.name for instance in instances)
    return UpdateWeights(instances=names, version=version, source=str(path), drop_kv=drop_kv)


@pytest.mark.parametrize("size", [1, 999, 100_001, 250_000])
@pytest.mark.parametrize("first", [0, 69_999, 100_000, 700_000])
def test_a_shard_is_the_files_bytes_from_a_place_on_round_its_end(
    tmp_path: Path, size: int, first: int
) -> None:
    path = file_of(tmp_path)
    data = path.read_bytes()[read_header(path).begins :]
    into = np.empty(size, np.uint8)
    Tensors(str(path)).fill(into, first)
    start = first % len(data)
    assert into.tobytes() == (data * 4)[start : start + size]


def test_a_byte_that_has_changed_is_found_by_tensor_by_whoever_touches_it(tmp_path: Path) -> None:
    path = corrupted(file_of(tmp_path), 70_005)
    Tensors(str(path)).fill(np.empty(100, np.uint8), 0)
    with pytest.raises(Corrupt, match=r"layer\.2 is corrupt"):
        Tensors(str(path)).fill(np.empty(100, np.uint8), 99_000)


def corrupted(path: Path, at: int) -> Path:
    data = bytearray(path.read_bytes())
    data[read_header(path).begins + at] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("text", [b"", b"x" * 100])
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "odd"
    path.write_bytes(text)
    with pytest.raises(BadFile, match="odd"):
        Tensors(str(path))
    with pytest.raises(BadFile, match="No such file"):
        Tensors(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("drop_kv", [False, True])
def test_running_requests_go_on_with_the_new_version(tmp_path: Path, drop_kv: bool) -> None:
    async def test() -> None:
        async with node(tmp_path, PACED) as n:
            await n.open(SPEC, gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair])
            await n.submit(pair, "a", "b", tokens=60)
            while not n.outputs:
                await n.watch()
            assert n.last is not None
            before = n.last.stats[pair.name].prefilled_tokens
            path = file_of(tmp_path)
            updated = await n.ask(update(path, 5, pair, drop_kv=drop_kv), WeightsUpdated)
            assert updated.moved_bytes > 0
            assert [span.stage for span in updated.spans] == ["weights"]
            await n.finished("a", "b")
            for name in ("a", "b"):
                assert n.positions(name) == list(range(60))
                versions = [o.version for o in n.outputs if o.id == name and o.count]
                assert versions == sorted(versions)
                assert (versions[0], versions[-1]) == (0, 5)
            assert n.last is not None
            after = n.last.stats[pair.name].prefilled_tokens
            assert (after > before) == drop_kv, "KV is computed anew just where it is dropped"

    run(test())


def test_a_closed_engine_takes_weights_and_waiting_requests_get_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, PACED) as n:
            await n.open(SPEC, gpus=1)
            (one,) = layout("1xTP1", 1)
            await n.build([one])
            await n.ask(Admission(instances=(one.name,), open=False), Done)
            await n.submit(one, "a", tokens=5)
            await n.ask(update(file_of(tmp_path), 2, one, drop_kv=True), WeightsUpdated)
            await n.ask(Admission(instances=(one.name,), open=True), Done)
            await n.finished("a")
            assert {output.version for output in n.outputs} == {2}

    run(test())


def test_an_engine_built_anew_has_the_files_weights_and_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, PACED) as n:
            (one,) = instances = layout("1xTP1", 1)
            await n.open(SPEC, gpus=1, prebuild=[instances])
            path = file_of(tmp_path)
            for strategy in ("rebuild", "restart", "pool"):
                asked = Build(instances=instances, strategy=strategy, version=7, source=str(path))
                await n.ask(asked, Built)
                await n.submit(one, strategy, tokens=3)
                await n.finished(strategy)
                assert n.outputs[-1].version == 7
                await n.tear_down(instances, strategy)
            broken = corrupted(path, 0)
            asked = Build(instances=instances, strategy="rebuild", version=8, source=str(broken))
            failed = await n.fails(asked)
            assert "layer.0 is corrupt" in failed.text
            assert (await n.watch(0)).stats == {}
            await n.build(instances)

    run(test())


def test_a_corrupt_file_kills_whom_it_reached_and_a_missing_one_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, PACED) as n:
            ones = layout("2xTP1", 2)
            await n.open(SPEC, gpus=2)
            await n.build(ones)
            missing = await n.fails(update("/nowhere", 1, *ones, drop_kv=True))
            assert missing.error == "BadFile"
            assert "/nowhere: No such file" in missing.text
            assert not (await n.watch(0)).dead
            path = file_of(tmp_path)
            await n.ask(update(path, 1, *ones, drop_kv=True), WeightsUpdated)
            older = await n.fails(update(path, 0, *ones, drop_kv=True))
            assert "older" in older.text
            failed = await n.fails(update(corrupted(path, 9), 2, *ones, drop_kv=True))
            assert failed.error == "InstanceDead"
            for one in ones:
                assert f"{one.name}: " in failed.text
                assert "layer.0 is corrupt" in await n.death_of(one)
            await n.build(ones)

    run(test())


def test_one_instance_that_fails_is_dead_and_named_and_the_other_serves_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, SCRIPTED) as n:
            good, bad = layout("2xTP1", 2)
            await n.open(scripted(odd={"1": "raises in update"}), gpus=2)
            await n.build([good, bad])
            failed = await n.fails(update("", 3, good, bad, drop_kv=True))
            assert failed.error == "InstanceDead"
            assert bad.name in failed.text
            assert good.name not in failed.text
            assert "the device fell off the bus" in await n.death_of(bad)
            await n.submit(good, "a", tokens=3)
            while "finished" not in {output.ended for output in n.outputs}:
                await n.watch()
            assert {output.version for output in n.outputs} == {3}

    run(test())


def test_an_instance_that_refuses_what_the_other_took_is_dead_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, SCRIPTED) as n:
            good, bad = layout("2xTP1", 2)
            await n.open(scripted(odd={"1": "refuses an update"}), gpus=2)
            await n.build([good, bad])
            failed = await n.fails(update("", 3, good, bad, drop_kv=True))
            assert failed.error == "InstanceDead"
            assert f"{bad.name}: its weights were not updated" in failed.text
            assert await n.death_of(bad)
            alone = await n.fails(update("", 4, bad, drop_kv=True))
            assert alone.error == "InstanceDead"

    run(test())


def test_while_engines_change_weights_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, SCRIPTED) as n:
            (one,) = layout("1xTP1", 1)
            await n.open(scripted(odd={"0": "updates slowly"}), gpus=1)
            await n.build([one])
            first = asyncio.create_task(n.say(update("", 1, one, drop_kv=True)))
            await asyncio.sleep(0)
            busy = await n.fails(update("", 2, one, drop_kv=True))
            assert busy == Failure(error="Busy", text="update_weights is under way on this node")
            assert isinstance(await first, WeightsUpdated)
            await n.submit(one, "a", tokens=2)
            await n.finished("a")
            assert {output.version for output in n.outputs} == {1}

    run(test())


def test_a_rank_that_hangs_in_an_update_is_named_by_the_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, SCRIPTED) as n:
            (one,) = layout("1xTP1", 1)
            await n.open(scripted(odd={"0": "hangs in update"}), gpus=1)
            await n.build([one])
            failed = await n.fails(update("", 1, one, drop_kv=True), 300 * NS_PER_MS)
            assert failed.error == "InstanceDead"
            assert "update_weights was not done in time" in failed.text
            assert await n.death_of(one)

    run(test())
